"""Settings of the section `optimizer`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.schema.section import Section


class OptimizerSettings(Section):
    learning_rate: float = Field(default=1e-6, gt=0, description="Peak rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="After warm-up: flat, or falling so that `final_fraction` comes right after the last step.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up from 0.")
    final_fraction: float = Field(
        default=0.0, ge=0, le=1, description="Rate at the end of linear / cosine, as part of the peak."
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of AdamW's mean of gradients.")
    beta2: float = Field(
        default=0.999, ge=0, lt=1, description="Decay of AdamW's mean of squares; lower it for runs of few steps."
    )
    epsilon: float = Field(default=1e-8, gt=0, description="Added to the root of that mean.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled; matrices only.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Global-norm clip.")
    max_nonfinite_steps: int = Field(
        default=3,
        ge=1,
        description="Abort after this many optimizer steps in a row with a NaN or infinite gradient.",
    )
