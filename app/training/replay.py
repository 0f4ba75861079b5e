"""`grpo train --from-rollouts`: trains on saved samples.

Tokens, behavior logprobs, masks and versions are always taken from the files. Logprobs and values are always computed
again by the step's own networks.

If a file is in the `rollouts/` folder of a run, its rewards are used unless `reward.*` differs from that run's
settings; then the advantages and masks of a plug-in are also used, but other advantages are computed again. Any other
file is the result of `grpo rollout`, `score` and `gae`: its rewards, and its advantages and returns, are used if every
sample has them, and computed otherwise.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from app.checkpoint.saved_policy import PolicyCheckpoint
from app.records.run_directory import RunDirectory, step_of_samples
from app.records.sample import DROPPED_PREFIX, Prompt, Sample, group_samples
from app.records.sample_json import read_samples
from app.records.settings_history import SettingsHistory
from app.records.text_format import format_count
from app.report.run_files import sample_files
from app.reward.aggregate import was_dropped_in_rollout
from app.reward.builtin_tasks import check_answers
from app.reward.reward_functions import has_saved_reward
from app.runtime.model_spec import ModelSpec, NetworkSpec
from app.runtime.pinned_revisions import pin_revisions
from app.stages.sample_reader import check_fits, file_digest
from app.training.dynamic_sampling import Group
from settings import Settings, load
from settings.errors import InputError

OPTION = "--from-rollouts"
ROLLOUTS_DIR = "rollouts"
"""Subfolder of a run directory that contains the run's samples."""
SAVED_ADVANTAGE_FIELDS = frozenset({"advantages", "returns"})
ROUTES_FIELD = frozenset({"routes"})


class StartRequest(NamedTuple):
    """The options of `grpo train` that say where a run starts."""

    rollouts: Path | None = None
    """File or folder of samples to train on instead of generating them; the run ends after the last file."""
    checkpoint: Path | None = None
    """The checkpoint to start from, instead of the models' own weights."""


NO_OPTIONS = StartRequest()


@dataclass(frozen=True)
class StepFile:
    """A checked file with the samples of one step."""

    path: Path
    digest: str
    available_fields: frozenset[str]
    """The fields among `reward`, `episode`, `advantages`, `returns` and `routes` that every sample has."""


@dataclass(frozen=True)
class Replay:
    """The saved samples of a replay: a file for each step, and which of its fields are used."""

    rollouts: Path
    """The file or folder of --from-rollouts."""
    files: Mapping[int, StepFile]
    """The file of each step; the steps have no gaps."""
    prompts: Sequence[Prompt]
    """The distinct prompts of all files."""
    source_run: RunDirectory | None
    """The run that wrote the files; None if they are not in the `rollouts/` folder of a run."""
    uses_saved_rewards: bool
    uses_saved_advantages: bool
    ignored_fields: frozenset[str]
    """Fields of the files that are not read, because steps recompute them or do not need them."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the samples, and of which of their fields are used."""
        digests = " ".join(f"{step} {file.digest}" for step, file in self.files.items())
        return {
            "the samples of --from-rollouts": hashlib.sha256(digests.encode()).hexdigest(),
            "the fields taken from the samples": (
                f"rewards {self.uses_saved_rewards}, advantages {self.uses_saved_advantages}, masks {self._keeps_masks}"
            ),
        }

    @property
    def report(self) -> str:
        """Report for users: which steps are replayed, and which fields of the samples are used."""
        first, last = min(self.files), max(self.files)
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        have_rewards = all("reward" in file.available_fields for file in self.files.values())
        differs = "reward.* differs from that of the samples' run" if have_rewards else "not every sample has one"
        rewards = "taken from the samples" if self.uses_saved_rewards else f"computed again, {differs}"
        advantages = "advantages and returns: taken from the samples; without these fields, algorithm.* would decide"
        return (
            f"{OPTION}: {steps} on the samples of {self.rollouts}; nothing is generated for them\n"
            f"rewards: {rewards}\n{advantages if self.uses_saved_advantages else 'advantages: computed again'}"
        )

    def load_groups(self, step: int) -> list[Group]:
        """Loads all groups of a step, including those of other hosts.

        Raises:
            InputError: the file has changed since it was checked.
        """
        file = self.files[step]
        if not file.path.is_file() or file_digest(file.path) != file.digest:
            raise InputError(f"{OPTION}: {file.path} has changed since the run began; restore it, or start a new run")
        samples = [sample for _, sample in read_samples(file.path, ignored_fields=self.ignored_fields)]
        if not self.uses_saved_rewards:
            # Rewards of turns belong to the saved rewards.
            samples = [replace(s, token_rewards=None) if s.episode is not None else s for s in samples]
        return group_samples(samples if self._keeps_masks else [_clear_filter_mask(s) for s in samples])

    @property
    def _keeps_masks(self) -> bool:
        """Whether masks in the files are kept, for example on samples for which an estimator plug-in failed."""
        return self.source_run is None or self.uses_saved_advantages


def _clear_filter_mask(sample: Sample) -> Sample:
    """Unmasks a sample that the source run's group filter had masked, because the step applies its own filter."""
    if sample.mask.any() or sample.finish_reason.startswith(DROPPED_PREFIX):
        return sample
    return replace(sample, loss_mask=sample.written_mask)


def find_source_run(path: Path) -> RunDirectory | None:
    """Returns the run if `path` is a run directory, its `rollouts/` folder or a file there; otherwise None."""
    path = path.expanduser().resolve()
    samples = path.parent if path.is_file() else path if path.name == ROLLOUTS_DIR else path / ROLLOUTS_DIR
    run = RunDirectory(samples.parent)
    return run if samples.name == ROLLOUTS_DIR and samples.is_dir() and run.has_settings else None


def find_model_run(request: StartRequest) -> RunDirectory | None:
    """Returns the run whose models are used: the run of the samples or, failing that, of the checkpoint."""
    run = None if request.rollouts is None else find_source_run(request.rollouts)
    return PolicyCheckpoint.open(request.checkpoint).run if run is None and request.checkpoint is not None else run


def read_replay(
    rollouts: Path,
    start: PolicyCheckpoint | None,
    settings: Settings,
    model: ModelSpec,
    critic: NetworkSpec | None,
    *,
    target_run: RunDirectory,
) -> Replay:
    """Reads and checks every line of the files of a replay.

    Args:
        rollouts: a file of samples, a folder of such files, or a run directory.
        start: the checkpoint to start from, already checked against the model; None = the models' own weights.
        target_run: the run that trains on the samples.

    Raises:
        InputError: a file cannot be replayed with this model and these settings.
    """
    run = find_source_run(rollouts)
    if run is not None and run.path == target_run.path.resolve():
        raise InputError(f"run.name: {target_run.path} is the run that {OPTION} would replay; choose another run.name")
    if start is not None and critic is not None:
        start.check_critic(critic)
    paths = _choose_files(rollouts, after_step=start.step if start else 0, steps=settings.run.steps)
    source = None if run is None else _source_settings(run, paths, settings)
    # The prompts were drawn by the curriculum of the run that wrote the samples.
    if settings.data.curriculum != "none" and (source is None or source.data.curriculum == "none"):
        raise InputError(f"{OPTION}: a replay uses the prompts of its samples; set data.curriculum to none")
    files: dict[int, StepFile] = {}
    prompts: dict[tuple[str, bytes], Prompt] = {}
    with _option_in_errors():
        for step, path in paths.items():
            files[step], prompts_of_file = _read_step_file(path, settings, model, source=source)
            prompts |= prompts_of_file
    available = frozenset.intersection(*(file.available_fields for file in files.values()))
    # A hub model with the same name in both settings has the commit that the source run used.
    pinned = settings if run is None else pin_revisions(settings, run)
    uses_rewards = "reward" in available and (source is None or _deciding_rewards(pinned) == _deciding_rewards(source))
    needed = {"advantages", "returns"} if settings.has_critic else {"advantages"}
    uses_advantages = needed <= available
    if source is not None:
        is_same = uses_rewards and _deciding_advantages(pinned) == _deciding_advantages(source)
        uses_advantages &= is_same and pinned.algorithm.has_custom_estimator
    if not uses_rewards:
        with _option_in_errors():
            check_answers(list(prompts.values()), [function.name for function in settings.reward.functions])
        if settings.env.source is not None and "episode" not in available:
            raise InputError(
                f"{OPTION}: rewards are recomputed, but samples without an episode have none from env.source: "
                f"{settings.env.source}; replay samples generated with it, or set env.source to null"
            )
    ignored = _ignored_fields(settings)
    ignored |= frozenset() if uses_rewards else {"reward", "rewards"}
    ignored |= frozenset() if uses_advantages else SAVED_ADVANTAGE_FIELDS
    return Replay(rollouts, files, tuple(prompts.values()), run, uses_rewards, uses_advantages, ignored)


def _ignored_fields(settings: Settings) -> frozenset[str]:
    """Returns the fields that every replay under these settings ignores: steps recompute them or do not need them."""
    computed = frozenset({"policy_logprobs", "reference_logprobs", "values", "step"})
    return computed if settings.rollout.routing_replay else computed | ROUTES_FIELD


def _source_settings(run: RunDirectory, paths: Mapping[int, Path], settings: Settings) -> Settings:
    """Returns the settings under which a run sampled these files, with hub models pinned to the commits that it used.

    Raises:
        InputError: there are several files, and a setting that affects training changed after the first file's step.
    """
    history = SettingsHistory.read(run)
    drawn = [step_of_samples(path) or step for step, path in paths.items()]
    last = drawn[0] if len(drawn) == 1 else math.inf
    for step, change in history.changes:
        changes_rates = change.name == "run.steps" and settings.optimizer.schedule != "constant"
        if drawn[0] < step <= last and (change.is_decisive or changes_rates):
            raise InputError(
                f"{OPTION}: the settings of {run.path} changed at step {step} ({change.to_text()}), but a replay "
                "uses the same settings for all steps; start with --checkpoint "
                f"{run.checkpoints_dir / str(step - 1)}, or give the file of one step"
            )
    return pin_revisions(load(history.period_of(drawn[0]).file, [], {}).settings, run)


def _deciding_rewards(settings: Settings) -> tuple[Any, ...]:
    """Returns the settings on which a sample's rewards depend; limits of plug-ins are not among them."""
    max_tokens = settings.rollout.max_new_tokens if settings.reward.overlong_buffer else None
    env = settings.env
    of_env = None if env.source is None else (env.source, env.weight, env.credit)
    return settings.reward, settings.plugins.env_vars, max_tokens, of_env


def _deciding_advantages(settings: Settings) -> tuple[Any, ...]:
    """Returns the settings, apart from those of rewards, on which the advantages of a plug-in depend."""
    algorithm = settings.algorithm
    penalty = (algorithm.kl_in, algorithm.beta, algorithm.kl_estimator, algorithm.kl_target, settings.reference)
    learned = (algorithm.filter, algorithm.mask_truncated, algorithm.whiten_advantages)
    return algorithm.estimator, learned, penalty if algorithm.penalizes_samples else None


def _choose_files(path: Path, *, after_step: int, steps: int) -> dict[int, Path]:
    """Maps the steps from `after_step` + 1 to `steps` to their files; a single file is for the first of them."""
    path = path.expanduser()
    if path.is_file():
        files = {after_step + 1: path}
    elif path.is_dir():
        files = sample_files(path / ROLLOUTS_DIR if (path / ROLLOUTS_DIR).is_dir() else path)
    else:
        raise InputError(f"{OPTION}: {path} is neither a file nor a folder; give a file of samples, or a run's folder")
    if not files:
        raise InputError(
            f"{OPTION}: {path} contains no step_<number>.jsonl (with logging.save_rollouts: false none are "
            "written); give the folder of a run that has them, or a file of samples"
        )
    wanted = range(after_step + 1, min(max(files), steps) + 1)
    if not wanted:
        raise InputError(
            f"{OPTION}: there are no samples to replay after step {after_step} of --checkpoint: {path} ends with "
            f"step {max(files)}, and run.steps is {steps}; choose an earlier checkpoint"
            + (", or raise run.steps" if max(files) > after_step else "")
        )
    missing = next((step for step in wanted if step not in files), None)
    if missing is not None:
        following = min(step for step in files if step > missing)
        raise InputError(
            f"{OPTION}: {path} has no samples of step {missing}; lower run.steps to end before it, or start after "
            f"it with a --checkpoint of step {following - 1}"
        )
    return {step: files[step] for step in wanted}


@contextmanager
def _option_in_errors() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{OPTION}: {error}") from error


def _read_step_file(
    path: Path, settings: Settings, model: ModelSpec, *, source: Settings | None
) -> tuple[StepFile, dict[tuple[str, bytes], Prompt]]:
    """Reads and checks a file; returns it with its prompts.

    Args:
        source: the settings of the run that wrote the file; None for other files. Only in a run's file may a prompt
            have several groups, of which the replay uses the first, as the run did.
    """
    digest = file_digest(path)
    prompts: dict[tuple[str, bytes], Prompt] = {}
    group_sizes = Counter[int]()
    prompt_of_group: dict[int, str] = {}
    group_of_prompt: dict[str, int] = {}
    missing = set[str]()
    # What a step compares if not the sum.
    parts = settings.compared_parts
    for where, sample in read_samples(path, ignored_fields=_ignored_fields(settings)):
        _check_sample(sample, settings, model, where)
        group, uid = sample.group_id, sample.prompt.uid
        group_sizes[group] += 1
        if prompt_of_group.setdefault(group, uid) != uid:
            raise InputError(
                f"{where}: group_id {group} has samples of prompts {prompt_of_group[group]} and {uid}; give them "
                "different group ids"
            )
        if group_of_prompt.setdefault(uid, group) != group and source is None:
            raise InputError(
                f"{where}: group_id {group_of_prompt[uid]} and group_id {group} both have samples of prompt {uid}, "
                "but a step has only one group per prompt; join them under one group_id, or give one of them "
                "another prompt uid"
            )
        prompts.setdefault((uid, sample.prompt.token_ids.tobytes()), sample.prompt)
        missing |= {name for name in SAVED_ADVANTAGE_FIELDS | ROUTES_FIELD if getattr(sample, name) is None}
        has_parts = sample.reward is None or not parts or any(name in parts for name in sample.rewards or ())
        missing |= set() if has_saved_reward(sample) and has_parts else {"reward"}
        missing |= {"episode"} if sample.episode is None and not was_dropped_in_rollout(sample) else set()
    if not group_sizes:
        raise InputError(f"{path} contains no samples; give a file written by grpo rollout, or the folder of a run")
    smallest = min(group_sizes.values())
    if source is not None and smallest < source.rollout.group_size:
        raise InputError(
            f"{path} is incomplete: a group has {smallest} of the {source.rollout.group_size} samples per prompt of "
            "its run; restore it from a copy"
        )
    per_host, hosts = settings.rollout.prompts_per_step, jax.process_count()
    if len(group_sizes) != per_host * hosts:
        each, rest = divmod(len(group_sizes), hosts)
        way_out = (
            f"use a number of hosts that divides {len(group_sizes)}"
            if rest
            else f"set rollout.prompts_per_step to {each}"
        )
        raise InputError(
            f"{path} contains {format_count(len(group_sizes), 'group')}, but a step has rollout.prompts_per_step = "
            f"{per_host}{f' on each of {hosts} hosts' if hosts > 1 else ''}; {way_out}"
        )
    if max(group_sizes.values()) > settings.rollout.group_size:
        raise InputError(
            f"{path} has a group of {max(group_sizes.values())} samples, more than rollout.group_size = "
            f"{settings.rollout.group_size}; set it to {max(group_sizes.values())}"
        )
    available = frozenset({"reward", "episode", *SAVED_ADVANTAGE_FIELDS, *ROUTES_FIELD} - missing)
    return StepFile(path, digest, available), prompts


def _check_sample(sample: Sample, settings: Settings, model: ModelSpec, where: str) -> None:
    check_fits(sample, model.architecture, where=where)
    ids, turns = sample.completion_ids, sample.episode.turns if sample.episode is not None else ()
    written = [(ids[turn.start : turn.end], turn.text) for turn in turns] or [(ids, sample.completion)]
    for part, expected in written:
        if (text := model.tokenizer.decode(part)) != expected:
            raise InputError(
                f"{where}: completion_token_ids decode to {text!r:.40} with the tokenizer of model.path, but "
                f"completion is {expected!r:.40}; correct the wrong one, or set model.path to the model whose "
                "tokenizer produced the ids"
            )
    for name, ids, field, longest in (
        ("prompt_token_ids", sample.prompt.token_ids, "data.max_prompt_length", settings.data.max_prompt_length),
        ("completion_token_ids", sample.completion_ids, "rollout.max_new_tokens", settings.rollout.max_new_tokens),
    ):
        if len(ids) > longest:
            raise InputError(
                f"{where}: {name} has {len(ids)} tokens, more than {field} = {longest}; raise this setting"
            )
