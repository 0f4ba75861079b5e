"""Adapters in PEFT's format: peft over transformers gives the logits of our kernels with the adapters merged in."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from app.policy.peft_out import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    PROJECTIONS,
    Adapter,
    adapter_config,
    adapter_tensors,
)
from tests.policy.test_parity import (
    SHORT_ROWS,
    load_ours,
    load_reference,
    our_logits,
    packed_rows,
    reference_logits,
    write_checkpoint,
)

RANK, ALPHA = 3, 8.0


def random_adapters(params, names) -> dict[str, Adapter]:
    rng = np.random.default_rng(0)
    adapters = {}
    for name in names:
        num_layers, *dims = params["blocks"][name]["kernel"].shape
        num_inputs = len(dims) - 1 if name == "attention_output" else 1
        inputs, outputs = dims[:num_inputs], dims[num_inputs:]
        a = rng.normal(0, 0.2, (num_layers, *inputs, RANK)).astype(np.float32)
        b = rng.normal(0, 0.2, (num_layers, RANK, *outputs)).astype(np.float32)
        adapters[name] = Adapter(jnp.asarray(a), jnp.asarray(b))
    return adapters


def merged(params, adapters):
    """kernel + (alpha / rank) a b, in float64."""
    params = copy.deepcopy(params)
    for name, (a, b) in adapters.items():
        kernel = np.asarray(params["blocks"][name]["kernel"], np.float64)
        num_layers = len(kernel)
        down = np.asarray(a, np.float64).reshape(num_layers, -1, RANK)
        up = np.asarray(b, np.float64).reshape(num_layers, RANK, -1)
        params["blocks"][name]["kernel"] = jnp.asarray(
            (kernel + ALPHA / RANK * (down @ up).reshape(kernel.shape)).astype(np.float32)
        )
    return params


def write_adapters(directory: Path, base: Path, adapters) -> Path:
    directory.mkdir()
    config = adapter_config(base=str(base), revision=None, rank=RANK, alpha=ALPHA, projections=list(adapters))
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(config))
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in adapter_tensors(adapters).items()}
    save_file(tensors, directory / ADAPTER_WEIGHTS_FILE)
    return directory


# peft asks transformers for a property by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", list(PROJECTIONS)),
        ("qwen2", ["query", "value"]),
        ("gemma3_text", ["attention_output", "gate", "down"]),
    ],
)
def test_peft_gives_the_logits_of_the_merged_kernels(tmp_path, family, names):
    peft = pytest.importorskip("peft", reason="what loads adapters elsewhere")
    base = write_checkpoint(tmp_path / "base", family)
    definition, params = load_ours(base)
    adapters = random_adapters(params, names)
    written = write_adapters(tmp_path / "adapter", base, adapters)
    theirs = peft.PeftModel.from_pretrained(load_reference(base), str(written)).eval()
    rows = packed_rows(*SHORT_ROWS)
    ours, plain = our_logits(definition, merged(params, adapters), rows), our_logits(definition, params, rows)
    assert np.abs(ours - plain).max() > 0.5
    for row, first, token_ids in rows.segments:
        expected = reference_logits(theirs, token_ids)
        np.testing.assert_allclose(ours[row, first : first + len(token_ids)], expected, rtol=0, atol=1e-4)


def test_every_projection_has_its_name_in_hugging_face():
    assert PROJECTIONS == {
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "attention_output": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
