"""What an evaluation is of. It stands beside the file of its samples, so that no two evaluations are taken for one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app.records.atomic_write import write_atomic
from settings.errors import InputError

JUDGE, PROMPTS, MODEL, CHECKPOINT = "the judge", "the prompts", "the model's files", "the checkpoint"
JUDGE_FILE, JUDGE_FUNCTION = "the judge's file", "the judge's function"
"""Of a plug-in. The file is known by its content, wherever it lies; what a module's name imports is not looked at."""
JUDGE_SETTINGS = ("reward.batch_size", "reward.environment", "reward.max_characters")
"""Settings that decide what a judge beyond this process is given."""
CHANGEABLE_JUDGE_FACTS = (JUDGE_FILE, *JUDGE_SETTINGS)


@dataclass(frozen=True)
class EvaluationMetadata:
    """What was asked what, and how it was judged."""

    model: str
    """`model.path`."""
    step: int | None
    """Of the checkpoint; None for the model as it came."""
    data: str
    facts: Mapping[str, Any]
    """Whatever decides the samples and what they are worth, by name, as JSON has it."""

    @property
    def label(self) -> str:
        """For people."""
        return self.model if self.step is None else f"{self.model}, step {self.step}"

    @property
    def without_judge(self) -> EvaluationMetadata:
        """The same, whoever judges the samples."""
        return self._without_facts(JUDGE, JUDGE_FUNCTION, *CHANGEABLE_JUDGE_FACTS)

    @property
    def without_judge_details(self) -> EvaluationMetadata:
        """The same, whatever may change in a judge that is still the same one."""
        return self._without_facts(*CHANGEABLE_JUDGE_FACTS)

    def _without_facts(self, *names: str) -> EvaluationMetadata:
        return replace(self, facts={name: fact for name, fact in self.facts.items() if name not in names})

    def first_difference(self, other: EvaluationMetadata) -> str | None:
        """The first fact that is not the same; None where all are."""
        names = dict.fromkeys([*self.facts, *other.facts])
        return next((name for name in names if self.facts.get(name) != other.facts.get(name)), None)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def metadata_path(samples: Path) -> Path:
    """Beside the file of an evaluation's samples."""
    return samples.with_name(f"{samples.name}.facts.json")


def write_metadata(samples: Path, metadata: EvaluationMetadata) -> None:
    write_atomic(metadata_path(samples), f"{metadata.to_json()}\n".encode())


def read_metadata(samples: Path) -> EvaluationMetadata | None:
    """Of an evaluation's samples; None where nothing stands beside them.

    Raises:
        InputError: what stands there cannot be read.
    """
    path = metadata_path(samples)
    if not path.is_file():
        return None
    try:
        return metadata_from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as what an evaluation is of ({error}); delete it") from error


def metadata_from_json(text: bytes) -> EvaluationMetadata:
    """Raises ValueError where it says no such thing."""
    record = json.loads(text)
    try:
        subject = EvaluationMetadata(str(record["model"]), record["step"], str(record["data"]), dict(record["facts"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no facts of an evaluation: {type(error).__name__}: {error}") from error
    if not isinstance(subject.facts.get(JUDGE), str):
        raise ValueError(f"no facts of an evaluation: they do not say {JUDGE}")
    return subject
