from __future__ import annotations

from typing import Any

import numpy as np

from app.advantage.gae.estimate import generalized_advantages
from app.advantage.vtrace import vtrace
from tests.advantage.gae_oracle import random_case


def test_on_policy_it_is_gae():
    case = random_case(np.random.default_rng(0), (2, 150), masked=True, packed=True)
    options: Any = {"mask": case.mask, "ends": case.ends, "bootstrap": case.bootstrap}
    for lam in (1.0, 0.8, np.random.default_rng(1).random((2, 150))):
        gae = generalized_advantages(case.rewards, case.values, gamma=0.9, lam=lam, **options)
        got = vtrace(case.rewards, case.values, np.zeros((2, 150)), gamma=0.9, lam=lam, **options)
        np.testing.assert_allclose(got.returns, gae.returns, atol=1e-5)
        np.testing.assert_allclose(got.advantages, gae.advantages, atol=1e-5)


def test_off_policy_it_is_the_recursion_of_the_paper():
    rng = np.random.default_rng(1)
    rewards, values, log_ratios = (rng.standard_normal((1, n)) for n in (9, 10, 9))
    gamma, lam = 0.9, 0.8
    got = vtrace(rewards, values, log_ratios, gamma=gamma, lam=lam)
    ratios = np.exp(log_ratios[0])
    weights = np.minimum(1.0, ratios)
    traces = lam * weights
    targets = values[0].copy()
    for t in reversed(range(9)):
        delta = weights[t] * (rewards[0, t] + gamma * values[0, t + 1] - values[0, t])
        targets[t] = values[0, t] + delta + gamma * traces[t] * (targets[t + 1] - values[0, t + 1])
    behind = np.append(lam * targets[1:9] + (1 - lam) * values[0, 1:9], values[0, 9])
    of_the_policy_gradient = weights * (rewards[0] + gamma * behind - values[0, :9])
    np.testing.assert_allclose(got.returns[0], targets[:9], atol=1e-5)
    # The paper's advantages hold what tokens weigh; here the loss does that.
    np.testing.assert_allclose(weights * got.advantages[0], of_the_policy_gradient, atol=1e-5)


def test_ratios_of_tokens_that_the_policy_did_not_write_change_nothing():
    case = random_case(np.random.default_rng(2), (1, 30), masked=True, packed=False)
    assert case.mask is not None
    with_nan = np.where(case.mask, 0.1, np.nan)
    got, expected = (
        vtrace(case.rewards, case.values, x, gamma=0.9, lam=0.9, mask=case.mask)
        for x in (with_nan, np.where(case.mask, 0.1, 0.0))
    )
    np.testing.assert_array_equal(got.advantages, expected.advantages)
    np.testing.assert_array_equal(got.returns, expected.returns)
