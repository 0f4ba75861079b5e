from dataclasses import replace

import numpy as np
import pytest

from app.model.architecture import forward_flops, num_visible_pairs
from tests.tiny import MIXTURE, ODD, SWITCHED


def test_forward_flops_equal_hand_computed_numbers():
    # ODD: 2 layers, D 36, F 44, 6 query and 3 key/value heads of 10.
    matrices = 36 * 60 + 2 * 36 * 30 + 60 * 36 + 3 * 36 * 44
    pairs = 1 + 2 + 3 + 4 + 5
    assert forward_flops(ODD)(np.array([5, 0])).tolist() == [2 * (2 * matrices * 5 + 4 * 6 * 10 * pairs), 0]
    # A token costs its own experts and the router.
    dense, mixture = (forward_flops(one)(np.array([1])) for one in (ODD, MIXTURE))
    assert mixture - dense == 2 * 2 * (3 * 3 * 36 * 14 + 8 * 36 - 3 * 36 * 44)
    # Windows 3, none and 4 over 5 tokens: 1+2+3+3+3, 15 and 1+2+3+4+4 pairs.
    without = forward_flops(replace(SWITCHED, windows=()))(np.array([5]))
    assert without - forward_flops(SWITCHED)(np.array([5])) == 4 * 6 * 10 * (3 * 15 - (12 + 15 + 14))


@pytest.mark.parametrize("window", [None, 1, 3])
def test_visible_pairs_are_counted_like_entries_of_the_attention_mask(window):
    lengths = np.arange(12)
    q, k = np.arange(12)[:, None], np.arange(12)
    seen = (k <= q) & (q - k < (window or 99))
    assert num_visible_pairs(lengths, window).tolist() == [seen[:n, :n].sum() for n in lengths]


def test_flops_of_a_large_model_and_a_long_context_do_not_overflow():
    large = replace(ODD, num_layers=80, model_dim=8192, mlp_dim=28672, num_query_heads=64, num_kv_heads=8, head_dim=128)
    flops = forward_flops(large)(np.array([131_072]))
    assert flops.dtype == np.int64 and 1e16 < flops[0] < 1e17
