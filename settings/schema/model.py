"""Settings of the section `model`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.schema.lora import LoRASettings
from settings.schema.section import Section


class ModelSettings(Section):
    path: str = Field(
        default="builtin:tiny",
        min_length=1,
        description="Hugging Face directory, hub id, `.gguf` file, or `builtin:tiny`.",
    )
    revision: str | None = Field(
        default=None,
        description="Commit, tag or branch of a hub id; its newest commit when null. A resumed run keeps its commit.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Compute type. Weights, optimizer, softmax and losses stay float32."
    )
    remat: Literal["none", "minimal", "block"] = Field(
        default="minimal",
        description="What the backward pass recomputes: nothing; all but the products with weights; whole blocks. "
        "Each takes less memory than the one before.",
    )
    logits_chunk: int = Field(
        default=1024,
        ge=1,
        description="Tokens of each device that pass the LM head at once when scoring and training. Lower it when "
        "logits (this x vocabulary x 4 bytes) fill the memory.",
    )
    lora: LoRASettings = LoRASettings()
