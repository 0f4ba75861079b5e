"""Settings of the section `batching`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.schema.section import Section

MAX_NUM_MICRO_BATCHES = 4096
"""That somebody may ask for: empty ones are computed, too."""


class BatchingSettings(Section):
    share_prompts: bool = Field(
        default=True,
        description="Pack the prompt of a group once, with its completions behind it: the same numbers from fewer "
        "tokens. False only to compare.",
    )
    packing: Literal["best_fit", "karmarkar_karp"] = Field(
        default="best_fit",
        description="How samples find their rows: the fullest row that still has room, which packs tighter, or verl's "
        "largest differencing, which evens out the rows.",
    )
    min_num_micro_batches: int = Field(
        default=1,
        ge=1,
        le=MAX_NUM_MICRO_BATCHES,
        description="Fewest dynamic micro-batches of a pass; more than needed are filled up with empty rows. Raise it "
        "only to see that nothing depends on it.",
    )
    num_micro_batches_divisible_by: int = Field(
        default=1,
        ge=1,
        le=MAX_NUM_MICRO_BATCHES,
        description="Dynamic micro-batches of a pass are rounded up to a multiple of this, as pipelines ask for.",
    )
