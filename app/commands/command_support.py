"""Shared code of the commands: settings, error messages, exit codes and output."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import typer

from settings import InputError, Resolved, load
from settings.loading.sources import NO_FLAGS, Flags

RUN_SUBFOLDERS = ("checkpoints", "rollouts", "eval")
"""Folders of a run directory that hold files an option may name."""

EXIT_FAILURE = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130


def resolve(
    config: str | None,
    overrides: list[str] | None,
    *,
    print_config: bool,
    check: Callable[[Resolved], None],
    flags: Flags = NO_FLAGS,
) -> Resolved:
    """Returns the checked settings and loads the secrets; with `print_config`, prints the settings and stops."""
    resolved = load(config, overrides or [], os.environ, flags)
    print_notices(resolved.notices)
    if print_config:
        write(resolved.to_yaml(), sys.stdout)
        raise typer.Exit
    check(resolved)
    from settings.loading.secrets import load_secrets

    print_notices(load_secrets(Path.cwd()))
    return resolved


class _ProgressHandler(logging.Handler):
    """Writes the log of `app` to stderr as it is at that time; lines of progress with the seconds since the start."""

    def __init__(self) -> None:
        super().__init__()
        # Information of libraries is not this program's progress.
        self.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.split(".")[0] == "app")
        self._started_s = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        is_progress = record.levelno < logging.WARNING
        write(f"[{time.monotonic() - self._started_s:5.1f} s] {text}" if is_progress else text, sys.stderr)


def show_progress(text: str) -> None:
    """Shows `text`, and until the command ends what long phases log: loading, reading, exporting, writing reports."""
    # On the root logger: libraries that call `logging.basicConfig` would add a handler there, and repeat every line.
    logging.getLogger().addHandler(_ProgressHandler())
    logger = logging.getLogger("app")
    logger.setLevel(logging.INFO)
    logger.info(text)


def _hide_progress() -> None:
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _ProgressHandler)]:
        root.removeHandler(handler)
    logging.getLogger("app").setLevel(logging.NOTSET)


def inherit_run_settings(
    config: str | None, overrides: list[str] | None, run_paths: Mapping[str, Path | None]
) -> tuple[str | None, list[str] | None]:
    """Returns `--config` and `--set`; without `--config`, those of the run, except how its hosts find each other.

    Args:
        run_paths: option -> a checkpoint, samples or a folder of the run. The first one with settings is used.

    Raises:
        InputError: no settings belong to what an option names.
    """
    run_config = find_run_config(run_paths) if config is None else None
    if run_config is None:
        return config, overrides
    from settings.loading.inherited_settings import reset_overrides

    return run_config, [*(overrides or []), *reset_overrides(run_config, overrides or [], os.environ)]


def find_run_config(run_paths: Mapping[str, Path | None]) -> str | None:
    """Returns the settings file of the run that an option names, and prints a note with its path.

    It is in the run directory, next to or above a checkpoint or a file of samples. None for a file that belongs to no
    run, which may be read under any settings, and for a path that does not exist, which its reader reports.

    Raises:
        InputError: a folder has no settings of a run; the defaults would be mistaken for them.
    """
    given = {option: path.expanduser().resolve() for option, path in run_paths.items() if path is not None}
    for option, path in given.items():
        for folder in _candidate_run_folders(path):
            if (file := folder / "settings.yaml").is_file():
                print_notices([f"{option}: uses the settings of {file}"])
                return str(file)
    for option, path in given.items():
        if path.is_dir():
            raise InputError(
                f"{option}: no settings.yaml of a run is in {path} or next to it, so its settings are not known; name "
                "a run directory or a file in it, or use --config"
            )
    return None


def _candidate_run_folders(path: Path) -> Iterator[Path]:
    """Yields the folders that may be the run directory of `path`."""
    yield from (path, path.parent)
    # Elsewhere, a settings.yaml two levels above does not belong to a run.
    if path.parent.name in RUN_SUBFOLDERS:
        yield path.parent.parent


def require_path(path: Path | None, option: str) -> Path:
    """Returns the path of an option that only `--print-config` does not require."""
    if path is None:
        raise InputError(f"missing option {option}")
    return path


@contextmanager
def handle_errors(debug: bool) -> Iterator[None]:
    """Turns an exception into a message on stderr and its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED, debug=debug)
    except InputError as error:
        _fail(f"error: {error}", EXIT_INPUT, debug=debug)
    except typer.Exit:
        raise
    except Exception as error:
        hint = "" if debug else " (--debug shows the traceback)"
        _fail(f"error: {type(error).__name__}: {error}{hint}", EXIT_FAILURE, debug=debug)
    finally:
        _hide_progress()


def _fail(message: str, code: int, *, debug: bool) -> NoReturn:
    from settings.loading.secrets import redact

    write(redact(f"{traceback.format_exc()}{message}" if debug else message), sys.stderr)
    raise typer.Exit(code)


def print_notices(notices: Sequence[str]) -> None:
    for notice in notices:
        write(f"note: {notice}", sys.stderr)


def write(text: str, stream: TextIO) -> None:
    """Writes lines; a closed pipe (`| head`) is not an error."""
    try:
        print(text.rstrip("\n"), file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def format_summary(summary: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        return format_json(summary)
    width = max(map(len, summary), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in summary.items())


def format_json(result: Any) -> str:
    return json.dumps(result, indent=2, ensure_ascii=False)
