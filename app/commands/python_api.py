"""The functions of `import grpo`, which documents them: the commands, with Python values in place of files."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from app.commands.command_support import (
    EXIT_INTERRUPTED,
    hide_progress,
    refuse_existing,
    resolve,
    resolve_policy,
    show_progress,
)
from app.commands.score import Role, score_file
from app.records.atomic_write import write_atomic
from app.records.jsonl import read_jsonl, to_json_line
from app.records.partial_samples import part_paths
from app.records.run_directory import Resume, RunDirectory, check_run_directory
from app.reward.in_process_pool import callables_at_hand
from settings import InputError, load
from settings.checks.commands import check_for_evaluation, check_for_rollout, check_for_score, check_for_train
from settings.loading.sources import set_options
from settings.schema.reward import CALLABLE_PREFIX

if TYPE_CHECKING:
    from app.evaluation.printed_summary import EvaluationSummary
    from app.training.train import TrainingRun

File = str | os.PathLike[str] | None
Values = Mapping[str, Any] | None
Rows = Iterable[Mapping[str, Any]] | None
Reward = Callable[..., Any] | str | Mapping[str, Any]
Rewards = Reward | Iterable[Reward] | None


@dataclass(frozen=True)
class Samples:
    """Samples, and the summary that the command prints."""

    records: Sequence[Mapping[str, Any]]
    """One dict per sample, with the fields of a sample file: `uid`, `prompt`, `completion`, ..."""
    summary: Mapping[str, Any]


def train(
    config: File,
    overrides: Values,
    *,
    rewards: Rewards,
    data: Rows,
    eval_data: Rows,
    on_step: Callable[[Mapping[str, Any]], object] | None,
    resume: Resume,
    allow_changed: Sequence[str],
) -> TrainingRun:
    if resume not in get_args(Resume):
        raise InputError(f"resume: expected one of {', '.join(get_args(Resume))}, got {resume!r}")
    if threading.current_thread() is not threading.main_thread():
        raise InputError("grpo.train handles signals, which only the main thread can do; call it there")
    with _call(config, overrides, rewards) as (config, options, _):
        run = RunDirectory.from_settings(load(config, options, os.environ).settings.run)
        if data is not None or eval_data is not None:
            check_run_directory(run, resume)
        options += _data_options("data.source", data, run.data_dir / "train.jsonl")
        options += _data_options("data.eval_source", eval_data, run.data_dir / "eval.jsonl")
        resolved = resolve(config, options, print_config=False, check=check_for_train)
        from app.training.train import train

        result = train(resolved, resume=resume, allow_changed=allow_changed, on_step=on_step)
    if result.exit_code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(f"{run.path} has a checkpoint of the last whole step; resume='auto' continues")
    return result


def evaluate(
    config: File, overrides: Values, *, checkpoint: File, data: Rows, rewards: Rewards, out: File
) -> EvaluationSummary | None:
    with _call(config, overrides, rewards) as (config, options, folder):
        options += _data_options("data.eval_source", data, folder / "eval.jsonl")
        resolved = resolve_policy(config, options, _path(checkpoint), check=check_for_evaluation)
        from app.evaluation.standalone import evaluate_model

        return evaluate_model(resolved, checkpoint=_path(checkpoint), out=_path(out))


def rollout(
    config: File, overrides: Values, *, checkpoint: File, data: Rows, limit: int | None, out: File
) -> Samples | None:
    with _call(config, overrides) as (config, options, folder):
        options += _data_options("data.source", data, folder / "train.jsonl")
        resolved = resolve_policy(config, options, _path(checkpoint), check=check_for_rollout)
        from app.stages.rollout import rollout

        file = _path(out) or folder / "samples.jsonl"
        refuse_existing({"out": file}, overwrite=bool(part_paths(file)))
        summary = rollout(resolved, prompts=None, limit=limit, out=file, checkpoint=_path(checkpoint))
        return _read_samples(file, summary)


def score(
    samples: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    config: File,
    overrides: Values,
    *,
    role: Role,
    checkpoint: File,
    rewards: Rewards,
    out: File,
) -> Samples | None:
    with _call(config, overrides, rewards) as (config, options, folder):
        source = samples if isinstance(samples, str | os.PathLike) else _write_rows(samples, folder / "samples.jsonl")
        resolved = resolve_policy(
            config, options, _path(checkpoint), check=check_for_score, loads_policy=role == "policy"
        )
        file = _path(out) or folder / "scored.jsonl"
        refuse_existing({"out": file}, overwrite=False)
        return _read_samples(file, score_file(resolved, Path(source), file, role=role, checkpoint=_path(checkpoint)))


@contextmanager
def _call(config: File, overrides: Values, rewards: Rewards = None) -> Iterator[tuple[str | None, list[str], Path]]:
    """Yields the arguments of `--config` and `--set`, and a temporary folder. The Python functions are at hand."""
    if not isinstance(config, str | os.PathLike | None):
        raise InputError(
            f"config: expected a preset or a YAML file, got {config!r:.80}; settings belong in `overrides`"
        )
    options, callables = [*set_options(overrides or {})], dict[str, Callable[..., Any]]()
    if rewards is not None:
        several = [rewards] if callable(rewards) or isinstance(rewards, str | Mapping) else rewards
        options += set_options({"reward.functions": [_reward_item(reward, callables) for reward in several]})
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder, callables_at_hand(callables):
        show_progress("loading JAX")
        try:
            yield None if config is None else os.fspath(config), options, Path(folder)
        finally:
            hide_progress()


def _reward_item(reward: Any, callables: dict[str, Callable[..., Any]]) -> Any:
    """Returns an item of `reward.functions`; adds a Python function to `callables`, by the name of its reward."""
    item = reward if isinstance(reward, Mapping) else {"function": reward}
    function = item.get("function")
    if not callable(function):
        return reward
    own_name = getattr(function, "__name__", type(function).__name__).strip("<>")
    item = {"name": own_name, **item, "function": CALLABLE_PREFIX + own_name}
    callables[item["name"]] = function
    return item


def _path(file: File) -> Path | None:
    return None if file is None else Path(file).expanduser()


def _data_options(setting: str, rows: Rows, path: Path) -> Iterator[str]:
    return set_options({} if rows is None else {setting: _write_rows(rows, path)})


def _write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> Path:
    """Writes rows as JSON Lines into a folder beside `path` that is named by their content; returns the path there.

    Uids have the name of the file only, so that the same rows have the same ones everywhere.
    """
    if isinstance(rows, str | os.PathLike):
        raise InputError(f"{path.stem} data: expected rows, got {rows!r:.80}; a file belongs in data.source")
    lines = []
    for index, row in enumerate(rows):
        try:
            lines.append(to_json_line({**row}, f"row {index}"))
        except (TypeError, ValueError) as error:
            where = f"{path.stem} data, row {index}"
            raise InputError(f"{where}: expected a dict of JSON values, got {row!r:.80} ({error})") from None
    content = b"".join(lines)
    path = path.absolute().parent / hashlib.sha256(content).hexdigest()[:16] / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    return path


def _read_samples(path: Path, summary: Mapping[str, Any] | None) -> Samples | None:
    if summary is None:
        return None
    figures = {name: value for name, value in summary.items() if name != "written to"}
    return Samples([record for _, record in read_jsonl(path)], figures)
