"""What every verb does around its room: load settings, turn errors into messages and exit codes, print."""

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
"""In a run's own, with what an option may name."""

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
    """Checked settings, with secrets in place; stops after printing them when that is all that was asked."""
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
    """`--config` and `--set`: where no file is named, the run's own, but for how its hosts found each other.

    Args:
        places: option -> a checkpoint, samples or a folder of the run. The first that has settings decides.

    Raises:
        InputError: nobody knows the settings of what is there.
    """
    own = find_run_config(run_paths) if config is None else None
    if own is None:
        return config, overrides
    from settings.loading.inherit_from_run import reset_overrides

    return own, [*(overrides or []), *reset_overrides(own, overrides or [], os.environ)]


def find_run_config(run_paths: Mapping[str, Path | None]) -> str | None:
    """The settings that a run has written beside a checkpoint or a file of samples, or in the run's own folder.

    Tells where they are. None for a file of no run, which any settings may read, and where nothing is there: for
    whoever reads it to tell.

    Raises:
        InputError: a folder that should be a run's has no settings. The defaults would pass for the run's.
    """
    given = {option: path.expanduser().resolve() for option, path in run_paths.items() if path is not None}
    for option, path in given.items():
        for folder in _candidate_run_folders(path):
            if (file := folder / "settings.yaml").is_file():
                print_notices([f"{option}: under the settings of {file}"])
                return str(file)
    for option, path in given.items():
        if path.is_dir():
            raise InputError(
                f"{option}: no settings.yaml of a run is in {path} or beside it, so its settings are not known; name "
                "a run's folder or what is in it, or give --config"
            )
    return None


def _candidate_run_folders(path: Path) -> Iterator[Path]:
    """What may be a run's own folder, where `path` is that or something in it."""
    yield from (path, path.parent)
    # Anywhere else a settings.yaml two levels above is a stranger's.
    if path.parent.name in RUN_SUBFOLDERS:
        yield path.parent.parent


def require_path(path: Path | None, option: str) -> Path:
    """An option that only `--print-config` can do without."""
    if path is None:
        raise InputError(f"missing option {option}")
    return path


@contextmanager
def handle_errors(debug: bool) -> Iterator[None]:
    """Turns exceptions into a message on stderr and the exit code of its kind."""
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
    """Writes lines; a reader that has seen enough (`| head`) is no error."""
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
