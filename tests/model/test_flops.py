from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from app.model.architecture import forward_flops, num_visible_pairs
from tests.tiny import MIXTURE, ODD, SWITCHED


def test_flops_by_hand():
    # ODD: 2 layers, D 36, F 44, 6 query and 3 key/value heads of 10.
    matrices = 36 * 60 + 2 * 36 * 30 + 60 * 36 + 3 * 36 * 44
    pairs = 1 + 2 + 3 + 4 + 5
    expected = 2 * (2 * matrices * 5 + 4 * 6 * 10 * pairs)
    assert forward_flops(ODD)(np.array([5])) == expected
    assert forward_flops(ODD)(np.array([0])) == 0


def test_windows_leave_pairs_out():
    # Windows 3, none and 4 over 5 tokens: 1+2+3+3+3, 15 and 1+2+3+4+4 pairs.
    without = forward_flops(replace(SWITCHED, windows=()))(np.array([5]))
    assert without - forward_flops(SWITCHED)(np.array([5])) == 4 * 6 * 10 * (3 * 15 - (12 + 15 + 14))


@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_visible_pairs_are_the_ones_of_the_attention_mask(window):
    lengths = np.arange(12)
    q, k = np.arange(12)[:, None], np.arange(12)
    seen = (k <= q) & (q - k < (window or 99))
    assert num_visible_pairs(lengths, window).tolist() == [seen[:n, :n].sum() for n in lengths]


def test_flops_are_whole_numbers_that_hold_a_large_model_and_a_long_context():
    large = replace(ODD, num_layers=80, model_dim=8192, mlp_dim=28672, num_query_heads=64, num_kv_heads=8, head_dim=128)
    flops = forward_flops(large)(np.array([131_072]))
    assert flops.dtype == np.int64
    assert 1e16 < flops[0] < 1e17


def test_flops_need_no_jax():
    program = "import sys, app.model.architecture; print({m.split('.')[0] for m in sys.modules} & {'jax', 'flax'})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def test_a_token_costs_its_own_experts_and_the_router():
    dense, mixture = (forward_flops(one)(np.array([1])) for one in (ODD, MIXTURE))
    assert mixture - dense == 2 * 2 * (3 * 3 * 36 * 14 + 8 * 36 - 3 * 36 * 44)
