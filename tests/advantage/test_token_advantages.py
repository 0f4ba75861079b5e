"""Tests token advantages: rewards, penalties, two lambdas, truncation and whitening, compared with TRL's PPO."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from app.advantage.gae.estimate import generalized_advantages
from app.advantage.token_advantages import (
    assign_gae_advantages,
    assign_return_advantages,
    assign_vtrace_advantages,
    compute_gae,
    fixed_discount,
    length_adaptive_lambda,
    truncation_bootstrap,
    whiten_advantages,
    zero_bootstrap,
)
from app.advantage.token_rewards import (
    kl_moments,
    kl_penalized_token_rewards,
    task_token_rewards,
    token_kl,
    update_kl_coef,
)
from app.records.moments import EMPTY_MOMENTS, joint_moments
from app.update.kl import k1, k3
from tests.advantage.gae_oracle import Case, oracle
from tests.tiny import make_sample


def sample(length: int, *, seed: int = 0, mask=None, reward: float | None = None, stop: bool = True, **fields) -> Any:
    """Returns a sample with random logprobs, reward and values, which have one more entry if it was truncated."""
    rng = np.random.default_rng(seed)
    made = {
        "policy_logprobs": rng.normal(-1, 0.3, length).astype(np.float32),
        "reference_logprobs": rng.normal(-1, 0.3, length).astype(np.float32),
        "values": rng.normal(0, 1, length + (not stop)).astype(np.float32),
        "reward": float(rng.normal()) if reward is None else reward,
        "loss_mask": None if mask is None else np.asarray(mask, bool),
        **fields,
    }
    return replace(make_sample(np.zeros(length), **made), finish_reason="stop" if stop else "length")


def by_gae(samples, *, gamma: Any = 1.0, lam: Any = 0.95, **changes) -> Any:
    rule = {
        "estimate": generalized_advantages,
        "gamma": partial(fixed_discount, discount=gamma) if isinstance(gamma, float) else gamma,
        "lam": partial(fixed_discount, discount=lam) if isinstance(lam, float) else lam,
        "critic_lam": changes.pop("critic_lam", None),
    }
    arguments = {"gae": partial(compute_gae, **rule), "token_rewards": task_token_rewards, "bootstrap": zero_bootstrap}
    return assign_gae_advantages(samples, **{**arguments, **changes})


def serial(rewards, values, *, gamma: float, lam: float, after: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    advantages, returns = oracle(Case(rewards[None], np.append(values, after)[None]), gamma=gamma, lam=lam)
    return advantages[0], returns[0]


def assert_same(found, expected) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_last_unmasked_token_gets_the_reward():
    np.testing.assert_array_equal(task_token_rewards(sample(4, reward=2.5)), [0, 0, 0, 2.5])
    tool_last = sample(5, reward=2.5, mask=[1, 0, 1, 0, 0])
    np.testing.assert_array_equal(task_token_rewards(tool_last), [0, 0, 2.5, 0, 0])
    assert not task_token_rewards(sample(2, reward=2.5, mask=[0, 0])).any()
    assert task_token_rewards(sample(0, reward=2.5)).shape == (0,)


def test_kl_penalty_applies_only_to_unmasked_tokens():
    one = sample(4, reward=1.0, mask=[1, 0, 1, 0])
    one.policy_logprobs[:] = [-1, np.nan, -2, -3]
    one.reference_logprobs[:] = [-1.5, -9, -1.5, np.nan]
    assert_same(kl_penalized_token_rewards(one, kl_estimator=k1, kl_coef=0.1), [-0.05, 0, 1 + 0.05, 0])
    assert_same(token_kl(one, k3), [np.expm1(-0.5) + 0.5, 0, np.expm1(0.5) - 0.5, 0])


def test_kl_moments_are_computed_over_tokens_and_not_over_samples():
    pair = [sample(1), sample(3, mask=[1, 0, 1])]
    for one in pair:
        one.reference_logprobs[:] = one.policy_logprobs
    pair[0].policy_logprobs[:] += 1
    found = kl_moments(pair, k1)
    assert found.count == 3 and found.mean == pytest.approx(1 / 3)
    assert kl_moments([], k1).count == 0


def test_samples_of_a_batch_have_independent_advantages():
    masks = [np.ones(5, bool), np.array([1, 0, 0, 1, 1, 0], bool), np.ones(1, bool), np.ones(0, bool), np.ones(9, bool)]
    samples = [sample(len(mask), seed=i, mask=mask) for i, mask in enumerate(masks)]
    for one in samples:
        one.values[~one.mask] = np.nan
    for one in by_gae(samples, gamma=0.9, lam=0.7):
        rewards, values = task_token_rewards(one)[one.mask], one.values[one.mask]
        advantages, returns = serial(rewards, values, gamma=0.9, lam=0.7)
        assert_same(one.advantages[one.mask], advantages)
        assert_same(one.returns[one.mask], returns)
        assert not one.advantages[~one.mask].any() and not one.returns[~one.mask].any()
        assert one.advantages.dtype == one.returns.dtype == np.float32


def test_only_truncated_samples_bootstrap_with_the_value():
    cut, stopped = sample(4, stop=False), sample(4, stop=True, seed=1)
    tool_last = sample(4, stop=False, mask=[1, 1, 0, 0], seed=2)
    samples, after = [cut, stopped, tool_last], (cut.values[4], 0.0, tool_last.values[4])
    for bootstrap, values_after in ((truncation_bootstrap, after), (zero_bootstrap, (0.0, 0.0, 0.0))):
        found = by_gae(samples, gamma=0.9, bootstrap=bootstrap)
        for one, value in zip(found, values_after, strict=True):
            rewards, values = task_token_rewards(one)[one.mask], one.values[:4][one.mask]
            expected, _ = serial(rewards, values, gamma=0.9, lam=0.95, after=value)
            assert_same(one.advantages[one.mask], expected)


def test_critic_targets_can_use_a_separate_lambda():
    one = by_gae([sample(7)], lam=0.8, critic_lam=partial(fixed_discount, discount=1.0))[0]
    assert_same(one.advantages, serial(task_token_rewards(one), one.values, gamma=1.0, lam=0.8)[0])
    # With lambda 1 and no discount every token's target is the reward.
    assert_same(one.returns, np.full(7, one.reward))


@pytest.mark.parametrize(("alpha", "lams"), [(0.25, (0.9, 0.2, 0.0)), (1e-3, (0.0, 0.0, 0.0))])
def test_adaptive_lambda_grows_with_the_unmasked_length(alpha, lams):
    samples = [sample(40, seed=1), sample(6, mask=[1, 0, 1, 1, 1, 1], seed=2), sample(2, seed=3)]
    adaptive = partial(length_adaptive_lambda, alpha=alpha)
    found = by_gae(samples, lam=adaptive, critic_lam=partial(fixed_discount, discount=1.0))
    for one, lam in zip(found, lams, strict=True):
        rewards, values = task_token_rewards(one)[one.mask], one.values[one.mask]
        assert_same(one.advantages[one.mask], serial(rewards, values, gamma=1.0, lam=lam)[0])
        assert_same(one.returns[one.mask], one.reward)
    (unwritten,) = by_gae([sample(3, mask=[0, 0, 0])], lam=adaptive)
    assert not unwritten.advantages.any() and not unwritten.returns.any()


def by_return(samples, *, gamma: Any = 1.0, token_rewards=task_token_rewards) -> Any:
    gamma = partial(fixed_discount, discount=gamma) if isinstance(gamma, float) else gamma
    return assign_return_advantages(samples, gamma=gamma, token_rewards=token_rewards)


def test_without_a_critic_advantages_are_discounted_returns():
    one = sample(5, mask=[1, 1, 0, 1, 1], reward=1.0)
    penalized = partial(kl_penalized_token_rewards, kl_estimator=k1, kl_coef=0.1)
    (found,) = by_return([one], gamma=0.9, token_rewards=penalized)
    kl = (one.policy_logprobs - one.reference_logprobs)[one.mask].astype(np.float64)
    rewards = -0.1 * kl + [0, 0, 0, 1]
    expected = [sum(0.9**k * r for k, r in enumerate(rewards[t:])) for t in range(4)]
    assert_same(found.advantages[one.mask], expected)
    np.testing.assert_array_equal(found.returns, found.advantages)
    assert found.advantages[2] == 0
    assert by_return([]) == by_gae([]) == whiten_advantages([], EMPTY_MOMENTS) == []


def white(samples) -> Any:
    return whiten_advantages(samples, joint_moments([(s.advantages, s.mask) for s in samples]))


def trl_ppo(samples, *, gamma: float, lam: float, kl_coef: float) -> tuple[np.ndarray, np.ndarray]:
    """Computes whitened advantages and returns [N, C] of equally long samples as TRL's PPOTrainer.train does."""
    logprobs, reference = (
        np.stack([getattr(s, f"{role}_logprobs") for s in samples]) for role in ("policy", "reference")
    )
    values = np.stack([s.values for s in samples]).astype(np.float64)
    rewards = -kl_coef * (logprobs.astype(np.float64) - reference)
    rewards[:, -1] += [s.reward for s in samples]
    lastgaelam, advantages_reversed, gen_length = 0.0, [], values.shape[1]
    for t in reversed(range(gen_length)):
        nextvalues = values[:, t + 1] if t < gen_length - 1 else 0.0
        delta = rewards[:, t] + gamma * nextvalues - values[:, t]
        lastgaelam = delta + gamma * lam * lastgaelam
        advantages_reversed.append(lastgaelam)
    advantages = np.stack(advantages_reversed[::-1], axis=1)
    returns = advantages + values
    whitened = (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + 1e-8)
    return whitened, returns


def test_ppo_advantages_and_returns_equal_those_of_trl():
    samples = [sample(23, seed=seed) for seed in range(6)]
    penalized = partial(kl_penalized_token_rewards, kl_estimator=k1, kl_coef=0.05)
    ours: Any = white(by_gae(samples, gamma=0.99, lam=0.9, token_rewards=penalized))
    advantages, returns = trl_ppo(samples, gamma=0.99, lam=0.9, kl_coef=0.05)
    np.testing.assert_allclose(np.stack([s.advantages for s in ours]), advantages, atol=1e-5)
    np.testing.assert_allclose(np.stack([s.returns for s in ours]), returns, atol=1e-5)


def test_whitening_uses_all_unmasked_tokens_and_does_not_change_returns():
    samples = by_gae([sample(5, mask=[1, 0, 1, 1, 1]), sample(9, seed=1), sample(0)])
    found: Any = white(samples)
    tokens = np.concatenate([s.advantages[s.mask] for s in found])
    assert tokens.mean() == pytest.approx(0, abs=1e-6) and tokens.var(ddof=1) == pytest.approx(1, abs=1e-5)
    assert found[0].advantages[1] == 0 and found[0].advantages.dtype == np.float32
    for one, before in zip(found, samples, strict=True):
        np.testing.assert_array_equal(one.returns, before.returns)


def test_the_adaptive_kl_coefficient_follows_ziegler_et_al():
    kls, coef, expected, found = [6.0, 9.0, 6.6, 5.4, 0.0, 6.0], 0.2, 0.2, []
    for kl in kls:
        # Ziegler et al.: e = clip((KL - target) / target, -0.2, 0.2); beta <- beta * (1 + K e), here K = 64 / 640.
        expected *= 1 + 0.1 * np.clip((kl - 6.0) / 6.0, -0.2, 0.2)
        coef = update_kl_coef(coef, kl, target=6.0, num_samples=64, horizon=640)
        assert coef == pytest.approx(expected, rel=1e-12)
        found.append(coef)
    assert found == pytest.approx([0.2, 0.204, 0.20604, 0.2039796, 0.199900008, 0.199900008])
    # A step changes the coefficient by at most a fifth, however many samples it has.
    adapt = partial(update_kl_coef, target=0.1, num_samples=128, horizon=20)
    assert (adapt(0.5, 0.0), adapt(0.5, 9.0)) == pytest.approx((0.5 * 0.8, 0.5 * 1.2))


def test_vtrace_scales_the_critic_targets_but_not_the_advantages_by_importance_weights():
    (one,) = [sample(1, reward=2.0, values=np.array([0.5], np.float32))]
    half = replace(one, policy_logprobs=one.behavior_logprobs + np.float32(np.log(0.5)))
    got: Any
    (got,) = assign_vtrace_advantages(
        [half],
        gamma=partial(fixed_discount, discount=1.0),
        lam=partial(fixed_discount, discount=1.0),
        token_rewards=task_token_rewards,
        bootstrap=zero_bootstrap,
    )
    np.testing.assert_allclose(got.advantages, [2.0 - 0.5], rtol=1e-5)
    np.testing.assert_allclose(got.returns, [0.5 + 0.5 * (2.0 - 0.5)], rtol=1e-5)
