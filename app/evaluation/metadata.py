"""Metadata of an evaluation, in a file next to its samples, so that different evaluations are never confused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from app.records.atomic_write import write_atomic
from app.records.identity import Identity
from settings.errors import InputError, join_words

JUDGE, JUDGE_FILE, JUDGE_FUNCTION = "the judge", "the judge's file", "the judge's function"
"""Names of facts about a plug-in judge. Its file is compared by content; modules that it imports are not compared."""
JUDGE_SETTINGS = ("reward.batch_size", "plugins.env_vars")
"""Settings that determine the input of a judge that runs in another process."""


@dataclass(frozen=True)
class EvaluationMetadata:
    """The model, its prompts, and how the answers were graded."""

    model: str
    """Value of `model.path`."""
    step: int | None
    """Step of the checkpoint; None for the model of `model.path` itself."""
    data: str
    facts: Identity
    """Everything that determines the samples and their grades."""

    @property
    def label(self) -> str:
        """The name of the evaluation in printed output."""
        return self.model if self.step is None else f"{self.model}, step {self.step}"


def metadata_path(samples: Path) -> Path:
    """Returns the path of the metadata file next to a file of an evaluation's samples."""
    return samples.with_name(f"{samples.name}.facts.json")


def write_metadata(samples: Path, metadata: EvaluationMetadata) -> None:
    write_atomic(metadata_path(samples), f"{json.dumps(asdict(metadata))}\n".encode())


def read_metadata(samples: Path) -> EvaluationMetadata | None:
    """Reads the metadata next to a file of samples; None if there is none. Raises InputError if it is damaged."""
    path = metadata_path(samples)
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_bytes())
        names = {"model", "step", "data", "facts"}
        if not (isinstance(record, dict) and record.keys() == names and isinstance(record["facts"], dict)):
            raise ValueError(f"expected an object with {join_words(sorted(names), last='and')}")
        if not isinstance(record["facts"].get(JUDGE), str):
            raise ValueError(f"expected {JUDGE!r} among its facts")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as the metadata of an evaluation ({error}); delete it") from error
    return EvaluationMetadata(**record)
