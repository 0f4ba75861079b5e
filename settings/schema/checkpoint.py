"""Settings of the section `checkpoint`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.schema.section import Section


class CheckpointSettings(Section):
    every_steps: int = Field(default=50, ge=1)
    """Steps between checkpoints. The last step is always saved."""
    every_minutes: float | None = Field(default=None, gt=0)
    """Also saves a checkpoint if the last one is older than this many minutes; null disables this."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints kept, in addition to the best one."""
    best_metric: str | None = "eval/accuracy"
    """Metric whose best checkpoint is kept as checkpoints/best, unless the start was better; null keeps none."""
    best_mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller `best_metric` is better. Of equal values, the earliest is kept."""
