"""Settings of the section `eval`."""

from __future__ import annotations

from pydantic import Field

from settings.schema.section import Section


class EvalSettings(Section):
    every_steps: int = Field(
        default=25, ge=0, description="Also before step 1 and after the last; 0 = no evaluation at all."
    )
    num_prompts: int | None = Field(
        default=128, ge=1, description="Held-out prompts, always the same ones; null = the whole data set."
    )
    num_samples: int = Field(
        default=1,
        ge=1,
        description="Samples of each prompt. More than one also measure pass@k and maj@k, at a temperature above 0.",
    )
    temperature: float = Field(default=0.0, ge=0, description="0 = greedy.")
