"""What every verb does around its room: load settings, turn errors into messages and exit codes, print."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import typer

from settings import InputError, Resolved, load
from settings.layers import NO_FLAGS, Flags

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
    tell(resolved.notices)
    if print_config:
        write(resolved.to_yaml(), sys.stdout)
        raise typer.Exit
    check(resolved)
    from settings.secrets import load_secrets

    tell(load_secrets(Path.cwd()))
    return resolved


def config_of_run(path: Path | None) -> str | None:
    """The settings that a run has written beside a checkpoint or a file of samples, or in the run's own folder."""
    if path is None:
        return None
    resolved = path.expanduser().resolve()
    # <run>, <run>/checkpoints, <run>/checkpoints/<step> and <run>/rollouts/<file> at the most.
    beside = (folder / "settings.yaml" for folder in (resolved, *resolved.parents[:2]))
    return next((str(file) for file in beside if file.is_file()), None)


def required(path: Path | None, option: str) -> Path:
    """An option that only `--print-config` can do without."""
    if path is None:
        raise InputError(f"missing option {option}")
    return path


@contextmanager
def errors_for_people(debug: bool) -> Iterator[None]:
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


def _fail(message: str, code: int, *, debug: bool) -> NoReturn:
    from settings.secrets import redacted

    write(redacted(f"{traceback.format_exc()}{message}" if debug else message), sys.stderr)
    raise typer.Exit(code)


def tell(notices: Sequence[str]) -> None:
    for notice in notices:
        write(f"note: {notice}", sys.stderr)


def write(text: str, stream: TextIO) -> None:
    """Writes lines; a reader that has seen enough (`| head`) is no error."""
    try:
        print(text.rstrip("\n"), file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def as_text(summary: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        return json_text(summary)
    width = max(map(len, summary), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in summary.items())


def json_text(result: Any) -> str:
    return json.dumps(result, indent=2, ensure_ascii=False)
