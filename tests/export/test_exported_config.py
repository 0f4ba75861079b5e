"""Tests that an exported configuration has all fields of its base, and those with other defaults in transformers."""

from __future__ import annotations

import pytest

from app.export.huggingface import export_config, export_generation_config

BASE = {"model_type": "qwen2", "hidden_size": 8, "rope_theta": 1e6}


def test_the_type_of_the_weights_stands_under_the_name_that_the_base_uses():
    old = export_config(BASE | {"torch_dtype": "bfloat16"}, dtype="float32", eos_ids=(3,))
    new = export_config(BASE | {"dtype": "bfloat16"}, dtype="float32", eos_ids=(3,))
    assert (old["torch_dtype"], "dtype" in old) == ("float32", False)
    assert (new["dtype"], "torch_dtype" in new) == ("float32", False)
    assert export_config(BASE, dtype="bfloat16", eos_ids=(3,))["torch_dtype"] == "bfloat16"


def test_what_the_base_leaves_out_is_said_and_what_it_says_is_kept():
    terse = export_config(BASE | {"eos_token_id": None}, dtype="float32", eos_ids=(3, 5))
    assert terse == BASE | {
        "architectures": ["Qwen2ForCausalLM"],
        "eos_token_id": [3, 5],
        "torch_dtype": "float32",
    }
    assert export_config(BASE | {"eos_token_id": 0}, dtype="float32", eos_ids=(0, 3))["eos_token_id"] == 0


def test_where_the_base_came_from_is_not_repeated():
    named = BASE | {"_name_or_path": "/home/somebody/qwen", "transformers_version": "4.40.0"}
    assert "_name_or_path" not in export_config(named, dtype="float32", eos_ids=(3,))
    assert "transformers_version" not in export_generation_config(named, eos_ids=(3,), pad_id=0)


@pytest.mark.parametrize(("eos_ids", "written"), [((7,), 7), ((2, 7), [2, 7])])
def test_generation_ends_where_samples_ended_in_training(eos_ids, written):
    base = {"eos_token_id": 2, "temperature": 0.6, "pad_token_id": 9}
    assert export_generation_config(base, eos_ids=eos_ids, pad_id=0) == base | {"eos_token_id": written}
    assert export_generation_config({}, eos_ids=eos_ids, pad_id=4) == {"pad_token_id": 4, "eos_token_id": written}
