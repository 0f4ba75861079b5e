"""Writes checkpoints with transformers, and computes its logits for packed rows."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from app.model.decoder import DecoderDefinition, Params
from app.model.io.hf_weights import load_weights
from app.model.segment_layout import SegmentLayout
from app.runtime.model_spec import read_model_spec
from settings import load
from tests.tiny import make_mesh

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 36,
    "intermediate_size": 45,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
"""Sizes that are not powers of two; three query heads share a key head, and head_dim is not 36 / 9."""

ONE_KV_HEAD: dict[str, Any] = {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 8}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Among the five wavelengths 6 ... 5,700, one is kept, one blended and three are stretched.
    "original_max_position_embeddings": 64,
    "rope_theta": 5e3,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
EXPERTS = {"num_experts_per_tok": 3}
SWITCHES: dict[str, dict[str, Any]] = {
    "mixtral": {**EXPERTS, "num_local_experts": 5},
    "qwen3_moe": {**EXPERTS, "num_experts": 5, "moe_intermediate_size": 21, "norm_topk_prob": True},
    # Every soft cap is low enough to change its inputs, and every window is shorter than most segments.
    "mistral": {"sliding_window": 4},
    "gemma2": {
        "sliding_window": 5,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": False,
    },
    # There are more layers than one period, which is two layers with a window and one without.
    "gemma3_text": {
        "num_hidden_layers": 5,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 7,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        },
        "tie_word_embeddings": False,
    },
}
"""Differences of each family from Llama; embeddings are untied unless a test ties them."""


class Segment(NamedTuple):
    row: int
    first: int
    token_ids: np.ndarray


class PackedRows(NamedTuple):
    segments: list[Segment]
    token_ids: np.ndarray
    layout: SegmentLayout
    """Layout as numpy arrays."""


SHORT_ROWS = ((7, 12, 5), (29,), (2, 23))


def packed_rows(*lengths: Sequence[int], num_tokens: int = 32, vocab_size: int = SIZES["vocab_size"]) -> PackedRows:
    """Returns rows of random segments with these lengths, padded on the right."""
    rng = np.random.default_rng(1)
    token_ids, *layout = (np.zeros((len(lengths), num_tokens), np.int32) for _ in range(4))
    rows = PackedRows([], token_ids, SegmentLayout(*layout))
    # Padding consists of ordinary tokens, to which nothing may attend.
    rows.token_ids[:] = rng.integers(0, vocab_size, rows.token_ids.shape)
    for row, in_row in enumerate(lengths):
        first = 0
        for segment_id, length in enumerate(in_row, start=1):
            at = np.s_[row, first : first + length]
            rows.layout.positions[at] = np.arange(length)
            rows.layout.segment_ids[at] = segment_id
            rows.segments.append(Segment(row, first, rows.token_ids[at]))
            first += length
    return rows


def write_checkpoint(
    directory: Path, model_type: str, *, dtype: str = "float32", max_shard_size: str = "1GB", **changes: Any
) -> Path:
    torch, transformers = import_reference()
    # transformers adds to the dictionaries that it gets.
    config = transformers.AutoConfig.for_model(model_type, **deepcopy(SIZES | SWITCHES.get(model_type, {}) | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            factor_of_norm = 0.0 if model_type.startswith("gemma") else 1.0  # Gemma multiplies by 1 + weight
            values = rng.normal(factor_of_norm if "norm" in name else 0.0, 0.3, tuple(weight.shape))
            weight.copy_(torch.from_numpy(values.astype(np.float32)))
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def import_reference() -> tuple[Any, Any]:
    torch = pytest.importorskip("torch", reason="the reference models of transformers run on torch")
    torch.set_num_threads(1)  # On a busy machine its threads wait for one another at every tiny matmul.
    return torch, pytest.importorskip("transformers")


def load_reference(directory: Path) -> Any:
    _, transformers = import_reference()
    # The default matmuls of experts need widths of 16 bytes, and default attention in older versions has no soft cap.
    plain = {"dtype": "float32", "experts_implementation": "eager", "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **plain).eval()


def reference_logits(model: Any, token_ids: np.ndarray) -> np.ndarray:
    torch, _ = import_reference()
    with torch.no_grad():
        return model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0].numpy()


def load_ours(path: Path) -> tuple[DecoderDefinition, Params]:
    model = read_model_spec(load(None, [f"model.path={path}"], {}).settings, generates=False)
    return model.definition, load_weights(model.definition, model.files.weights, make_mesh())


def our_logits(definition: DecoderDefinition, params: Params, rows: PackedRows) -> np.ndarray:

    @jax.jit
    def logits(params: Params, token_ids: Array, layout: SegmentLayout) -> Array:
        decoder = definition.bind(params)
        return decoder.head.logits(decoder.hidden(token_ids, layout, dtype=jnp.dtype("float32")))

    return np.asarray(logits(params, rows.token_ids, rows.layout))


def assert_reference_logits(logits: np.ndarray, rows: PackedRows, reference: Any, least_std: float = 0.0) -> None:
    for row, first, token_ids in rows.segments:
        expected = reference_logits(reference, token_ids)
        assert expected.std() > least_std
        np.testing.assert_allclose(logits[row, first : first + len(token_ids)], expected, rtol=0, atol=1e-4)


def assert_every_segment_has_the_reference_logits(directory: Path, rows: PackedRows | None = None) -> None:
    rows = rows or packed_rows(*SHORT_ROWS)
    assert_reference_logits(our_logits(*load_ours(directory), rows), rows, load_reference(directory), least_std=1.0)
