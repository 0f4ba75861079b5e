"""`grpo train --from-rollouts`: which files steps learn from, and what of them is taken as it stands.

Tokens, behavior logprobs, masks and versions always come from the files, logprobs and values never: the step's own
networks give them, which say the same as those that the files were scored with, or else are the right ones to ask.

A file in the `rollouts/` of a run is replayed: its rewards are taken unless `reward.*` is no longer what the run had,
and credit is estimated anew, under whatever settings. Any other file is the end of a chain (`grpo rollout`, `score`,
`gae`): what every sample of it has, rewards as well as advantages and returns, is taken, and the rest is found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from app.checkpoint.policy_checkpoint import PolicyCheckpoint
from app.records.run_directory import RunDirectory
from app.records.sample import DROPPED_PREFIX, Prompt, Sample
from app.reward.tasks import check_answers
from app.runtime.model_spec import CriticSpec, ModelSpec
from app.runtime.pinned_revisions import pin_revisions
from app.training.dynamic_sampling import Group, group_samples
from app.training.replay_files import (
    OPTION,
    RESCORED_FIELDS,
    ROLLOUTS_DIR,
    SAVED_ADVANTAGE_FIELDS,
    SAVED_REWARD_FIELDS,
    AvailableFields,
    StepFile,
    check_groups,
    check_unchanged,
    choose_files,
    option_in_errors,
    read_samples,
    read_step_file,
)
from app.training.replay_notes import SourceRun, make_replay_notes
from settings import Settings, load
from settings.errors import InputError
from settings.schema.reward import RewardSettings

REWARD_NEUTRAL_FIELDS = frozenset({"workers", "load_timeout_s"})
"""Fields of `reward` that no sample's reward depends on."""
PLUGIN_LIMIT_FIELDS = frozenset({"timeout_s", "cpu_s", "memory_mib"})
"""Those that decide which calls of plug-ins fail."""


class ReplayRequest(NamedTuple):
    """What the options of `grpo train` say."""

    rollouts: Path
    checkpoint: Path | None = None
    """What to start from, instead of the models' own weights."""


@dataclass(frozen=True)
class Replay:
    """Steps whose samples lie in files."""

    request: ReplayRequest
    initial_checkpoint: PolicyCheckpoint | None
    """The checkpoint of --checkpoint; None: the models' own weights."""
    files: Mapping[int, StepFile]
    """By step, from the first one on without a gap."""
    prompts: Sequence[Prompt]
    """Of all files, each once."""
    source_run: RunDirectory | None
    """The run that has written them; None: they are the end of a chain."""
    uses_saved_rewards: bool
    uses_saved_advantages: bool
    report: str
    """For people: what is replayed, and what of it is taken."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of the samples and the steps that they are for, of what is taken of them, and of the state before them."""
        digests = " ".join(f"{step} {file.digest}" for step, file in self.files.items())
        state = (
            "none"
            if self.initial_checkpoint is None
            else f"{self.initial_checkpoint.step} {sorted(self.initial_checkpoint.checksums.items())}"
        )
        return {
            "the samples of --from-rollouts": hashlib.sha256(digests.encode()).hexdigest(),
            "what is taken of the samples": (
                f"rewards {self.uses_saved_rewards}, credit {self.uses_saved_advantages}, masks "
                f"{self.source_run is None}"
            ),
            "the checkpoint of --checkpoint": hashlib.sha256(state.encode()).hexdigest()
            if self.initial_checkpoint
            else state,
        }

    @property
    def session_fields(self) -> dict[str, str]:
        """For `sessions.jsonl`."""
        path, checkpoint = self.request.rollouts, self.initial_checkpoint and self.initial_checkpoint.path
        return {"from_rollouts": str(path), **({"checkpoint": str(checkpoint)} if checkpoint else {})}

    def load_groups(self, step: int) -> list[Group]:
        """Those of a step, of all hosts.

        Raises:
            InputError: the file is no longer what it was when it was checked.
        """
        file = self.files[step]
        try:
            samples = [sample for _, sample in read_samples(file.path, ignored_fields=self._ignored_fields)]
        except InputError:
            check_unchanged(file)
            raise
        check_unchanged(file)
        if self.source_run is not None:
            samples = [_clear_filter_mask(sample) for sample in samples]
        return group_samples(samples)

    @property
    def _ignored_fields(self) -> frozenset[str]:
        rewards = frozenset[str]() if self.uses_saved_rewards else SAVED_REWARD_FIELDS
        return RESCORED_FIELDS | rewards | (frozenset() if self.uses_saved_advantages else SAVED_ADVANTAGE_FIELDS)


def _clear_filter_mask(sample: Sample) -> Sample:
    """In the loss again where the run's filter had left it out; the step's own leaves out what it would."""
    if sample.mask.any() or sample.finish_reason.startswith(DROPPED_PREFIX):
        return sample
    return replace(sample, loss_mask=None)


def find_source_run(path: Path) -> RunDirectory | None:
    """The run that has written samples: `path` is one of its files, their folder, or its own; None for other files."""
    path = path.expanduser().resolve()
    if path.is_file():
        folder, is_its_own = path.parent.parent, path.parent.name == ROLLOUTS_DIR
    elif path.name == ROLLOUTS_DIR:
        folder, is_its_own = path.parent, True
    else:
        folder, is_its_own = path, (path / ROLLOUTS_DIR).is_dir()
    run = RunDirectory(folder)
    return run if is_its_own and run.has_settings else None


def find_model_run(request: ReplayRequest) -> RunDirectory | None:
    """The run whose models a replay has: that of the samples, or else of the checkpoint."""
    run = find_source_run(request.rollouts)
    return PolicyCheckpoint.open(request.checkpoint).run if run is None and request.checkpoint is not None else run


def read_replay(
    request: ReplayRequest, settings: Settings, model: ModelSpec, critic: CriticSpec | None, *, target_run: RunDirectory
) -> Replay:
    """Looks at every line of every file that will be replayed, and at the checkpoint to start from.

    Args:
        into: the run that replays.

    Raises:
        InputError: what cannot be replayed with this model and these settings, named.
    """
    run = find_source_run(request.rollouts)
    if run is not None and run.path == target_run.path.resolve():
        raise InputError(f"run.name: {target_run.path} is what {OPTION} would replay; choose another run.name")
    start = None if request.checkpoint is None else _open_initial_checkpoint(request.checkpoint, model, critic)
    paths = choose_files(request.rollouts, after_step=start.step if start else 0, settings=settings)
    files: dict[int, StepFile] = {}
    prompts: dict[tuple[str, bytes], Prompt] = {}
    with option_in_errors():
        for step, path in paths.items():
            files[step], those = read_step_file(path, settings, model, from_run=run is not None)
            prompts |= those
            check_groups(files[step], settings)
    found = reduce(AvailableFields.intersection, (file.available_fields for file in files.values()))
    source = None if run is None else _read_source_run(run)
    # A hub model that both ask for in the same words is the commit that the run had.
    asked_now = settings if run is None else pin_revisions(settings, run)
    takes_rewards = found.rewards and (source is None or _same_rewards(asked_now, source.settings))
    takes_credit = source is None and found.advantages and (found.returns or not settings.has_critic)
    if not takes_rewards:
        with option_in_errors():
            check_answers(list(prompts.values()), [function.name for function in settings.reward.functions])
    replay = Replay(request, start, files, tuple(prompts.values()), run, takes_rewards, takes_credit, report="")
    told = make_replay_notes(
        files, found, asked_now, source, model, uses_saved_rewards=takes_rewards, uses_saved_advantages=takes_credit
    )
    return replace(replay, report="\n".join([_steps_note(request, files, start), *told]))


def _read_source_run(run: RunDirectory) -> SourceRun:
    """What a run had that has written samples."""
    had = pin_revisions(load(str(run.settings_path), [], {}).settings, run)
    try:
        tokenizer = PolicyCheckpoint.open(run.path).progress.fingerprints.get("tokenizer")
    except InputError:
        # Nothing is started from there: it may have been deleted, or be written at this moment.
        tokenizer = None
    return SourceRun(had, tokenizer)


def _open_initial_checkpoint(path: Path, model: ModelSpec, critic: CriticSpec | None) -> PolicyCheckpoint:
    start = PolicyCheckpoint.open(path)
    start.check_compatible(model)
    saved = start.progress.fingerprints.get("the critic")
    if critic is not None and saved not in (None, critic.files.fingerprint):
        raise InputError(
            f"--checkpoint: {start.path} holds a critic that was trained from another model than that of critic.path; "
            f"set critic.path to what {start.run.settings_path} names"
        )
    return start


def _same_rewards(settings: Settings, source_settings: Settings) -> bool:
    """Whether both give a sample the same reward."""
    penalises = settings.reward.overlong_buffer is not None
    same_length = settings.rollout.max_new_tokens == source_settings.rollout.max_new_tokens
    return _reward_relevant_fields(settings.reward) == _reward_relevant_fields(source_settings.reward) and (
        same_length or not penalises
    )


def _reward_relevant_fields(reward: RewardSettings) -> dict[str, Any]:
    """What of the settings a sample's reward depends on."""
    # Where what exceeds a limit ends the run, no reward of a run that went on comes of one.
    limits = PLUGIN_LIMIT_FIELDS if reward.on_error == "raise" else frozenset[str]()
    # A plug-in may compare the samples that it is given at once.
    batches = frozenset({"batch_size"} if all(one.function is None for one in reward.functions) else ())
    return reward.model_dump(exclude={*REWARD_NEUTRAL_FIELDS, *limits, *batches})


def _steps_note(request: ReplayRequest, files: Mapping[int, StepFile], checkpoint: PolicyCheckpoint | None) -> str:
    first, last = min(files), max(files)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    whence = f", from the state of {checkpoint.path}" if checkpoint else ""
    return f"{OPTION}: {steps} on the samples of {request.rollouts}{whence}; nothing is generated for them"
