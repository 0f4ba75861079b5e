"""The progress of a run: its position, apart from the weights, and the record of it in every checkpoint.

The record is JSON inside JSON: `{"record": TEXT, "sha256": digest of TEXT}`. TEXT also holds the checksums of the
arrays, so that the digest covers everything in a checkpoint that decides how a run continues.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

CHECKSUMS = "checksums"
"""Key in the record: path of an array -> its checksum."""


class OtherVersionError(Exception):
    """The record is intact, and that of another version of this program."""

    def __init__(self, version: str) -> None:
        super().__init__(
            f"was written by {version} version; finish that run with that version, or start another run.name"
        )


@dataclass(frozen=True)
class TrainProgress:
    """The position of a run, apart from its weights. All randomness follows from the run's seed and these fields."""

    step: int
    """Number of completed training steps; the next step samples with this policy version."""
    position: int
    """Number of prompts taken from the data order so far, over all hosts and epochs."""
    fingerprints: Mapping[str, str]
    """Fingerprints of what the run was started with: model, tokenizer and data."""
    wandb_id: str | None = None
    metrics_sha256: str | None = None
    """Digest of the lines of `metrics.jsonl` up to this step."""
    kl_coef: float | None = None
    """Weight of the KL in the next step's rewards, if it is adapted."""
    lengths: Mapping[str, float] | None = None
    """Prompt -> mean length of its latest samples, by which its next samples are scheduled."""
    evaluation: Mapping[str, float | None] | None = None
    """Metrics under `eval/` of this step; None if it was not evaluated."""
    unevaluated: Mapping[str, Any] | None = None
    """The step's other metrics, if its evaluation was interrupted and has to be repeated."""

    def after_step(self, step: int, *, num_prompts: int, **changed: Any) -> TrainProgress:
        """Returns the progress after a step that took `num_prompts` prompts, before its evaluation."""
        return replace(self, step=step, position=self.position + num_prompts, evaluation=None, **changed)

    def with_evaluation(self, metrics: Mapping[str, float | None]) -> TrainProgress:
        """Returns the progress after an evaluation of the step with these metrics."""
        evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        return replace(self, evaluation=evaluation or None, unevaluated=None)


@dataclass(frozen=True)
class ProgressRecord:
    """What a checkpoint stores beside its arrays."""

    progress: TrainProgress
    checksums: Mapping[str, int]
    """Checksums of all arrays of the checkpoint, by path."""

    def to_json(self) -> dict[str, str]:
        """Returns the stored form."""
        text = json.dumps(asdict(self.progress) | {CHECKSUMS: dict(self.checksums)})
        return {"record": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}

    @classmethod
    def read(cls, folder: Path) -> ProgressRecord:
        """Reads the record of the checkpoint in a folder.

        Raises:
            ValueError: it is damaged, or that of another step than the folder's name says.
            OtherVersionError: an older or a newer version wrote it.
            OSError: it cannot be read.
        """
        stored = json.loads(progress_path(folder).read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError("its progress record is not an object")
        if {"step", "fingerprints"} <= stored.keys():
            raise OtherVersionError("an older")
        text = stored.get("record")
        if not isinstance(text, str) or stored.get("sha256") != hashlib.sha256(text.encode()).hexdigest():
            raise ValueError("its progress record has another digest than when it was saved")
        fields = json.loads(text)
        try:
            record = cls(checksums=fields.pop(CHECKSUMS), progress=TrainProgress(**fields))
        except (KeyError, TypeError) as error:
            raise OtherVersionError("a newer") from error
        if str(record.progress.step) != folder.name:
            raise ValueError(f"its progress record is that of step {record.progress.step}")
        return record


def progress_path(folder: Path) -> Path:
    """Returns the file of the progress record in the folder of a checkpoint, where Orbax's JSON item has it."""
    return folder / "progress" / "metadata"
