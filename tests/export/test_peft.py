"""Tests that peft gives the logits of our network with the same adapters."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from app.export.hf_tensors import PROJECTIONS, PeftTensors, write_safetensors
from app.export.huggingface import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, adapter_config
from app.model.decoder import DecoderDefinition, Params
from app.model.lora import LoRAConfig, combine_params
from settings.schema.model import PROJECTIONS as TARGETS
from tests.model.test_parity import (
    SHORT_ROWS,
    load_ours,
    load_reference,
    our_logits,
    packed_rows,
    reference_logits,
    write_checkpoint,
)


def random_adapters(definition: DecoderDefinition) -> Params:
    rng = np.random.default_rng(0)
    shapes = definition.trainable(definition.shapes)
    return jax.tree.map(lambda leaf: jax.numpy.asarray(rng.normal(0, 0.2, leaf.shape), leaf.dtype), shapes)


def write_adapters(directory: Path, base: Path, lora: LoRAConfig, trained: Params) -> Path:
    directory.mkdir()
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(adapter_config(lora, base=str(base), revision=None)))
    tensors = PeftTensors(trained)
    write_safetensors(directory / ADAPTER_WEIGHTS_FILE, tensors, [*tensors.shapes], np.dtype(np.float32))
    return directory


# peft asks transformers for a property by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("family", "projections"),
    [
        ("llama", TARGETS),
        ("qwen2", ("q_proj", "v_proj")),
        ("gemma3_text", ("o_proj", "gate_proj", "down_proj")),
    ],
)
def test_peft_gives_the_logits_of_the_network_with_these_adapters(tmp_path, family, projections):
    peft = pytest.importorskip("peft", reason="what loads adapters elsewhere")
    base = write_checkpoint(tmp_path / "base", family)
    plain, params = load_ours(base)
    lora = LoRAConfig(rank=3, alpha=7.5, projections=projections)
    definition = DecoderDefinition.create(plain.architecture, lora=lora)
    trained = random_adapters(definition)
    written = write_adapters(tmp_path / "adapter", base, lora, trained)
    theirs = peft.PeftModel.from_pretrained(load_reference(base), str(written)).eval()
    rows = packed_rows(*SHORT_ROWS)
    ours = our_logits(definition, combine_params(trained, params), rows)
    assert np.abs(ours - our_logits(plain, params, rows)).max() > 0.5
    for row, first, token_ids in rows.segments:
        expected = reference_logits(theirs, token_ids)
        np.testing.assert_allclose(ours[row, first : first + len(token_ids)], expected, rtol=0, atol=1e-4)


def test_every_projection_that_can_have_adapters_has_its_name_in_hugging_face():
    assert [name.rpartition(".")[2] for name in PROJECTIONS.values()] == list(TARGETS)


def test_the_config_says_rank_alpha_and_base_as_peft_spells_them():
    config = adapter_config(
        LoRAConfig(rank=4, alpha=16.0, projections=("q_proj",)), base="some/model", revision="c0ffee"
    )
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 16, ["q_proj"])
    assert isinstance(config["lora_alpha"], int)
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/model", "c0ffee")
    assert config["task_type"] == "CAUSAL_LM"
