"""Tests of rotary frequencies against hand-computed values and transformers."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import LlamaConfig

from app.model.architecture import RopeConfig
from app.model.io.families import architecture_from_config
from app.model.layers import rope_frequencies
from tests.model.io.test_families import LLAMA3_SCALING, SIZES


def test_default_rope_frequencies_by_hand():
    np.testing.assert_allclose(rope_frequencies(RopeConfig(theta=10_000.0), 8), [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_rope_divides_every_frequency():
    rope = RopeConfig(theta=10_000.0, rope_type="linear", factor=4.0)
    np.testing.assert_allclose(rope_frequencies(rope, 4), [0.25, 0.0025], rtol=1e-6)


def test_llama3_rope_keeps_fast_pairs_slows_slow_ones_and_blends_between():
    # Wavelengths 6.28, 62.8 and 628 against original/high = 25 and original/low = 100.
    rope = RopeConfig(10_000.0, "llama3", 8.0, 1.0, 4.0, original_max_positions=100)
    kept = (100 * 0.1 / (2 * np.pi) - 1) / 3
    by_hand = [1.0, (1 - kept) * 0.1 / 8 + kept * 0.1, 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(rope_frequencies(rope, 8), by_hand, rtol=1e-6)


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "linear", "factor": 3.0}, {**LLAMA3_SCALING, "original_max_position_embeddings": 8192}],
)
@pytest.mark.parametrize("head_dim", [10, 64, 128])
def test_rope_frequencies_equal_transformers(rope, head_dim):
    pytest.importorskip("torch", reason="transformers computes its frequencies with torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**SIZES, head_dim=head_dim, rope_parameters={**rope, "rope_theta": 5e5})
    expected, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=None)
    ours = architecture_from_config(config.to_dict() | {"architectures": None})
    frequencies = rope_frequencies(ours.rope, ours.head_dim)
    assert attention_factor == 1.0
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=3e-7)
