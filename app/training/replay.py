"""`grpo train --from-rollouts`: which files steps learn from, and what of them is taken as it stands.

Tokens, behavior logprobs, masks and versions always come from the files, logprobs and values never: the step's own
networks give them, which say the same as those that the files were scored with, or else are the right ones to ask.

A file in the `rollouts/` of a run is replayed: its rewards are taken unless `reward.*` is no longer what the run had,
and credit is estimated anew, under whatever settings. Any other file is the end of a chain (`grpo rollout`, `score`,
`gae`): what every sample of it has, rewards as well as advantages and returns, is taken, and the rest is found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from app.flow import Prompt, Sample
from app.jsonl import read_jsonl
from app.report.run_files import sample_files
from app.reward.saved import is_judged
from app.reward.tasks import check_answers
from app.sample_records import sample_from_record
from app.training.model_input import CriticInput, ModelInput
from app.training.refill import by_group
from app.training.run_directory import RunDirectory
from app.training.sample_file import check_tokens, stamp
from app.training.saved_policy import SavedPolicy
from settings import Settings, load
from settings.errors import InputError

OPTION = "--from-rollouts"
ROLLOUTS = "rollouts"
"""Where a run has its files."""
SCORED = frozenset({"policy_logprobs", "reference_logprobs", "values"})
"""Fields that the step's networks give anew."""
REWARDED = frozenset({"reward", "rewards"})
CREDITED = frozenset({"advantages", "returns"})
SHOWN = 40
"""Characters of a text in an error."""


class Asked(NamedTuple):
    """What the options of `grpo train` say."""

    rollouts: Path
    checkpoint: Path | None = None
    """What to start from, instead of the models' own weights."""


class Found(NamedTuple):
    """What every sample of a file has."""

    rewards: bool
    advantages: bool
    returns: bool

    def both(self, other: Found) -> Found:
        return Found(*(one and another for one, another in zip(self, other, strict=True)))


@dataclass(frozen=True)
class StepFile:
    """The samples of one step, checked."""

    path: Path
    stamp: tuple[int, ...]
    digest: str
    num_groups: int
    largest_group: int
    newest_version: int
    found: Found


@dataclass(frozen=True)
class Replay:
    """Steps whose samples lie in files."""

    asked: Asked
    start: SavedPolicy | None
    """The checkpoint of --checkpoint; None: the models' own weights."""
    files: Mapping[int, StepFile]
    """By step, from the first one on without a gap."""
    prompts: Sequence[Prompt]
    """Of all files, each once."""
    takes_rewards: bool
    takes_credit: bool
    report: str
    """For people: what is replayed, and what of it is taken."""

    @property
    def after_step(self) -> int:
        """The steps that the weights have seen before the first that is replayed."""
        return min(self.files) - 1

    @property
    def last_step(self) -> int:
        return max(self.files)

    @property
    def fingerprint(self) -> str:
        """Of the samples, and of the steps that they are for."""
        digests = " ".join(f"{step} {file.digest}" for step, file in self.files.items())
        return hashlib.sha256(digests.encode()).hexdigest()

    @property
    def record(self) -> dict[str, str]:
        """For `sessions.jsonl`."""
        path, checkpoint = self.asked.rollouts, self.start and self.start.path
        return {"from_rollouts": str(path), **({"checkpoint": str(checkpoint)} if checkpoint else {})}

    def samples(self, step: int) -> list[Sample]:
        """Those of a step, of all hosts, group after group.

        Raises:
            InputError: the file is no longer what it was when it was checked.
        """
        file = self.files[step]
        try:
            samples = [sample for _, sample in _samples(file.path, left_out=self._left_out)]
        except InputError:
            _check_unchanged(file)
            raise
        _check_unchanged(file)
        return [sample for group in by_group(samples) for sample in group]

    @property
    def _left_out(self) -> frozenset[str]:
        rewards = frozenset[str]() if self.takes_rewards else REWARDED
        return SCORED | rewards | (frozenset() if self.takes_credit else CREDITED)


def run_of(path: Path) -> RunDirectory | None:
    """The run that has written samples: `path` is one of its files, their folder, or its own; None for other files."""
    folder = path.expanduser().resolve()
    if folder.is_file():
        folder = folder.parent
    run = RunDirectory(folder.parent if folder.name == ROLLOUTS else folder)
    is_its_own = folder.name == ROLLOUTS or (folder / ROLLOUTS).is_dir()
    return run if is_its_own and run.is_occupied else None


def read_replay(
    asked: Asked, settings: Settings, model: ModelInput, critic: CriticInput | None, *, into: RunDirectory
) -> Replay:
    """Looks at every line of every file that will be replayed, and at the checkpoint to start from.

    Args:
        into: the run that replays.

    Raises:
        InputError: what cannot be replayed with this model and these settings, named.
    """
    source = run_of(asked.rollouts)
    if source is not None and source.path == into.path.resolve():
        raise InputError(f"run.name: {into.path} is what {OPTION} would replay; choose another run.name")
    start = None if asked.checkpoint is None else _open_start(asked.checkpoint, model, critic)
    paths = _chosen(asked.rollouts, after=start.step if start else 0, steps=settings.run.steps)
    files: dict[int, StepFile] = {}
    prompts: dict[tuple[str, bytes], Prompt] = {}
    with _naming_the_option():
        for step, path in paths.items():
            files[step], those = _look(path, settings, model)
            prompts |= those
            _check_groups(files[step], settings)
    found = Found(True, True, True)
    for file in files.values():
        found = found.both(file.found)
    had = load(str(source.settings), [], {}).settings if source else None
    takes_rewards = found.rewards and (had is None or _rewards_alike(settings, had))
    takes_credit = had is None and found.advantages and (found.returns or not settings.has_critic)
    if not takes_rewards:
        with _naming_the_option():
            check_answers(list(prompts.values()), [function.name for function in settings.reward.functions])
    lines = [
        _told_of_steps(asked, files, start),
        _told_of_rewards(found, taken=takes_rewards),
        _told_of_credit(is_chain=had is None, taken=takes_credit),
        *_doubts(files, settings, had),
    ]
    return Replay(asked, start, files, tuple(prompts.values()), takes_rewards, takes_credit, report="\n".join(lines))


def _open_start(path: Path, model: ModelInput, critic: CriticInput | None) -> SavedPolicy:
    start = SavedPolicy.open(path)
    start.check(model)
    saved = start.progress.fingerprints.get("the critic")
    if critic is not None and saved not in (None, critic.files.fingerprint):
        raise InputError(
            f"--checkpoint: {start.path} holds a critic that was trained from another model than that of critic.path; "
            f"set critic.path to what {start.run.settings} names"
        )
    return start


def _chosen(path: Path, *, after: int, steps: int) -> dict[int, Path]:
    """The files by step, of those that follow `after` and that the run comes to. A single file is the next step."""
    path = path.expanduser()
    if path.is_file():
        found = {after + 1: path}
    elif path.is_dir():
        found = sample_files(path / ROLLOUTS if (path / ROLLOUTS).is_dir() else path)
    else:
        problem = "is no file and no folder" if path.exists() else "does not exist"
        raise InputError(f"{OPTION}: {path} {problem}; give a file of samples, or a run's folder")
    if not found:
        raise InputError(f"{OPTION}: {path} holds no step_<number>.jsonl; give a run's folder, or a file of samples")
    wanted = range(after + 1, min(max(found), steps) + 1)
    if not wanted:
        if steps <= after:
            raise InputError(f"run.steps: {steps}, so no step follows step {after} of --checkpoint; raise it")
        raise InputError(f"{OPTION}: {path} ends with step {max(found)}, and --checkpoint is after step {after}")
    missing = [step for step in wanted if step not in found]
    if missing:
        first = min(found)
        way_out = (
            f"; its first step is {first}: start with --checkpoint after step {first - 1}, or give one of its files"
            if missing[0] < first
            else "; lower run.steps to end before it"
        )
        raise InputError(f"{OPTION}: {path} has no samples of step {missing[0]}{way_out}")
    return {step: found[step] for step in wanted}


@contextmanager
def _naming_the_option() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{OPTION}: {error}") from error


def _look(path: Path, settings: Settings, model: ModelInput) -> tuple[StepFile, dict[tuple[str, bytes], Prompt]]:
    """A file, and its prompts."""
    before, digest = stamp(path), hashlib.sha256(path.read_bytes()).hexdigest()
    prompts: dict[tuple[str, bytes], Prompt] = {}
    sizes: dict[int, int] = {}
    found, newest = Found(True, True, True), 0
    for where, sample in _samples(path, left_out=SCORED):
        check_tokens(sample.prompt.token_ids, sample.completion_ids, model.architecture, where=where)
        _check_text(sample, model, where)
        _check_lengths(sample, settings, where)
        prompts.setdefault((sample.prompt.uid, sample.prompt.token_ids.tobytes()), sample.prompt)
        sizes[sample.group_id] = sizes.get(sample.group_id, 0) + 1
        newest = max(newest, int(sample.token_versions.max(initial=0)))
        found = found.both(Found(is_judged(sample), sample.advantages is not None, sample.returns is not None))
    if not sizes:
        raise InputError(f"{path} holds no samples")
    file = StepFile(path, before, digest, len(sizes), max(sizes.values()), newest, found)
    _check_unchanged(file)
    return file, prompts


def _samples(path: Path, *, left_out: frozenset[str]) -> Iterator[tuple[str, Sample]]:
    """Where each stands, and the sample without some of its fields: what is not taken need not be right either."""
    for line, record in read_jsonl(path):
        where = f"{path}:{line}"
        kept: dict[str, Any] = {name: value for name, value in record.items() if name not in left_out}
        yield where, sample_from_record(kept, where=where)


def _check_unchanged(file: StepFile) -> None:
    if not file.path.exists() or stamp(file.path) != file.stamp:
        raise InputError(f"{OPTION}: {file.path} has changed since the run began")


def _check_text(sample: Sample, model: ModelInput, where: str) -> None:
    text = model.tokenizer.decode(sample.completion_ids)
    if text != sample.completion:
        raise InputError(
            f"{where}: completion_token_ids read {_short(text)} with the tokenizer of model.path, and completion is "
            f"{_short(sample.completion)}: were they sampled with another tokenizer? Set model.path to that model"
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")


def _check_lengths(sample: Sample, settings: Settings, where: str) -> None:
    for name, ids, field, longest in (
        ("prompt_token_ids", sample.prompt.token_ids, "data.max_prompt_length", settings.data.max_prompt_length),
        ("completion_token_ids", sample.completion_ids, "rollout.max_new_tokens", settings.rollout.max_new_tokens),
    ):
        if len(ids) > longest:
            raise InputError(f"{where}: {name} has {len(ids)} tokens, more than {field} = {longest}; raise that")


def _check_groups(file: StepFile, settings: Settings) -> None:
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


def _rewards_alike(settings: Settings, had: Settings) -> bool:
    """Whether both give a sample the same reward."""
    penalises = settings.reward.overlong_buffer is not None
    same_length = settings.rollout.max_new_tokens == had.rollout.max_new_tokens
    return settings.reward == had.reward and (same_length or not penalises)


def _told_of_steps(asked: Asked, files: Mapping[int, StepFile], start: SavedPolicy | None) -> str:
    first, last = min(files), max(files)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    whence = f", from the state of {start.path}" if start else ""
    return f"{OPTION}: {steps} on the samples of {asked.rollouts}{whence}; nothing is generated for them"


def _told_of_rewards(found: Found, *, taken: bool) -> str:
    if taken:
        return "rewards: those of the samples"
    why = "reward.* is not what the samples' run had" if found.rewards else "not every sample has one"
    return f"rewards: judged anew, {why}"


def _told_of_credit(*, is_chain: bool, taken: bool) -> str:
    if taken:
        return "advantages and returns: those of the samples; without these fields algorithm.* would decide"
    return f"advantages: estimated anew{', not every sample has them' if is_chain else ''}"


def _doubts(files: Mapping[int, StepFile], settings: Settings, had: Settings | None) -> Iterator[str]:
    """What may not be meant."""
    rollout = settings.rollout
    first = min(files)
    newest, staleness = files[first].newest_version, (had or settings).rollout.max_staleness
    if not first - 1 - staleness <= newest <= first - 1:
        yield (
            f"the samples of step {first} were drawn by version {newest} of the policy, and it is at version "
            f"{first - 1}: they are not its own (algorithm.correction weighs that)"
        )
    if had is not None and had.rollout.temperature != rollout.temperature:
        yield (
            f"rollout.temperature is {rollout.temperature}, and the samples were drawn at {had.rollout.temperature}: "
            "their behavior_logprobs are at that"
        )
    smaller = [step for step, file in files.items() if file.largest_group < rollout.group_size]
    if smaller:
        yield (
            f"groups have at most {files[smaller[0]].largest_group} samples in step {smaller[0]}, fewer than "
            f"rollout.group_size = {rollout.group_size}"
        )
