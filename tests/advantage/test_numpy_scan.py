from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.advantage.gae import numpy_scan
from app.advantage.gae.estimate import generalized_advantages
from app.advantage.gae.recurrence import MASK_MODES
from tests.advantage.gae_oracle import Case, oracle, random_case


def estimate(case: Case, *, gamma: float = 0.99, lam: float = 0.95, mask_mode: str = "skip"):
    return generalized_advantages(
        case.rewards, case.values, gamma=gamma, lam=lam, mask=case.mask, ends=case.ends, bootstrap=case.bootstrap,
        mask_mode=mask_mode, backend="numpy",
    )  # fmt: skip


def assert_close(got, expected) -> None:
    limit = 1e-5 * max(1.0, float(np.abs(expected[0]).max(initial=0)))
    for one, truth in zip(got, expected, strict=True):
        assert isinstance(one, np.ndarray) and one.dtype == np.float32
        np.testing.assert_allclose(one, truth, rtol=0, atol=limit)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=12),
    few_steps=st.sampled_from([64, 100, 512]),
    block_tokens=st.sampled_from([32, 256, 4096]),
    thread_tokens=st.sampled_from([100, 1 << 19]),
    masked_share=st.sampled_from([0.0, 0.1, 0.9]),
    mask_mode=st.sampled_from(sorted(MASK_MODES)),
    seed=st.integers(0, 1000),
)
def test_sequences_of_any_lengths_in_a_row_equal_a_float64_loop(
    lengths, few_steps, block_tokens, thread_tokens, masked_share, mask_mode, seed
):
    rng = np.random.default_rng(seed)
    shape = 1, sum(lengths)
    rewards, values, bootstrap = rng.standard_normal((3, *shape), np.float32)
    ends = np.zeros(shape, bool)
    ends[0, np.cumsum(lengths) - 1] = True
    case = Case(rewards, values, rng.random(shape) >= masked_share, ends, bootstrap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy_scan, "FEW_STEPS", few_steps)
        patch.setattr(numpy_scan, "BLOCK_TOKENS", block_tokens)
        patch.setattr(numpy_scan, "THREAD_TOKENS", thread_tokens)
        got = estimate(case, mask_mode=mask_mode)
    assert_close(got, oracle(case, gamma=0.99, lam=0.95, mask_mode=mask_mode))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_stays_in_its_sequence(bad):
    case = random_case(np.random.default_rng(0), (1, 4000), masked=False, packed=False)
    ends = np.zeros((1, 4000), bool)
    ends[0, [99, 1000, 1006, 1010, 3000]] = True
    clean = estimate(case._replace(ends=ends))
    rewards = case.rewards.copy()
    rewards[0, 1008] = bad
    for got, expected in zip(estimate(case._replace(rewards=rewards, ends=ends)), clean, strict=True):
        assert not np.isfinite(got[0, 1007:1009]).any()
        others = np.r_[0:1007, 1011:4000]
        np.testing.assert_array_equal(got[0, others], expected[0, others])


def test_arrays_of_any_layout_are_read():
    case = random_case(np.random.default_rng(0), (70, 1024), masked=True, packed=True)
    by_time = case._replace(**{name: np.asfortranarray(x) for name, x in case._asdict().items()})
    assert_close(estimate(by_time), oracle(case, gamma=0.99, lam=0.95))


def test_what_is_read_is_left_alone():
    case = random_case(np.random.default_rng(0), (2, 300), masked=True, packed=True)
    before = [x.copy() for x in case if x is not None]
    estimate(case, mask_mode="zero")
    for x, copy in zip(case, before, strict=True):
        np.testing.assert_array_equal(x, copy)
