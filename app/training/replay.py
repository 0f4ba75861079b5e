"""`grpo train --from-rollouts`: steps that learn from saved samples.

Tokens, behavior logprobs, masks and versions are always taken from the files. Logprobs and values are always computed
again by the step's own networks.

From the `rollouts/` of a run, rewards are taken unless `reward.*` differs from that run's, and advantages are
computed again under the current settings. Any other file is the end of a chain (`grpo rollout`, `score`, `gae`):
rewards, and advantages and returns, are taken if every sample has them, and computed otherwise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from app.checkpoint.saved_policy import PolicyCheckpoint
from app.records.checksum_file import read_checksums
from app.records.run_directory import RunDirectory, step_of_samples
from app.records.sample import DROPPED_PREFIX, Prompt, Sample
from app.records.sample_json import read_samples
from app.records.settings_history import SettingsHistory, changes_by_step, period_of
from app.reward.builtin_tasks import check_answers
from app.reward.reward_functions import ComputeRewards, RewardFunctions
from app.reward.saved_rewards import reuse_saved_rewards
from app.runtime.model_spec import CriticSpec, ModelSpec
from app.runtime.pinned_revisions import pin_revisions
from app.training.dynamic_sampling import Group, group_samples
from app.training.replay_files import (
    OPTION,
    RESCORED_FIELDS,
    ROLLOUTS_DIR,
    ROUTES_FIELD,
    SAVED_ADVANTAGE_FIELDS,
    SAVED_REWARD_FIELDS,
    StepFile,
    choose_files,
    option_in_errors,
    read_step_file,
)
from settings import Settings, load
from settings.errors import InputError

PLUGIN_LIMIT_FIELDS = frozenset({"timeout_s", "memory_mib"})
"""Fields of `plugins` that decide which calls of plug-ins fail."""


class ReplayRequest(NamedTuple):
    """The options of `grpo train` for a replay."""

    rollouts: Path
    checkpoint: Path | None = None
    """The checkpoint to start from, instead of the models' own weights."""


@dataclass(frozen=True)
class Replay:
    """Steps whose samples are in files."""

    request: ReplayRequest
    initial_checkpoint: PolicyCheckpoint | None
    """The checkpoint of --checkpoint; None for the models' own weights."""
    files: Mapping[int, StepFile]
    """Files by step, without gaps."""
    prompts: Sequence[Prompt]
    """The distinct prompts of all files."""
    source_run: RunDirectory | None
    """The run that wrote the files; None if they are the end of a chain."""
    uses_saved_rewards: bool
    uses_saved_advantages: bool
    uses_saved_routes: bool
    report: str
    """Text for users: what is replayed, and which fields are taken from the samples."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the samples, of the fields taken from them, and of the initial checkpoint."""
        digests = " ".join(f"{step} {file.digest}" for step, file in self.files.items())
        start = self.initial_checkpoint
        state = "" if start is None else f"{start.step} {sorted(start.checksums.items())}"
        return {
            "the samples of --from-rollouts": hashlib.sha256(digests.encode()).hexdigest(),
            "the fields taken from the samples": (
                f"rewards {self.uses_saved_rewards}, advantages {self.uses_saved_advantages}, masks "
                f"{self.source_run is None}"
            ),
            "the checkpoint of --checkpoint": hashlib.sha256(state.encode()).hexdigest() if state else "none",
        }

    @property
    def session_fields(self) -> dict[str, str]:
        """Fields for the line of this start in `sessions.jsonl`."""
        checkpoint = {"checkpoint": str(self.initial_checkpoint.path)} if self.initial_checkpoint else {}
        return {"from_rollouts": str(self.request.rollouts), **checkpoint}

    def choose_rewards(self, rewards: RewardFunctions) -> ComputeRewards:
        """Returns the function that takes the rewards from the samples, or that computes them again."""
        if self.uses_saved_rewards:
            return partial(reuse_saved_rewards, names=rewards.fallible_names)
        return rewards.compute_rewards

    def load_groups(self, step: int) -> list[Group]:
        """Loads the groups of a step, those of all hosts.

        Raises:
            InputError: the file has changed since it was checked.
        """
        file = self.files[step]
        ignored = RESCORED_FIELDS | (frozenset() if self.uses_saved_rewards else SAVED_REWARD_FIELDS)
        ignored |= frozenset() if self.uses_saved_advantages else SAVED_ADVANTAGE_FIELDS
        ignored |= frozenset() if self.uses_saved_routes else ROUTES_FIELD
        try:
            samples = [sample for _, sample in read_samples(file.path, ignored_fields=ignored)]
        finally:
            file.check_unchanged()
        if not self.uses_saved_rewards:
            # Those of turns belong to the saved rewards.
            samples = [replace(s, token_rewards=None) if s.episode is not None else s for s in samples]
        return group_samples(samples if self.source_run is None else [_clear_filter_mask(s) for s in samples])


def _clear_filter_mask(sample: Sample) -> Sample:
    """Puts a sample that the run's filter had masked back into the loss; the step applies its own filter."""
    if sample.mask.any() or sample.finish_reason.startswith(DROPPED_PREFIX):
        return sample
    return replace(sample, loss_mask=sample.written_mask)


def find_source_run(path: Path) -> RunDirectory | None:
    """Returns the run whose folder, `rollouts/` or file `path` is; None for other files."""
    path = path.expanduser().resolve()
    samples = path.parent if path.is_file() else path if path.name == ROLLOUTS_DIR else path / ROLLOUTS_DIR
    run = RunDirectory(samples.parent)
    return run if samples.name == ROLLOUTS_DIR and samples.is_dir() and run.has_settings else None


def find_model_run(request: ReplayRequest) -> RunDirectory | None:
    """Returns the run whose models a replay uses: that of the samples, else that of the checkpoint."""
    run = find_source_run(request.rollouts)
    return PolicyCheckpoint.open(request.checkpoint).run if run is None and request.checkpoint is not None else run


def read_replay(
    request: ReplayRequest, settings: Settings, model: ModelSpec, critic: CriticSpec | None, *, target_run: RunDirectory
) -> Replay:
    """Reads and checks every line of the files, and the checkpoint to start from.

    Args:
        target_run: the run that replays.

    Raises:
        InputError: something cannot be replayed with this model and these settings.
    """
    run = find_source_run(request.rollouts)
    if run is not None and run.path == target_run.path.resolve():
        raise InputError(f"run.name: {target_run.path} is what {OPTION} would replay; choose another run.name")
    start = None if request.checkpoint is None else PolicyCheckpoint.open(request.checkpoint)
    if start is not None:
        start.check_compatible(model)
        if critic is not None:
            start.check_critic(critic)
    paths = choose_files(request.rollouts, after_step=start.step if start else 0, steps=settings.run.steps)
    source = None if run is None else _source_settings(run, paths, settings)
    checksums = read_checksums(next(iter(paths.values())).parent)
    files: dict[int, StepFile] = {}
    prompts: dict[tuple[str, bytes], Prompt] = {}
    with option_in_errors():
        for step, path in paths.items():
            files[step], prompts_of_file = read_step_file(
                path, settings, model, source=source, checksum=checksums.get(path.name)
            )
            prompts |= prompts_of_file
    available = frozenset.intersection(*(file.available_fields for file in files.values()))
    # A hub model that both settings name alike is at the commit that the source run used.
    pinned = settings if run is None else pin_revisions(settings, run)
    uses_rewards = "reward" in available and (source is None or _same_rewards(pinned, source))
    needed = {"advantages", "returns"} if settings.has_critic else {"advantages"}
    uses_advantages = source is None and needed <= available
    if not uses_rewards:
        with option_in_errors():
            check_answers(list(prompts.values()), [function.name for function in settings.reward.functions])
        if settings.env.source is not None and "episode" not in available:
            raise InputError(
                f"{OPTION}: rewards are computed again, and env.source: {settings.env.source} has none for samples "
                "without an episode; replay samples that it took part in, or set env.source to null"
            )
    replay = Replay(
        *(request, start, files, tuple(prompts.values()), run, uses_rewards, uses_advantages),
        settings.rollout.routing_replay,
        report="",
    )
    return replace(replay, report="\n".join(_report_lines(replay, available)))


def _source_settings(run: RunDirectory, paths: Mapping[int, Path], settings: Settings) -> Settings:
    """Returns the settings under which a run drew the samples of these files, with the commits of its hub models.

    Raises:
        InputError: they were changed from one of these steps to the next, or to the end of the run, whose settings a
            replay of several files has.
    """
    periods = SettingsHistory.read(run).periods
    drawn = [step_of_samples(path) or step for step, path in paths.items()]
    last = drawn[0] if len(drawn) == 1 else math.inf
    for step, change in changes_by_step(periods):
        changes_rates = change.name == "run.steps" and settings.optimizer.schedule != "constant"
        if drawn[0] < step <= last and (change.is_decisive or changes_rates):
            raise InputError(
                f"{OPTION}: from step {step} on, the settings of {run.path} were others ({change.to_text()}), and a "
                f"replay has the same settings for all steps; start with --checkpoint "
                f"{run.checkpoints_dir / str(step - 1)}, or give the file of one step"
            )
    return pin_revisions(load(period_of(periods, drawn[0]).file, [], {}).settings, run)


def _same_rewards(settings: Settings, source: Settings) -> bool:
    """Returns whether both settings give a sample the same reward."""

    def relevant_fields(settings: Settings) -> dict[str, Any]:
        reward = settings.reward
        # If a call that exceeds a limit ends the run, the limits did not change any saved reward.
        limits = PLUGIN_LIMIT_FIELDS if reward.on_error == "raise" else frozenset[str]()
        # A plug-in may compare the samples of one call.
        batches = frozenset({"batch_size"} if all(one.function is None for one in reward.functions) else ())
        fields = reward.model_dump(exclude={*batches}) | settings.plugins.model_dump(exclude={"workers", *limits})
        if reward.overlong_buffer:
            fields["max_new_tokens"] = settings.rollout.max_new_tokens
        env = settings.env
        return fields | ({} if env.source is None else {"env": (env.source, env.weight, env.credit)})

    return relevant_fields(settings) == relevant_fields(source)


def _report_lines(replay: Replay, available: frozenset[str]) -> list[str]:
    """Returns what is replayed, and what is taken from the samples."""
    first, last = min(replay.files), max(replay.files)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    start = f", from the state of {replay.initial_checkpoint.path}" if replay.initial_checkpoint else ""
    lines = [f"{OPTION}: {steps} on the samples of {replay.request.rollouts}{start}; nothing is generated for them"]
    differs = "reward.* differs from that of the samples' run" if "reward" in available else "not every sample has one"
    lines.append(f"rewards: {'those of the samples' if replay.uses_saved_rewards else f'computed again, {differs}'}")
    if replay.uses_saved_advantages:
        lines.append("advantages and returns: those of the samples; without these fields algorithm.* would decide")
    else:
        reason = ", not every sample has them" if replay.source_run is None else ""
        lines.append(f"advantages: computed again{reason}")
    return lines
