"""Choice and checks of the sample files that a replay learns from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from app.records.checksum_file import CHECKSUM_FILE
from app.records.sample import Prompt, Sample
from app.records.sample_json import read_samples
from app.report.run_files import sample_files
from app.reward.aggregate import was_dropped_in_rollout
from app.reward.saved_rewards import has_saved_reward
from app.runtime.model_spec import ModelSpec
from app.stages.sample_reader import check_routes, check_token_ids, file_digest, file_stamp
from settings import Settings
from settings.errors import InputError

OPTION = "--from-rollouts"
ROLLOUTS_DIR = "rollouts"
"""Folder of a run that holds its samples."""
RESCORED_FIELDS = frozenset({"policy_logprobs", "reference_logprobs", "values"})
"""Fields that the step computes again with its own networks."""
SAVED_REWARD_FIELDS = frozenset({"reward", "rewards"})
SAVED_ADVANTAGE_FIELDS = frozenset({"advantages", "returns"})
ROUTES_FIELD = frozenset({"routes"})


@dataclass(frozen=True)
class StepFile:
    """The checked samples of one step."""

    path: Path
    stamp: tuple[int, ...]
    digest: str
    num_groups: int
    largest_group: int
    available_fields: frozenset[str]
    """Those of `reward`, `episode`, `advantages`, `returns` and `routes` that every sample has."""

    def check_unchanged(self) -> None:
        if file_stamp(self.path) != self.stamp:
            raise InputError(f"{OPTION}: {self.path} has changed since the run began")


def choose_files(path: Path, *, after_step: int, steps: int) -> dict[int, Path]:
    """Returns the files by step, from the step after `after_step` to `steps`. A single file is the next step."""
    path = path.expanduser()
    if path.is_file():
        files = {after_step + 1: path}
    elif path.is_dir():
        files = sample_files(path / ROLLOUTS_DIR if (path / ROLLOUTS_DIR).is_dir() else path)
    else:
        problem = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise InputError(f"{OPTION}: {path} {problem}; give a file of samples, or a run's folder")
    if not files:
        raise InputError(
            f"{OPTION}: {path} holds no step_<number>.jsonl (a run under logging.save_rollouts: false writes none); "
            "give the folder of a run that has them, or a file of samples"
        )
    wanted = range(after_step + 1, min(max(files), steps) + 1)
    if not wanted and steps <= after_step:
        raise InputError(f"run.steps: {steps}, so no step follows step {after_step} of --checkpoint; raise it")
    if not wanted:
        raise InputError(f"{OPTION}: {path} ends with step {max(files)}, and --checkpoint is after step {after_step}")
    missing = next((step for step in wanted if step not in files), None)
    if missing is not None:
        following = min(step for step in files if step > missing)
        way_out = "lower run.steps to end before it"
        if missing == wanted[0]:
            way_out = (
                f"the next is {following}: start with --checkpoint after step {following - 1}, or give one of its files"
            )
        raise InputError(f"{OPTION}: {path} has no samples of step {missing}; {way_out}")
    return {step: files[step] for step in wanted}


@contextmanager
def option_in_errors() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{OPTION}: {error}") from error


def read_step_file(
    path: Path, settings: Settings, model: ModelSpec, *, source: Settings | None, checksum: str | None
) -> tuple[StepFile, dict[tuple[str, bytes], Prompt]]:
    """Reads and checks a file; returns it with its prompts.

    Args:
        source: the settings of the run that wrote the file, in which a prompt may have several groups; the step then
            learns from the first one only, as the run did. In any other file that is an error.
        checksum: the SHA-256 of the file as it was written; None if it is unknown.
    """
    stamp, digest = file_stamp(path), file_digest(path)
    if checksum not in (None, digest):
        raise InputError(
            f"{path} is not as its run wrote it: its SHA-256 is not the one in {CHECKSUM_FILE} beside it. Restore it "
            f"from a copy; to use it as it is, delete its line in {CHECKSUM_FILE}"
        )
    prompts: dict[tuple[str, bytes], Prompt] = {}
    members: defaultdict[int, set[int]] = defaultdict(set)
    prompt_of_group: dict[int, str] = {}
    group_of_prompt: dict[str, int] = {}
    ignored = RESCORED_FIELDS | (frozenset() if settings.rollout.routing_replay else ROUTES_FIELD)
    missing, num_stopped, num_ended = set[str](), 0, 0
    for where, sample in read_samples(path, ignored_fields=ignored):
        _check_sample(sample, settings, model, where)
        group, uid = sample.group_id, sample.prompt.uid
        if prompt_of_group.setdefault(group, uid) != uid:
            raise InputError(
                f"{where}: group_id {group} has samples of prompts {prompt_of_group[group]} and {uid}; give their "
                "groups different numbers"
            )
        if group_of_prompt.setdefault(uid, group) != group and source is None:
            raise InputError(
                f"{where}: group_id {group_of_prompt[uid]} and group_id {group} both have samples of prompt {uid}, and "
                "a step learns from one group of a prompt; join them under one group_id, or give the prompt of one "
                "another uid"
            )
        if sample.sample_index in members[group]:
            raise InputError(
                f"{where}: group_id {group} has sample_index {sample.sample_index} twice; give its samples different "
                "numbers, or leave one out"
            )
        members[group].add(sample.sample_index)
        prompts.setdefault((uid, sample.prompt.token_ids.tobytes()), sample.prompt)
        missing |= {name for name in SAVED_ADVANTAGE_FIELDS | ROUTES_FIELD if getattr(sample, name) is None}
        missing |= set() if has_saved_reward(sample) else {"reward"}
        missing |= {"episode"} if sample.episode is None and not was_dropped_in_rollout(sample) else set()
        if sample.finish_reason == "stop":
            num_stopped += 1
            is_ended = any(token in model.tokenizer.eos_ids for token in sample.completion_ids[-1:])
            num_ended += is_ended or any(string in sample.completion for string in settings.rollout.stop)
    if not members:
        raise InputError(f"{path} holds no samples")
    if num_stopped and not num_ended:
        raise InputError(
            f"{path}: {num_stopped} samples have finish_reason `stop`, and none of them ends with a token that ends an "
            f"answer with the tokenizer of model.path ({', '.join(map(str, model.tokenizer.eos_ids))}): were they "
            "sampled with another tokenizer, or with rollout.stop? Set model.path or rollout.stop as they were then"
        )
    available = frozenset({"reward", "episode", *SAVED_ADVANTAGE_FIELDS, *ROUTES_FIELD} - missing)
    file = StepFile(path, stamp, digest, len(members), max(map(len, members.values())), available)
    file.check_unchanged()
    smallest = min(map(len, members.values()))
    if source is not None and smallest < source.rollout.group_size:
        raise InputError(
            f"{path} is incomplete: it holds a group of {smallest} samples, and its run drew "
            f"{source.rollout.group_size} for each prompt; restore it from a copy"
        )
    _check_groups(file, settings)
    return file, prompts


def _check_sample(sample: Sample, settings: Settings, model: ModelSpec, where: str) -> None:
    check_token_ids(sample.prompt.token_ids, sample.completion_ids, model.architecture, where=where)
    check_routes(sample.routes, model.architecture, where=where)
    ids, turns = sample.completion_ids, sample.episode.turns if sample.episode is not None else ()
    written = [(ids[turn.start : turn.end], turn.text) for turn in turns] or [(ids, sample.completion)]
    for part, expected in written:
        if (text := model.tokenizer.decode(part)) != expected:
            raise InputError(
                f"{where}: completion_token_ids read {text!r:.40} with the tokenizer of model.path, and completion is "
                f"{expected!r:.40}: were they sampled with another tokenizer? Set model.path to that model"
            )
    for name, ids, field, longest in (
        ("prompt_token_ids", sample.prompt.token_ids, "data.max_prompt_length", settings.data.max_prompt_length),
        ("completion_token_ids", sample.completion_ids, "rollout.max_new_tokens", settings.rollout.max_new_tokens),
    ):
        if len(ids) > longest:
            raise InputError(f"{where}: {name} has {len(ids)} tokens, more than {field} = {longest}; raise that")


def _check_groups(file: StepFile, settings: Settings) -> None:
    """Raises InputError if a step under these settings cannot take the file's groups."""
    per_host, hosts = settings.rollout.prompts_per_step, jax.process_count()
    if file.num_groups != per_host * hosts:
        each, rest = divmod(file.num_groups, hosts)
        way_out = f"{hosts} hosts cannot share them evenly" if rest else f"set rollout.prompts_per_step to {each}"
        raise InputError(
            f"{file.path} holds {file.num_groups} groups, and a step has rollout.prompts_per_step = {per_host}"
            f"{f' on each of {hosts} hosts' if hosts > 1 else ''}; {way_out}"
        )
    if file.largest_group > settings.rollout.group_size:
        raise InputError(
            f"{file.path} has a group of {file.largest_group} samples, more than rollout.group_size = "
            f"{settings.rollout.group_size}; set it to {file.largest_group}"
        )
