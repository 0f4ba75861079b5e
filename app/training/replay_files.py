"""Files of samples that steps learn from: which they are, and what every line of them must be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from app.records.jsonl import read_jsonl
from app.records.sample import Prompt, Sample
from app.records.sample_json import sample_from_record
from app.report.run_files import sample_files
from app.reward.saved_rewards import has_saved_reward
from app.runtime.model_spec import ModelSpec
from app.stages.sample_reader import check_token_ids, file_digest, file_stamp
from settings import Settings
from settings.errors import InputError

OPTION = "--from-rollouts"
ROLLOUTS_DIR = "rollouts"
"""Where a run has its files."""
RESCORED_FIELDS = frozenset({"policy_logprobs", "reference_logprobs", "values"})
"""Fields that the step's networks give anew."""
SAVED_REWARD_FIELDS = frozenset({"reward", "rewards"})
SAVED_ADVANTAGE_FIELDS = frozenset({"advantages", "returns"})
MAX_SHOWN_CHARS = 40
"""Characters of a text in an error."""


class AvailableFields(NamedTuple):
    """What every sample of a file has."""

    rewards: bool
    advantages: bool
    returns: bool

    def intersection(self, other: AvailableFields) -> AvailableFields:
        return AvailableFields(*(one and another for one, another in zip(self, other, strict=True)))


@dataclass(frozen=True)
class StepFile:
    """The samples of one step, checked."""

    path: Path
    stamp: tuple[int, ...]
    digest: str
    num_groups: int
    largest_group: int
    newest_version: int
    available_fields: AvailableFields


def choose_files(path: Path, *, after_step: int, settings: Settings) -> dict[int, Path]:
    """The files by step, of those that follow `after` and that the run comes to. A single file is the next step."""
    path, steps = path.expanduser(), settings.run.steps
    if path.is_file():
        found = {after_step + 1: path}
    elif path.is_dir():
        found = sample_files(path / ROLLOUTS_DIR if (path / ROLLOUTS_DIR).is_dir() else path)
    else:
        problem = "is no file and no folder" if path.exists() else "does not exist"
        raise InputError(f"{OPTION}: {path} {problem}; give a file of samples, or a run's folder")
    if not found:
        raise InputError(
            f"{OPTION}: {path} holds no step_<number>.jsonl (a run under logging.save_rollouts: false writes none); "
            "give the folder of one that has them, or a file of samples"
        )
    wanted = range(after_step + 1, min(max(found), steps) + 1)
    if not wanted:
        if steps <= after_step:
            raise InputError(f"run.steps: {steps}, so no step follows step {after_step} of --checkpoint; raise it")
        raise InputError(f"{OPTION}: {path} ends with step {max(found)}, and --checkpoint is after step {after_step}")
    missing = [step for step in wanted if step not in found]
    if missing:
        following = min(step for step in found if step > missing[0])
        way_out = _missing_step_hint(missing[0], following, settings, is_first=missing[0] == wanted[0])
        raise InputError(f"{OPTION}: {path} has no samples of step {missing[0]}; {way_out}")
    return {step: found[step] for step in wanted}


def _missing_step_hint(missing: int, following: int, settings: Settings, *, is_first: bool) -> str:
    """Where samples of a step are missing.

    Args:
        following: the next step whose samples are there.
        is_first: nothing is left to learn from before it.
    """
    if is_first:
        return f"the next is {following}: start with --checkpoint after step {following - 1}, or give one of its files"
    schedule = settings.optimizer.schedule
    falls = "" if schedule == "constant" else f" (optimizer.schedule: {schedule} then falls faster)"
    return f"lower run.steps to end before it{falls}"


@contextmanager
def option_in_errors() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{OPTION}: {error}") from error


def read_step_file(
    path: Path, settings: Settings, model: ModelSpec, *, from_run: bool
) -> tuple[StepFile, dict[tuple[str, bytes], Prompt]]:
    """A file, and its prompts.

    Args:
        is_of_run: a run has written it; else it is the end of a chain.
    """
    before, digest = file_stamp(path), file_digest(path)
    prompts: dict[tuple[str, bytes], Prompt] = {}
    groups, ends = _GroupChecker(may_share_prompts=from_run), _EosChecker(model.tokenizer.eos_ids)
    found, newest = AvailableFields(True, True, True), 0
    for where, sample in read_samples(path, ignored_fields=RESCORED_FIELDS):
        check_token_ids(sample.prompt.token_ids, sample.completion_ids, model.architecture, where=where)
        _check_text(sample, model, where)
        _check_lengths(sample, settings, where)
        groups.add(sample, where)
        ends.add(sample)
        prompts.setdefault((sample.prompt.uid, sample.prompt.token_ids.tobytes()), sample.prompt)
        newest = max(newest, int(sample.token_versions.max(initial=0)))
        found = found.intersection(
            AvailableFields(has_saved_reward(sample), sample.advantages is not None, sample.returns is not None)
        )
    if not groups.members:
        raise InputError(f"{path} holds no samples")
    ends.check(path)
    largest = max(len(members) for members in groups.members.values())
    file = StepFile(path, before, digest, len(groups.members), largest, newest, found)
    check_unchanged(file)
    return file, prompts


class _GroupChecker:
    """Samples that are compared with each other: of one prompt, each there once.

    Args:
        may_share_prompts: a prompt may have several. Of these a step learns from the first alone, as the run did that
            wrote them; in other files somebody has meant all of them.
    """

    def __init__(self, *, may_share_prompts: bool) -> None:
        self.members: dict[int, set[int]] = {}
        """By group, the indices of its samples."""
        self._may_share_prompts = may_share_prompts
        self._prompts: dict[int, str] = {}
        self._groups: dict[str, int] = {}
        """The first one of each prompt."""

    def add(self, sample: Sample, where: str) -> None:
        group, uid = sample.group_id, sample.prompt.uid
        first = self._prompts.setdefault(group, uid)
        if first != uid:
            raise InputError(f"{where}: group_id {group} has samples of prompts {first} and {uid}; number groups apart")
        other = self._groups.setdefault(uid, group)
        if other != group and not self._may_share_prompts:
            raise InputError(
                f"{where}: group_id {other} and group_id {group} both have samples of prompt {uid}, and a step learns "
                "from one group of a prompt; join them under one group_id, or give the prompt of one another uid"
            )
        members = self.members.setdefault(group, set())
        if sample.sample_index in members:
            raise InputError(
                f"{where}: group_id {group} has sample_index {sample.sample_index} twice; number its samples apart, or "
                "leave one out"
            )
        members.add(sample.sample_index)


class _EosChecker:
    """How many samples say that they ended by themselves, and how many do so with a token that ends them here."""

    def __init__(self, eos_ids: Sequence[int]) -> None:
        self._eos_ids = eos_ids
        self._num_stopped = self._num_ended = 0

    def add(self, sample: Sample) -> None:
        if sample.finish_reason == "stop":
            self._num_stopped += 1
            self._num_ended += any(token in self._eos_ids for token in sample.completion_ids[-1:])

    def check(self, path: Path) -> None:
        if self._num_stopped and not self._num_ended:
            raise InputError(
                f"{path}: {self._num_stopped} samples have finish_reason `stop`, and none of them ends with a token "
                f"that ends an answer with the tokenizer of model.path ({', '.join(map(str, self._eos_ids))}): were "
                "they sampled with another tokenizer? Set model.path to that model"
            )


def read_samples(path: Path, *, ignored_fields: frozenset[str]) -> Iterator[tuple[str, Sample]]:
    """Where each stands, and the sample without some of its fields: what is not taken need not be right either."""
    for line, record in read_jsonl(path):
        where = f"{path}:{line}"
        kept: dict[str, Any] = {name: value for name, value in record.items() if name not in ignored_fields}
        yield where, sample_from_record(kept, where=where)


def check_unchanged(file: StepFile) -> None:
    if not file.path.exists() or file_stamp(file.path) != file.stamp:
        raise InputError(f"{OPTION}: {file.path} has changed since the run began")


def _check_text(sample: Sample, model: ModelSpec, where: str) -> None:
    text = model.tokenizer.decode(sample.completion_ids)
    if text != sample.completion:
        raise InputError(
            f"{where}: completion_token_ids read {_shorten(text)} with the tokenizer of model.path, and completion is "
            f"{_shorten(sample.completion)}: were they sampled with another tokenizer? Set model.path to that model"
        )


def _shorten(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "...")


def _check_lengths(sample: Sample, settings: Settings, where: str) -> None:
    for name, ids, field, longest in (
        ("prompt_token_ids", sample.prompt.token_ids, "data.max_prompt_length", settings.data.max_prompt_length),
        ("completion_token_ids", sample.completion_ids, "rollout.max_new_tokens", settings.rollout.max_new_tokens),
    ):
        if len(ids) > longest:
            raise InputError(f"{where}: {name} has {len(ids)} tokens, more than {field} = {longest}; raise that")


def check_groups(file: StepFile, settings: Settings) -> None:
    """Whether a step under these settings can take the file's groups."""
    own, hosts = settings.rollout.prompts_per_step, jax.process_count()
    if file.num_groups != own * hosts:
        each, rest = divmod(file.num_groups, hosts)
        way_out = f"{hosts} hosts cannot share them out evenly" if rest else f"set rollout.prompts_per_step to {each}"
        raise InputError(
            f"{file.path} holds {file.num_groups} groups, and a step has rollout.prompts_per_step = {own}"
            f"{f' on each of {hosts} hosts' if hosts > 1 else ''}; {way_out}"
        )
    if file.largest_group > settings.rollout.group_size:
        raise InputError(
            f"{file.path} has a group of {file.largest_group} samples, more than rollout.group_size = "
            f"{settings.rollout.group_size}; set it to {file.largest_group}"
        )
