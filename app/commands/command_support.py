"""Code shared by the commands: settings, error messages, exit codes and output."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import typer

from app.records.run_directory import BEST_LINK, RunDirectory, step_of_samples
from app.records.settings_history import SettingsHistory
from app.records.text_format import to_printable_lines
from settings import InputError, Resolved, Settings, load
from settings.checks.unused_settings import unused_adapter_notices
from settings.loading.backends import may_have
from settings.loading.config_file import ConfigFile
from settings.loading.printing import without_derived
from settings.loading.sources import NO_FLAGS, Flags
from settings.schema.mesh import MeshSettings
from settings.secrets import load_secrets, redact

RUN_SUBFOLDERS = ("checkpoints", "rollouts", "eval")
"""Subfolders of a run directory with files that command options accept."""
EXIT_FAILURE, EXIT_INPUT, EXIT_INTERRUPTED = 1, 2, 130


# Suppresses the tokenizer library's advice to install PyTorch, which this program does not use.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def resolve(
    config: str | ConfigFile | None,
    overrides: list[str] | None,
    *,
    print_config: bool,
    check: Callable[[Resolved], None],
    flags: Flags = NO_FLAGS,
) -> Resolved:
    """Returns the checked settings and loads the secrets; with `print_config`, prints the settings and exits."""
    resolved = load(config, overrides or [], os.environ, flags)
    print_notices(resolved.notices)
    if print_config:
        write(resolved.to_yaml(), sys.stdout)
        raise typer.Exit
    check(resolved)
    print_notices(load_secrets(Path.cwd()))
    return resolved


def resolve_policy(
    config: str | None,
    overrides: list[str] | None,
    checkpoint: Path | None,
    *,
    check: Callable[[Resolved], None],
    print_config: bool = False,
    loads_policy: bool = True,
) -> Resolved:
    """Resolves the settings as `resolve` does; without `--config`, they come from the checkpoint's run.

    Args:
        loads_policy: whether the command loads the policy; a notice then says if configured adapters are ignored.
    """
    base = inherit_run_settings(config, {"--checkpoint": checkpoint})
    resolved = resolve(base, overrides, print_config=print_config, check=check)
    require_inputs(resolved.settings, {"--checkpoint": checkpoint})
    if loads_policy and checkpoint is None:
        print_notices(unused_adapter_notices(resolved))
    return resolved


def _writes_itself(library: str) -> bool:
    """Returns whether a library, such as huggingface_hub, also prints its warnings itself."""
    return library != "root" and any(type(one) is logging.StreamHandler for one in logging.getLogger(library).handlers)


class _ProgressHandler(logging.Handler):
    """Writes log records to stderr; progress messages of `app` start with the seconds since the command started."""

    def __init__(self) -> None:
        super().__init__()
        # Drops informational messages of libraries, which do not report this program's progress.
        self.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.split(".")[0] == "app")
        self.addFilter(lambda record: not _writes_itself(record.name.split(".")[0]))
        self._started_s = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        is_progress = record.levelno < logging.WARNING
        # `sys.stderr` is looked up for every record, because tests replace it.
        write(f"[{time.monotonic() - self._started_s:5.1f} s] {text}" if is_progress else text, sys.stderr)


def show_progress(text: str) -> None:
    """Logs `text` to stderr and shows all progress messages of `app` until `command_output` ends."""
    # The handler is on the root logger, so that `logging.basicConfig`, if a library calls it, does not add another one.
    if not any(isinstance(handler, _ProgressHandler) for handler in logging.getLogger().handlers):
        logging.getLogger().addHandler(_ProgressHandler())
    logger = logging.getLogger("app")
    logger.setLevel(logging.INFO)
    logger.info(text)


class _LastingStream:
    """A stream that discards output once its reader, such as `| head`, has closed it, so that the run continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._unless_closed(self._stream.write, text) or len(text)

    def flush(self) -> None:
        self._unless_closed(self._stream.flush)

    def _unless_closed(self, call: Callable[..., Any], *arguments: str) -> Any:
        try:
            return call(*arguments)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def command_output() -> Iterator[None]:
    """Keeps stdout and stderr usable in the block, even if their readers close them; then ends `show_progress`."""
    # A stream is None if its descriptor was closed at the start, as by `>&-`.
    streams: list[Any] = [stream and _LastingStream(stream) for stream in (sys.stdout, sys.stderr)]
    try:
        with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
            yield
    finally:
        root = logging.getLogger()
        for handler in [handler for handler in root.handlers if isinstance(handler, _ProgressHandler)]:
            root.removeHandler(handler)
        logging.getLogger("app").setLevel(logging.NOTSET)


def inherit_run_settings(
    config: str | None, run_paths: Mapping[str, Path | None], *, is_quiet: bool = False
) -> str | ConfigFile | None:
    """Returns the given `--config`; without it, the settings of the run that `find_run_settings` finds."""
    found = find_run_settings(run_paths, is_quiet=is_quiet) if config is None else None
    return config if found is None else without_derived(found)


def find_run_settings(run_paths: Mapping[str, Path | None], *, is_quiet: bool = False) -> ConfigFile | None:
    """Returns the settings of the first run to which an option's path belongs, and prints a note that names their file.

    For a checkpoint or a file of samples, these are the settings of its step; for other paths, of the last session.
    Returns None for a file outside a run, which can be read with any settings, and for a path that does not exist,
    which causes an error when it is read.

    Args:
        run_paths: option -> checkpoint, samples or folder of the run.
        is_quiet: whether to omit the note.

    Raises:
        InputError: a folder does not belong to a run. Reading it with the default settings would give wrong results.
    """
    given = {option: path.expanduser().resolve() for option, path in run_paths.items() if path is not None}
    for option, path in given.items():
        # Outside these subfolders, a settings.yaml two levels above `path` does not belong to its run.
        above = [path.parent.parent] if path.parent.name in RUN_SUBFOLDERS else []
        runs = [run for run in map(RunDirectory, (path, path.parent, *above)) if run.has_settings]
        if runs:
            is_checkpoint = path.name.isdigit() and path.parent == runs[0].checkpoints_dir
            step = int(path.name) if is_checkpoint else step_of_samples(path)
            history = SettingsHistory.read(runs[0])
            file = (history.periods[-1] if step is None else history.period_of(step)).file
            print_notices([] if is_quiet else [f"{option}: using the settings in {file.name}", *history.gaps])
            return file
    for option, path in given.items():
        if path.is_dir():
            raise InputError(
                f"{option}: no settings.yaml of a run was found in {path} or next to it, so the settings are unknown; "
                "pass a run directory or a file in one, or use --config"
            )
    return None


def require_path(path: Path | None, option: str) -> Path:
    """Returns the path given for a required option; raises InputError if the option is missing."""
    if path is None:
        raise InputError(f"missing option {option}; add {option} PATH")
    return path


def runs_alone(mesh: MeshSettings) -> bool:
    """Returns whether no other host can join. JAX is not loaded yet, so a TPU host counts as one of several."""
    return mesh.coordinator_address is None and not (mesh.platform in ("auto", "tpu") and may_have("tpu"))


def require_inputs(settings: Settings, inputs: Mapping[str, Path | None]) -> None:
    """Raises InputError if a path that an option names does not exist, before JAX is loaded.

    With several hosts, missing files are found after they have joined.
    """
    for option, path in inputs.items():
        if runs_alone(settings.mesh) and path is not None:
            require_input(option, path)


def require_input(option: str, path: Path) -> None:
    """Raises InputError if a path that an option names does not exist."""
    if not path.expanduser().exists():
        hint = "correct the path"
        # A run may have no best checkpoint, so this is not reported as a typo.
        if path.name == BEST_LINK and path.parent.is_dir():
            hint = "nothing was evaluated in that run, or nothing better than its start; give <run>/checkpoints/<step>"
        raise InputError(f"{option}: {path.expanduser().absolute()}: no such file or folder; {hint}")


def refuse_existing(outputs: Mapping[str, Path | None], *, overwrite: bool, resumes: bool = False) -> None:
    """Raises InputError if an output file exists and must not be replaced. Several hosts call it together.

    Args:
        outputs: option -> the file that it names, or None.
        resumes: whether an output is accepted if its part files exist, since a killed command may not have removed
            them.
    """
    from app.records.partial_samples import part_paths

    with checked_by_process_0() as is_checked:
        for option, path in outputs.items() if is_checked else ():
            if path is not None and path.is_file() and not (overwrite or (resumes and part_paths(path))):
                way = ", or add --overwrite" if option.startswith("--") else ""  # arguments in Python have no dashes
                raise InputError(f"{option}: {path} exists already; delete it or give another name{way}")


@contextmanager
def checked_by_process_0() -> Iterator[bool]:
    """Yields whether this process checks inputs: only process 0 after the hosts have joined, else every process."""
    if sys.modules.get("jax") is None:
        yield True
        return
    from app.distributed.collectives import error_barrier, is_process_0

    with error_barrier():
        yield is_process_0()


@contextmanager
def handle_errors(debug: bool) -> Iterator[None]:
    """Turns an exception in the block into a message on stderr and an exit code."""
    with command_output():
        try:
            yield
        except typer.Exit:
            raise
        except (Exception, KeyboardInterrupt) as error:
            message, code = f"error: {error}", EXIT_INPUT
            if isinstance(error, KeyboardInterrupt):
                message, code = "interrupted", EXIT_INTERRUPTED
            elif not isinstance(error, InputError):
                hint = "" if debug else " (--debug shows the traceback)"
                message, code = f"error: {type(error).__name__}: {error}{hint}", EXIT_FAILURE
            write(redact(f"{traceback.format_exc()}{message}" if debug else message), sys.stderr)
            raise typer.Exit(code) from None


def print_notices(notices: Sequence[str]) -> None:
    """Prints each notice on a line of stderr."""
    for notice in notices:
        write(f"note: {notice}", sys.stderr)


def write(text: str, stream: TextIO) -> None:
    """Writes text and a newline, without control characters: values may come from untrusted files."""
    print(to_printable_lines(text.rstrip("\n")), file=stream, flush=True)


def print_result(result: Any, *, as_json: bool, text: str | None = None) -> None:
    """Prints a result to stdout; prints nothing if it is None, as on processes other than 0.

    Args:
        result: a mapping, a list of mappings, or a report with `to_dict` and `to_text`.
        text: the human-readable form, if it differs from the default one.
    """
    if result is None:
        return
    if as_json:
        values = result if isinstance(result, dict | list) else result.to_dict()
        text = json.dumps(values, indent=2, ensure_ascii=False)
        # JSON escapes differently from `write`.
        write(re.sub(r"[^\n -~]", lambda match: _json_escape(match[0]), text), sys.stdout)
    else:
        default = _format_summary if isinstance(result, dict | list) else type(result).to_text
        write(default(result) if text is None else text, sys.stdout)


def _json_escape(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]


def _format_summary(summary: dict[str, Any] | list[dict[str, Any]]) -> str:
    if isinstance(summary, list):
        return "\n\n".join(map(_format_summary, summary))
    width = max(map(len, summary), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in summary.items())
