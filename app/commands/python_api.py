"""Implements the functions of `grpo.py`, which documents them: each runs a command with Python values as options."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from app.commands.addresses import local_inputs, name_run
from app.commands.command_support import (
    EXIT_INTERRUPTED,
    command_output,
    refuse_existing,
    resolve,
    resolve_policy,
    show_progress,
)
from app.commands.score import score_file
from app.records.atomic_write import write_atomic
from app.records.jsonl import read_jsonl, to_json_line
from app.records.run_directory import Resume, RunDirectory, check_run_directory, is_address
from app.records.shared_rows import SharedRows
from app.records.typed_values import to_json
from app.reward.function_pool import register_callables
from settings import InputError, load
from settings.checks.commands import check_for_evaluation, check_for_rollout, check_for_score, check_for_train
from settings.errors import join_words
from settings.loading.fields import suggest_fields
from settings.loading.sources import set_options
from settings.schema.reward import CALLABLE_PREFIX

if TYPE_CHECKING:
    from app.evaluation.printed_summary import EvaluationSummary
    from app.training.train import TrainingRun

OPTION = re.compile(
    r"(?<![\w./-])--(allow-changed|checkpoint|config|input|limit|out|resume|role|set)\b(?!-)"
    r"(?: (auto|must|never|policy|reference|critic|reward)\b)?"
)
"""Matches an option in an error message, with its value for `--resume` and `--role`."""
ALLOWED_CHANGES = re.compile(r"--allow-changed [\w.]*\w(?: --allow-changed [\w.]*\w)*")
ARGUMENTS = {"set": "overrides", "input": "samples", "allow-changed": "allow_changed"}
"""Maps a command option to the Python argument in its place, if their names differ."""


@dataclass(frozen=True)
class Samples:
    """The samples written by a command, and the summary that it prints."""

    records: Sequence[Mapping[str, Any]] = field(repr=False)
    """One dict per sample, with the fields of a sample file, such as `uid`, `prompt` and `completion`."""
    summary: Mapping[str, Any]


def train(*, data, eval_data, on_step, resume, allow_changed, unknown, **given: Any) -> TrainingRun:
    if unknown:
        raise InputError(
            f"{', '.join(unknown)}: grpo.train has no such argument; settings are given as overrides={{NAME: VALUE}}, "
            f"reward functions as `rewards`, rows as `data`{''.join(suggest_fields(name)[1] for name in unknown)}"
        )
    if resume not in get_args(Resume):
        raise InputError(f"resume: expected {join_words(get_args(Resume))}, got {resume!r}")
    if threading.current_thread() is not threading.main_thread():
        raise InputError("grpo.train handles signals, which only the main thread can do; call it in the main thread")
    with _call("train", **given) as (config, options, _, _):
        loaded = name_run(load(config, options, os.environ), resume)
        run, every = RunDirectory.from_settings(loaded.settings.run), loaded.settings.eval.every_steps
        files = {"data.source": run.data_dir / "train.jsonl", "data.eval_source": run.data_dir / "eval.jsonl"}
        given_rows = [one for one in zip(files, (data, eval_data), strict=True) if one[1] is not None]
        lines = {setting: _to_lines(rows, files[setting]) for setting, rows in given_rows}
        if data is not None or eval_data is not None:
            check_run_directory(run, resume, is_mirrored=is_address(loaded.settings.run.dir))
        has_held_out = eval_data is not None or loaded.provenance["data.eval_source"] not in ("default", "derived")
        if every and data is not None and not has_held_out:
            raise InputError(
                f"eval_data: the run evaluates every {every} steps, but all rows of `data` are used for training; "
                "pass held-out rows as eval_data, set data.eval_source, or set eval.every_steps to 0"
            )
        options += set_options({setting: _write_lines(content, files[setting]) for setting, content in lines.items()})
        resolved = name_run(resolve(config, options, print_config=False, check=check_for_train), resume)
        from app.training.train import train

        result = train(resolved, resume=resume, allow_changed=allow_changed, on_step=on_step)
    if result.exit_code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(f"{run.path} has a checkpoint of the last whole step; continue it with resume='auto'")
    return result


def evaluate(*, checkpoint, data, out, **given: Any) -> EvaluationSummary | None:
    with _call("evaluate", checkpoint=checkpoint, out=out, **given) as (config, options, folder, paths):
        checkpoint, out = paths["--checkpoint"], paths["--out"]
        options += _data_options("data.eval_source", data, folder / "eval.jsonl")
        resolved = resolve_policy(config, options, checkpoint, check=check_for_evaluation)
        refuse_existing({"out": out}, overwrite=False)
        from app.evaluation.standalone import evaluate_model

        return evaluate_model(resolved, checkpoint=checkpoint, out=out)


def rollout(*, checkpoint, data, limit, out, **given: Any) -> Samples | None:
    with _call("rollout", checkpoint=checkpoint, out=out, **given) as (config, options, folder, paths):
        checkpoint, out = paths["--checkpoint"], paths["--out"]
        options += _data_options("data.source", data, folder / "train.jsonl")
        resolved = resolve_policy(config, options, checkpoint, check=check_for_rollout)
        from app.stages.rollout import rollout

        file = out or folder / "samples.jsonl"
        refuse_existing({"out": file}, overwrite=False, resumes=True)
        summary = rollout(resolved, prompts=None, limit=limit, out=file, checkpoint=checkpoint)
        return None if summary is None else _read_samples(file, summary)


def score(*, samples, role, checkpoint, out, **given: Any) -> Samples | None:
    file, rows = (samples, ()) if isinstance(samples, str | os.PathLike) else (None, samples)
    with _call("score", checkpoint=checkpoint, out=out, input=file, **given) as (config, options, folder, paths):
        checkpoint, out, own = paths["--checkpoint"], paths["--out"], folder / "samples.jsonl"
        source = paths["--input"] or _write_lines(_to_lines(rows, own), own)
        resolved = resolve_policy(config, options, checkpoint, check=check_for_score, loads_policy=role == "policy")
        file = out or folder / "scored.jsonl"
        refuse_existing({"out": file}, overwrite=False)
        checkpoints = [] if checkpoint is None else [checkpoint]
        summaries = score_file(resolved, source, file, role=role, checkpoints=checkpoints)
        return _read_samples(Path(summaries[0]["written to"]), summaries[0]) if summaries else None


@contextmanager
def _call(
    command: str, *, config, overrides, rewards=None, **paths: str | os.PathLike[str] | None
) -> Iterator[tuple[str | None, list[str], Path, dict[str, Path | None]]]:
    """Yields the values of `--config` and `--set`, a temporary folder, and the local path of each option in `paths`.

    In the block, Python functions are registered, other hosts have joined as for the command, and InputErrors name
    Python arguments instead of command options.
    """
    if not isinstance(config, str | os.PathLike | None):
        raise InputError(
            f"config: expected a preset or a YAML file, got {config!r:.80}; settings belong in `overrides`"
        )
    callables, values = dict[str, Callable[..., Any]](), dict(overrides or {})
    if callable(estimator := values.get("algorithm.estimator")):
        callables["algorithm.estimator"] = estimator
        values["algorithm.estimator"] = _callable_name(estimator)
    options = [*set_options(values)]
    if rewards is not None:
        several = [rewards] if callable(rewards) or isinstance(rewards, str | Mapping) else rewards
        options += set_options({"reward.functions": [_reward_item(reward, callables) for reward in several]})
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder, register_callables(callables), command_output():
        show_progress("loading JAX")
        try:
            config = None if config is None else os.fspath(config)
            given = {f"--{name}": None if path is None else Path(path).expanduser() for name, path in paths.items()}
            with local_inputs(command, {"--config": config, "--set": options, **given}) as local:
                yield config, options, Path(folder), {option: local[option] for option in given}
        except InputError as error:
            message = ALLOWED_CHANGES.sub(lambda match: f"allow_changed={match[0].split()[1::2]}", str(error))
            error.args = (OPTION.sub(_argument, message),)
            raise


def _argument(option: re.Match[str]) -> str:
    """Returns the argument for an option in an error: `resume='auto'` for `--resume auto`."""
    name = ARGUMENTS.get(option[1], option[1])
    return name if option[2] is None else f"{name}={option[2]!r}"


def _reward_item(reward: Any, callables: dict[str, Callable[..., Any]]) -> Any:
    """Returns a reward as an item of `reward.functions`, and adds a Python function, with its name, to `callables`."""
    item = reward if isinstance(reward, Mapping) else {"function": reward}
    function = item.get("function")
    if not callable(function):
        return reward
    name = _callable_name(function)
    item = {"name": name.removeprefix(CALLABLE_PREFIX), **item, "function": name}
    callables[item["name"]] = function
    return item


def _callable_name(function: Callable[..., Any]) -> str:
    """Returns the value that stands for a Python function in settings: `callable:NAME`."""
    return CALLABLE_PREFIX + getattr(function, "__name__", type(function).__name__).strip("<>")


def _data_options(setting: str, rows: Iterable[Mapping[str, Any]] | None, path: Path) -> Iterator[str]:
    return set_options({} if rows is None else {setting: _write_lines(_to_lines(rows, path), path)})


def _to_lines(rows: Iterable[Mapping[str, Any]], path: Path) -> bytes:
    """Returns rows as JSON Lines; the stem of `path` names the data in errors."""
    if isinstance(rows, str | os.PathLike):
        setting = "data.eval_source" if path.stem == "eval" else "data.source"
        raise InputError(f"{path.stem} data: expected rows, got {rows!r:.80}; name a file in {setting}")
    lines = []
    for index, row in enumerate(rows):
        try:
            lines.append(to_json_line(to_json({**row}), f"row {index}"))
        except (TypeError, ValueError) as error:
            where = f"{path.stem} data, row {index}"
            raise InputError(f"{where}: expected a dict of JSON values, got {row!r:.80} ({error})") from None
    return b"".join(lines)


def _write_lines(content: bytes, path: Path) -> Path:
    """Writes JSON Lines to `<hash of the content>/<name>` in the folder of `path`, and returns the new path.

    Prompt uids contain only the file name, not the folder, so equal rows have equal uids in every call.
    """
    path = path.absolute().parent / hashlib.sha256(content).hexdigest()[:16] / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    return path


def _read_samples(path: Path, summary: Mapping[str, Any]) -> Samples:
    figures = {name: value for name, value in summary.items() if name != "written to"}
    rows = SharedRows()
    records = [dict(rows.restore(record, where=f"{path}:{line}")) for line, record in read_jsonl(path)]
    return Samples(records, figures)
