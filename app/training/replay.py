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

from app.checkpoint.policy_checkpoint import SavedPolicy
from app.records.run_directory import RunDirectory
from app.records.sample import DROPPED, Prompt, Sample
from app.reward.tasks import check_answers
from app.runtime.model_spec import CriticInput, ModelInput
from app.runtime.pinned_revisions import pinned
from app.training.dynamic_sampling import Group, by_group
from app.training.replay_files import (
    CREDITED,
    OPTION,
    REWARDED,
    ROLLOUTS,
    SCORED,
    Found,
    StepFile,
    check_groups,
    check_unchanged,
    chosen,
    look,
    naming_the_option,
    samples_of,
)
from app.training.replay_notes import Source, lines_of
from settings import Settings, load
from settings.errors import InputError
from settings.schema.reward import Reward

OF_PACE = frozenset({"workers", "load_timeout_s"})
"""Fields of `reward` that no sample's reward depends on."""
LIMITS = frozenset({"timeout_s", "cpu_s", "memory_mib"})
"""Those that decide which calls of plug-ins fail."""


class Asked(NamedTuple):
    """What the options of `grpo train` say."""

    rollouts: Path
    checkpoint: Path | None = None
    """What to start from, instead of the models' own weights."""


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
    source: RunDirectory | None
    """The run that has written them; None: they are the end of a chain."""
    takes_rewards: bool
    takes_credit: bool
    report: str
    """For people: what is replayed, and what of it is taken."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of the samples and the steps that they are for, of what is taken of them, and of the state before them."""
        digests = " ".join(f"{step} {file.digest}" for step, file in self.files.items())
        state = "none" if self.start is None else f"{self.start.step} {sorted(self.start.checksums.items())}"
        return {
            "the samples of --from-rollouts": hashlib.sha256(digests.encode()).hexdigest(),
            "what is taken of the samples": (
                f"rewards {self.takes_rewards}, credit {self.takes_credit}, masks {self.source is None}"
            ),
            "the checkpoint of --checkpoint": hashlib.sha256(state.encode()).hexdigest() if self.start else state,
        }

    @property
    def record(self) -> dict[str, str]:
        """For `sessions.jsonl`."""
        path, checkpoint = self.asked.rollouts, self.start and self.start.path
        return {"from_rollouts": str(path), **({"checkpoint": str(checkpoint)} if checkpoint else {})}

    def groups(self, step: int) -> list[Group]:
        """Those of a step, of all hosts.

        Raises:
            InputError: the file is no longer what it was when it was checked.
        """
        file = self.files[step]
        try:
            samples = [sample for _, sample in samples_of(file.path, left_out=self._left_out)]
        except InputError:
            check_unchanged(file)
            raise
        check_unchanged(file)
        if self.source is not None:
            samples = [_for_another_filter(sample) for sample in samples]
        return by_group(samples)

    @property
    def _left_out(self) -> frozenset[str]:
        rewards = frozenset[str]() if self.takes_rewards else REWARDED
        return SCORED | rewards | (frozenset() if self.takes_credit else CREDITED)


def _for_another_filter(sample: Sample) -> Sample:
    """In the loss again where the run's filter had left it out; the step's own leaves out what it would."""
    if sample.mask.any() or sample.finish_reason.startswith(DROPPED):
        return sample
    return replace(sample, loss_mask=None)


def run_of(path: Path) -> RunDirectory | None:
    """The run that has written samples: `path` is one of its files, their folder, or its own; None for other files."""
    path = path.expanduser().resolve()
    if path.is_file():
        folder, is_its_own = path.parent.parent, path.parent.name == ROLLOUTS
    elif path.name == ROLLOUTS:
        folder, is_its_own = path.parent, True
    else:
        folder, is_its_own = path, (path / ROLLOUTS).is_dir()
    run = RunDirectory(folder)
    return run if is_its_own and run.is_occupied else None


def known_run(asked: Asked) -> RunDirectory | None:
    """The run whose models a replay has: that of the samples, or else of the checkpoint."""
    run = run_of(asked.rollouts)
    return SavedPolicy.open(asked.checkpoint).run if run is None and asked.checkpoint is not None else run


def read_replay(
    asked: Asked, settings: Settings, model: ModelInput, critic: CriticInput | None, *, into: RunDirectory
) -> Replay:
    """Looks at every line of every file that will be replayed, and at the checkpoint to start from.

    Args:
        into: the run that replays.

    Raises:
        InputError: what cannot be replayed with this model and these settings, named.
    """
    run = run_of(asked.rollouts)
    if run is not None and run.path == into.path.resolve():
        raise InputError(f"run.name: {into.path} is what {OPTION} would replay; choose another run.name")
    start = None if asked.checkpoint is None else _open_start(asked.checkpoint, model, critic)
    paths = chosen(asked.rollouts, after=start.step if start else 0, settings=settings)
    files: dict[int, StepFile] = {}
    prompts: dict[tuple[str, bytes], Prompt] = {}
    with naming_the_option():
        for step, path in paths.items():
            files[step], those = look(path, settings, model, is_of_run=run is not None)
            prompts |= those
            check_groups(files[step], settings)
    found = reduce(Found.both, (file.found for file in files.values()))
    source = None if run is None else _source(run)
    # A hub model that both ask for in the same words is the commit that the run had.
    asked_now = settings if run is None else pinned(settings, run)
    takes_rewards = found.rewards and (source is None or _rewards_alike(asked_now, source.settings))
    takes_credit = source is None and found.advantages and (found.returns or not settings.has_critic)
    if not takes_rewards:
        with naming_the_option():
            check_answers(list(prompts.values()), [function.name for function in settings.reward.functions])
    replay = Replay(asked, start, files, tuple(prompts.values()), run, takes_rewards, takes_credit, report="")
    told = lines_of(files, found, asked_now, source, model, takes_rewards=takes_rewards, takes_credit=takes_credit)
    return replace(replay, report="\n".join([_told_of_steps(asked, files, start), *told]))


def _source(run: RunDirectory) -> Source:
    """What a run had that has written samples."""
    had = pinned(load(str(run.settings), [], {}).settings, run)
    try:
        tokenizer = SavedPolicy.open(run.path).progress.fingerprints.get("tokenizer")
    except InputError:
        # Nothing is started from there: it may have been deleted, or be written at this moment.
        tokenizer = None
    return Source(had, tokenizer)


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


def _rewards_alike(settings: Settings, had: Settings) -> bool:
    """Whether both give a sample the same reward."""
    penalises = settings.reward.overlong_buffer is not None
    same_length = settings.rollout.max_new_tokens == had.rollout.max_new_tokens
    return _deciding(settings.reward) == _deciding(had.reward) and (same_length or not penalises)


def _deciding(reward: Reward) -> dict[str, Any]:
    """What of the settings a sample's reward depends on."""
    # Where what exceeds a limit ends the run, no reward of a run that went on comes of one.
    limits = LIMITS if reward.on_error == "raise" else frozenset[str]()
    # A plug-in may compare the samples that it is given at once.
    batches = frozenset({"batch_size"} if all(one.function is None for one in reward.functions) else ())
    return reward.model_dump(exclude={*OF_PACE, *limits, *batches})


def _told_of_steps(asked: Asked, files: Mapping[int, StepFile], start: SavedPolicy | None) -> str:
    first, last = min(files), max(files)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    whence = f", from the state of {start.path}" if start else ""
    return f"{OPTION}: {steps} on the samples of {asked.rollouts}{whence}; nothing is generated for them"
