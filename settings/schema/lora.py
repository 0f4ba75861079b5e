"""The settings of LoRA: small adapters that learn in place of the model's own weights."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from settings.schema.section import Section

MAX_RANK = 4096
"""Beyond this it is a slip of the pen."""
PROJECTION_GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "mlp": ("gate_proj", "up_proj", "down_proj"),
    }
)
"""What several projections of a layer are called together."""
PROJECTIONS = (*PROJECTION_GROUPS["attention"], *PROJECTION_GROUPS["mlp"])
"""Of every layer of every family, in the order that a token meets them; names are Hugging Face's."""
TARGETS = ("all", *PROJECTION_GROUPS, *PROJECTIONS)

Quantization: TypeAlias = Literal["int8", "nf4"]
"""In how many bits a kernel is held, and what they mean."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _validate_target(value: str) -> str:
    if value not in TARGETS:
        near = difflib.get_close_matches(value, TARGETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"matches no weight{hint} (known: {', '.join(TARGETS)})")
    return value


class LoRASettings(Section):
    rank: int | None = Field(
        default=None,
        ge=0,
        le=MAX_RANK,
        description="Rank of the adapters that learn while the model's own weights stay; 8 to 64 are usual. All "
        "weights learn when null or 0. Adapters take 10 to 100 times the `optimizer.learning_rate` of all weights. A "
        "critic has none and learns with all its weights.",
    )
    alpha: float = Field(default=16.0, gt=0, description="What an adapter adds is multiplied by alpha / rank.")
    targets: Annotated[
        tuple[Annotated[str, AfterValidator(_validate_target)], ...],
        BeforeValidator(_as_list),
        Field(min_length=1, strict=False),
    ] = Field(
        default=("all",),
        description="Matrices of every layer that have adapters: q_proj, k_proj, v_proj, o_proj (together: attention), "
        "gate_proj, up_proj, down_proj (together: mlp), or all of these.",
    )
    quantize_base: Quantization | None = Field(
        default=None,
        description="QLoRA: all matrices of the layers, which stay as they are, are held in 8 bits (int8) or 4 (nf4) "
        "and made float32 again where they are used, one at a time. Needs the extra [qlora]. float32 when null.",
    )

    @property
    def projections(self) -> tuple[str, ...]:
        """Those that `targets` name, each once, in the order of `PROJECTIONS`."""
        meant = {name for target in self.targets for name in PROJECTION_GROUPS.get(target, (target,))}
        return tuple(name for name in PROJECTIONS if "all" in meant or name in meant)
