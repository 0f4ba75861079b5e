"""Settings of the section `eval`."""

from __future__ import annotations

from pydantic import Field

from settings.schema.section import Section


class EvalSettings(Section):
    every_steps: int = Field(default=25, ge=0)
    """Training steps between evaluations; there is also one before step 1 and one after the last step. 0 disables
    evaluation."""
    num_prompts: int | None = Field(default=128, ge=1, le=1_000_000)
    """Number of held-out prompts, the same ones in every evaluation; null = the whole data set."""
    num_samples: int = Field(default=1, ge=1, le=2**16)
    """Samples per prompt. With more than one, pass@k and maj@k are also measured, and temperature must be above 0."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of evaluations; 0 = greedy."""
