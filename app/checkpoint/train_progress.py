"""The state of a run: its networks, its other progress, and the progress record in every checkpoint.

The record is JSON inside JSON: `{"record": TEXT, "sha256": digest of TEXT}`. TEXT also contains the checksums of the
arrays, so that the digest covers everything that determines how a run continues.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app.update.optimizer import TrainState

FORMAT = 2
"""Version of the record and the arrays; increased when the program can no longer read what it wrote before."""
NetworkStates = Mapping[str, TrainState]
"""Maps `policy`, and `critic` if there is one, to the network's state, or to its shapes or shardings."""


class OtherVersionError(Exception):
    """The record is intact, but was written by another version of this program."""

    def __init__(self) -> None:
        super().__init__("was written by another version of this program; use that version")


@dataclass(frozen=True)
class TrainProgress:
    """The progress of a run, apart from its networks. All randomness follows from the run's seed and these fields."""

    step: int
    """Number of completed training steps; the next step samples with this policy version."""
    position: int
    """Number of prompts taken from the prompt order so far, over all hosts and epochs."""
    fingerprints: Mapping[str, str]
    """Fingerprints of the run's inputs, such as model, tokenizer and data."""
    total_tokens: int = 0
    """Number of prompt and completion tokens of all samples so far, over all hosts."""
    initial_evaluation: Mapping[str, float | None] | None = None
    """Metrics under `eval/` before the first step; None if the run started without an evaluation."""
    wandb_id: str | None = None
    kl_coef: float | None = None
    """Weight of the KL penalty in the next step's rewards, used if it is adaptive; None before the first step."""
    lengths: Mapping[str, float] | None = None
    """Mean length of each prompt's latest samples, used to schedule its next samples; None without workers."""
    finished_lengths: Sequence[tuple[int, float | None]] | None = None
    """Tokens and seconds of recently finished samples, oldest first, used for scheduling; None without workers."""
    pass_rates: Mapping[str, float] | None = None
    """Running pass rate of each prompt, used to sample the next prompts; None without a curriculum."""
    evaluation: Mapping[str, float | None] | None = None
    """Metrics under `eval/` of this step; None if it was not evaluated."""
    unevaluated: Mapping[str, Any] | None = None
    """Training metrics of the step if its evaluation is due but not complete; otherwise None."""

    def after_step(self, step: int, *, num_prompts: int, num_tokens: int, **changed: Any) -> TrainProgress:
        """Returns the progress after a step that used this many prompts and tokens, before its evaluation."""
        position, total = self.position + num_prompts, self.total_tokens + num_tokens
        return replace(self, step=step, position=position, total_tokens=total, evaluation=None, **changed)

    def with_evaluation(self, metrics: Mapping[str, float | None]) -> TrainProgress:
        """Returns the progress after the step's evaluation with these metrics."""
        evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        return replace(self, evaluation=evaluation or None, unevaluated=None)


@dataclass(frozen=True)
class RunState:
    policy: TrainState
    critic: TrainState | None = None
    """State of the critic; None for algorithms without a critic."""
    kl_coef: float = 0.0
    """Weight of the KL penalty in the reward; changes if the penalty is adaptive."""

    @property
    def networks(self) -> NetworkStates:
        """The states of the trained networks, as stored in a checkpoint."""
        return {"policy": self.policy} if self.critic is None else {"policy": self.policy, "critic": self.critic}

    @classmethod
    def from_networks(cls, networks: NetworkStates, *, kl_coef: float) -> RunState:
        """Returns the run state with these states of the networks; the inverse of `networks`."""
        return cls(networks["policy"], networks.get("critic"), kl_coef)


@dataclass(frozen=True)
class ProgressRecord:
    """The progress and the checksums, stored in a checkpoint next to its arrays."""

    progress: TrainProgress
    checksums: Mapping[str, int]
    """Maps the path of each array in the checkpoint to its checksum."""

    def to_json(self) -> dict[str, str]:
        """Returns the JSON object that is stored in a checkpoint; see the module's docstring."""
        fields = {"format": FORMAT, "progress": asdict(self.progress), "checksums": dict(self.checksums)}
        text = json.dumps(fields)
        return {"record": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}

    @classmethod
    def read(cls, folder: Path) -> ProgressRecord:
        """Reads the record of the checkpoint in a folder.

        Raises:
            ValueError: the record is damaged, or its step is not the folder's name.
            OtherVersionError: another version of this program wrote the record.
            OSError: the file cannot be read.
        """
        try:
            stored = json.loads(progress_path(folder).read_text(encoding="utf-8"))
        except RecursionError as error:
            raise ValueError("its progress record is nested too deeply") from error
        text = stored.get("record") if isinstance(stored, dict) else None
        if not isinstance(text, str) or stored.get("sha256") != hashlib.sha256(text.encode()).hexdigest():
            raise ValueError("the digest of its progress record does not match the saved one")
        fields = json.loads(text)
        if fields.get("format") != FORMAT:
            raise OtherVersionError
        try:
            record = cls(TrainProgress(**fields["progress"]), fields["checksums"])
        except (KeyError, TypeError) as error:
            raise OtherVersionError from error
        if str(record.progress.step) != folder.name:
            raise ValueError(f"its progress record belongs to step {record.progress.step}")
        return record


def progress_path(folder: Path) -> Path:
    """Returns the path of the progress record in a checkpoint folder, which is the path of Orbax's JSON item."""
    return folder / "progress" / "metadata"
