"""Settings of the section `checkpoint`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.schema.section import Section


class CheckpointSettings(Section):
    every_steps: int = Field(default=50, ge=1, description="Steps between checkpoints; the last step is always saved.")
    every_minutes: float | None = Field(
        default=None, gt=0, description="Also a checkpoint when the last is so old; null = by steps alone."
    )
    keep: int = Field(default=2, ge=1, description="Newest checkpoints kept; the best one stays beside them.")
    best_metric: str | None = Field(
        default="eval/accuracy",
        description="The checkpoint whose evaluation is best by this is kept, as checkpoints/best; null = none is.",
    )
    best_mode: Literal["max", "min"] = Field(
        default="max", description="Whether more or less of `best_metric` is better. Of equals the earlier stays."
    )
