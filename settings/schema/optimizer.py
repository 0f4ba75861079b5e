"""Settings of the section `optimizer`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.schema.section import Section


class OptimizerSettings(Section):
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or decaying to `final_fraction` right after the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of linear or cosine decay, as a fraction of the peak."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment, the mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's second moment, the mean of squared gradients. Lower it for runs of few steps."""
    first_moment: Literal["float32", "bfloat16"] = "float32"
    """Type in which the first moment is stored between updates; bfloat16 saves 2 of 8 bytes of moments per weight."""
    second_moment: Literal["float32", "bfloat16"] = "float32"
    """Type in which the second moment is stored; bfloat16 saves 2 more bytes, for `beta2` of at most 0.95. With a
    slower decay, changes of one update would be lost in rounding to 8 bits."""
    offload: bool = False
    """Whether moments are kept in pinned host memory, and moved to the device layer by layer in each update: saves
    their bytes on the device, costs their transfer there and back. It saves nothing on a CPU, which is its own host."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Constant added to the square root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, applied to matrices only, except the frozen router of a mixture of experts."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
