"""Settings of the section `model`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.schema.lora import LoRASettings
from settings.schema.section import Section

AttentionImplementation = Literal["auto", "kernel", "xla"]


def split_revision(source: str) -> tuple[str, str | None]:
    """Returns what precedes the `@` of `owner/name@revision`, and the revision; None if there is none."""
    name, _, revision = source.partition("@")
    return name, revision or None


class ModelSettings(Section):
    path: str = Field(default="builtin:tiny", min_length=1)
    """The model: Hugging Face directory, hub id, `.gguf` file, `builtin:tiny` or `builtin:tiny_tools`. A hub id can end
    with a commit, tag or branch, as in `owner/name@v1.0`; otherwise its newest commit is used. A resumed run keeps its
    commit."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype. Trained weights, optimizer state, softmax and losses are always float32."""
    remat: Literal["none", "minimal", "block"] = "minimal"
    """What the backward pass recomputes: nothing, everything except the products with weights (minimal), or whole
    blocks. Each uses less memory and more time than the one before."""
    attention: AttentionImplementation = "auto"
    """What computes attention: `kernel` is a Pallas kernel, which TPUs have, and GPUs in bfloat16 as long as JAX has
    Pallas' Triton backend; `xla` works everywhere; `auto` takes the kernel where there is one. Set `xla` if `grpo
    doctor` says that the kernel fails."""
    logits_chunk: int = Field(default=1024, ge=1)
    """Tokens per device that pass through the LM head at once in scoring and training. Lower it if logits (this x
    vocabulary x 4 bytes) use too much memory."""
    lora: LoRASettings = LoRASettings()
