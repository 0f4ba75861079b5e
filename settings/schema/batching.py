"""Settings of the section `batching`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.schema.section import Section

MAX_NUM_MICRO_BATCHES = 4096
"""Upper bound of both settings, because empty micro-batches cost time, too."""


class BatchingSettings(Section):
    share_prompts: bool = True
    """Packs the prompt of a group once, followed by all its completions: the same results from fewer tokens. Set to
    false only for comparison."""
    packing: Literal["best_fit", "karmarkar_karp"] = "best_fit"
    """Bin packing of samples into rows: best fit, which packs tighter, or the largest differencing method (as in verl),
    which fills rows evenly."""
    min_num_micro_batches: int = Field(default=1, ge=1, le=MAX_NUM_MICRO_BATCHES)
    """Minimum number of dynamic micro-batches per pass; empty ones are added if needed. Raise it only to test that
    results do not depend on it."""
    num_micro_batches_divisible_by: int = Field(default=1, ge=1, le=MAX_NUM_MICRO_BATCHES)
    """Rounds the number of dynamic micro-batches per pass up to a multiple of this, as for pipeline parallelism."""
