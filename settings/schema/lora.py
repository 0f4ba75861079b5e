"""Settings of LoRA: small adapters that learn while the model's own weights are frozen."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from settings.schema.section import Section

MAX_RANK = 4096
"""Upper bound that catches typing errors."""
PROJECTION_GROUPS: Mapping[str, tuple[str, ...]] = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
"""Names that stand for several projections of a layer."""
PROJECTIONS = (*PROJECTION_GROUPS["attention"], *PROJECTION_GROUPS["mlp"])
"""The projections of a layer in order of computation, by their Hugging Face names."""
TARGETS = ("all", *PROJECTION_GROUPS, *PROJECTIONS)

Quantization: TypeAlias = Literal["int8", "nf4"]
"""Storage formats of quantized kernels."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _validate_target(value: str) -> str:
    if value not in TARGETS:
        near = difflib.get_close_matches(value, TARGETS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"expected one of {', '.join(TARGETS)}{hint}")
    return value


class LoRASettings(Section):
    rank: int | None = Field(default=None, ge=0, le=MAX_RANK)
    """Rank of LoRA adapters, which learn while the model's own weights are frozen; 8 to 64 are usual. Null or 0 trains
    all weights. Adapters need 10 to 100 times the usual `optimizer.learning_rate`. The critic always trains all its
    weights."""
    alpha: float = Field(default=16.0, gt=0)
    """Scales an adapter's output by alpha / rank."""
    targets: Annotated[
        tuple[Annotated[str, AfterValidator(_validate_target)], ...],
        BeforeValidator(_as_list),
        Field(min_length=1, strict=False),
    ] = ("all",)
    """Matrices of every layer that get adapters: q_proj, k_proj, v_proj, o_proj (together: attention), gate_proj,
    up_proj, down_proj (together: mlp), or all. A mixture of experts has attention only."""
    quantize_base: Quantization | None = None
    """QLoRA: stores the frozen matrices of the layers in 8 bits (int8) or 4 bits (nf4), and converts each when
    it is used. Needs the extra [qlora]. float32 when null."""

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections that `targets` selects, each once, in the order of `PROJECTIONS`."""
        selected = {name for target in self.targets for name in PROJECTION_GROUPS.get(target, (target,))}
        return tuple(name for name in PROJECTIONS if "all" in selected or name in selected)
