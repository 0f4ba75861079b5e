"""Settings of the section `model`, including LoRA."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from settings.errors import join_words
from settings.schema.section import LocalPath, Section, as_list

AttentionImplementation = Literal["auto", "kernel", "xla"]


def split_revision(source: str) -> tuple[str, str | None]:
    """Splits `owner/name@revision` at the `@`; without an `@`, the revision is None."""
    name, _, revision = source.partition("@")
    return name, revision or None


BUILTIN_PREFIX = "builtin:"
"""Prefix of the paths of built-in models."""
MAX_RANK = 4096
"""Upper bound of `model.lora.rank`, to catch typos."""
PROJECTION_GROUPS: Mapping[str, tuple[str, ...]] = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
"""Maps a group in `model.lora.targets` to its projections."""
PROJECTIONS = (*PROJECTION_GROUPS["attention"], *PROJECTION_GROUPS["mlp"])
"""The projections of a layer in order of computation, by their Hugging Face names."""
TARGETS = ("all", *PROJECTION_GROUPS, *PROJECTIONS)

Quantization: TypeAlias = Literal["int8", "nf4"]
"""Storage formats of quantized weight matrices."""


def _validate_target(value: str) -> str:
    if value not in TARGETS:
        near = difflib.get_close_matches(value, TARGETS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"expected {join_words(TARGETS)}{hint}")
    return value


def _validate_eos_token(value: Any) -> str | int:
    if (isinstance(value, str) and value) or (type(value) is int and value >= 0):
        return value
    raise ValueError("expected the text of a token, or its id")


class LoRASettings(Section):
    rank: int | None = Field(default=None, ge=0, le=MAX_RANK)
    """Rank of LoRA adapters, which are trained while the model's own weights are frozen; 8 to 64 are usual. Null or 0
    trains all weights. Adapters need 10 to 100 times the usual `optimizer.learning_rate`. The critic always trains all
    its weights."""
    alpha: float = Field(default=16.0, gt=0)
    """The output of an adapter is multiplied by alpha / rank."""
    targets: Annotated[
        tuple[Annotated[str, AfterValidator(_validate_target)], ...],
        BeforeValidator(as_list),
        Field(min_length=1, strict=False),
    ] = ("all",)
    """Matrices of every layer that get adapters: q_proj, k_proj, v_proj, o_proj (together: attention), gate_proj,
    up_proj, down_proj (together: mlp), or all. In a mixture of experts, only attention can have adapters."""
    quantize_base: Quantization | None = None
    """Stores the frozen matrices of the layers in 8 bits (int8) or 4 bits (nf4) and dequantizes each when it is used
    (QLoRA). This needs the extra [qlora]. If null, they are stored in `model.dtype`."""

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections selected by `targets`, without duplicates, in the order of `PROJECTIONS`."""
        selected = {name for target in self.targets for name in PROJECTION_GROUPS.get(target, (target,))}
        return tuple(name for name in PROJECTIONS if "all" in selected or name in selected)


class ModelSettings(Section):
    path: LocalPath = Field(default="builtin:tiny", min_length=1)
    """The model to train: a Hugging Face directory, a hub id, a `.gguf` file, `builtin:tiny`, `builtin:tiny_teacher` or
    `builtin:tiny_tools`. A hub id can end with a commit, tag or branch, as in `owner/name@v1.0`; without one, a new run
    uses the newest commit, and a resumed run the commit that it started with."""
    eos_tokens: Annotated[
        tuple[Annotated[str | int, BeforeValidator(_validate_eos_token)], ...],
        BeforeValidator(lambda value: [value] if isinstance(value, str | int) else value),
        Field(strict=False),
    ] = ()
    """Tokens, by text or id, that end a completion in addition to the model's own EOS tokens (`eos_token_id` of its
    configuration and the tokenizer's `eos_token`). For a base model, add the token that ends a turn in its chat
    template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the computation; trained weights, optimizer state, softmax and losses are always float32. If it is not
    set, it is bfloat16 on TPUs and GPUs, except for built-in models and with `rollout.mode: exact`."""
    remat: Literal["none", "minimal", "block"] = "minimal"
    """What the backward pass recomputes to save memory: nothing (none), everything except the matmuls with weights
    (minimal), or whole layers (block). Each of these uses less memory and more time than the one before it."""
    attention: AttentionImplementation = "auto"
    """Implementation of attention: `kernel` is a Pallas kernel for TPUs, and for GPUs in bfloat16 if JAX has Pallas'
    Triton backend; `xla` works everywhere; `auto` uses the kernel where it exists. Set `xla` if `grpo doctor` says that
    the kernel fails."""
    logits_chunk: int = Field(default=1024, ge=1)
    """Number of tokens on each device for which scoring and training compute logits at once. Lower it if the logits (4
    bytes for each of these tokens and each token of the vocabulary) use too much memory."""
    lora: LoRASettings = LoRASettings()
