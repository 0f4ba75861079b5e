"""Settings of the section `run`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from settings.schema.section import Section


def _validate_run_name(value: str) -> str:
    if len(value) > 100 or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError("expected at most 100 letters, digits, `.`, `_`, `-`, starting with a letter or digit")
    return value


class EarlyStoppingSettings(Section):
    """When a run ends before its last step. Without `patience` it never does.

    Evaluations are compared by `checkpoint.best_metric`, in the direction of `checkpoint.best_mode`.
    """

    patience: int | None = Field(default=None, ge=1)
    """Number of evaluations in a row without an improvement of `checkpoint.best_metric` after which the run ends;
    null = never."""
    min_delta: float = Field(default=0.0, ge=0)
    """An improvement is a change for the better by more than this."""


class RunSettings(Section):
    name: Annotated[str, AfterValidator(_validate_run_name)] | None = None
    """Name of the run directory; `<config>-seed<seed>` when null."""
    dir: str = Field(default="runs", min_length=1)
    """Directory that contains the run directories."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of all randomness: data order and sampling noise."""
    steps: int = Field(default=100, ge=1)
    """Number of training steps; each consists of rollout, reward, score, advantage and update."""
    early_stopping: EarlyStoppingSettings = EarlyStoppingSettings()
