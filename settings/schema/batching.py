"""Settings of the section `batching`."""

from __future__ import annotations

from typing import Literal

from settings.schema.section import Section


class BatchingSettings(Section):
    share_prompts: bool = True
    """Packs the prompt of a group once, followed by all its completions: the same results from fewer tokens. Set to
    false only for comparison."""
    packing: Literal["best_fit", "karmarkar_karp"] = "best_fit"
    """Bin packing of samples into rows: best fit, which packs tighter, or the largest differencing method (as in verl),
    which fills rows evenly."""
