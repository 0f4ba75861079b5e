"""Tests that the settings select the advantage estimator, by its results."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.advantage.group import GROUP_ADVANTAGES
from app.records.sample import Sample
from app.reward.reward_functions import EnvironmentReward
from app.runtime.advantages import (
    TOKEN_ADVANTAGES,
    make_advantage_estimator,
    make_gae_advantages,
    make_return_advantages,
    with_saved_advantages,
)
from app.training.learner import make_policy_loss
from app.update.loss_aggregation import aggregations, token_mean
from settings import Settings, load
from tests.advantage.gae_oracle import Case, oracle
from tests.episodes import with_turns
from tests.tiny import PLAIN_LOSS, make_sample, one_a_row, random_samples
from tests.update.table_policy import loss_and_gradient

PENALTY = ("algorithm.beta=0.5", "algorithm.kl_in=reward")


def settings_of(*overrides: str) -> Settings:
    return load(None, overrides, {}).settings


def estimator_from(*overrides: str) -> Any:
    return make_advantage_estimator(settings_of(*overrides))


def by_gae(settings: Settings, samples: list[Sample]) -> Any:
    return make_gae_advantages(settings)(samples, 0.0)


def samples_of(*rewards: float, group_id: int = 0) -> list[Sample]:
    """Returns samples of three tokens, on which the policy's logprob exceeds the reference's by 0.2."""
    return [
        make_sample(
            np.zeros(3),
            group_id=group_id,
            sample_index=i,
            reward=reward,
            policy_logprobs=np.full(3, -1.0, np.float32),
            reference_logprobs=np.full(3, -1.2, np.float32),
            values=np.array([0.5, 0.25, 0.75, 2.0], np.float32),
        )
        for i, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize("name", GROUP_ADVANTAGES)
def test_the_algorithm_setting_selects_the_estimator_of_group_advantages(name: str) -> None:
    estimated = estimator_from(f"algorithm.name={name}")(samples_of(1.0, 4.0), 0.0)
    expected = GROUP_ADVANTAGES[name](np.array([1.0, 4.0]), np.array([0, 0]))
    np.testing.assert_allclose([s.advantages for s in estimated.samples], np.stack([expected] * 3, axis=1), rtol=1e-6)
    assert estimated.metrics.keys() == {"advantage/mean", "advantage/std"}


def test_a_kl_penalty_in_the_reward_uses_the_current_kl_coefficient() -> None:
    pair = samples_of(1.0, 4.0)
    pair[1] = replace(pair[1], policy_logprobs=pair[1].reference_logprobs)
    estimator = estimator_from("algorithm.name=dr_grpo", *PENALTY)
    for coefficient in (0.5, 2.0):
        estimated = estimator(pair, coefficient)
        apart = (4.0 - (1.0 - coefficient * 0.6)) / 2
        np.testing.assert_allclose(estimated.samples[1].advantages, apart, rtol=1e-5)
        assert estimated.metrics["policy/kl_coef"] == estimated.kl_coef == coefficient
    in_loss = estimator_from("algorithm.name=dr_grpo", "algorithm.beta=0.5", "algorithm.kl_in=loss")(pair, 0.5)
    assert "policy/kl_coef" not in in_loss.metrics
    np.testing.assert_allclose(in_loss.samples[1].advantages, 1.5)


TEACHER = ("algorithm.beta=0.5", "algorithm.kl_in=advantage")


def test_a_kl_penalty_in_the_advantage_is_subtracted_per_token() -> None:
    pair = samples_of(1.0, 4.0)
    policy = np.array([-1.0, -1.2, -2.2], np.float32)
    mask = np.array([True, True, False])
    pair[1] = replace(pair[1], policy_logprobs=policy, loss_mask=mask)
    for whitens, task in (("false", 1.5), ("true", None)):
        chosen = ("algorithm.name=dr_grpo", f"algorithm.whiten_advantages={whitens}")
        plain = estimator_from(*chosen)(pair, 0.0)
        estimated = estimator_from(*chosen, *TEACHER)(pair, 0.5)
        task = task or plain.samples[1].advantages[0]
        # The KL is 0.2 at the first token and 0 at the second; the third is masked.
        np.testing.assert_allclose(estimated.samples[1].advantages, [task - 0.1, task, 0], rtol=1e-5)
        np.testing.assert_allclose(estimated.samples[0].advantages, plain.samples[0].advantages - 0.1, rtol=1e-5)
        assert estimated.metrics == plain.metrics | {"policy/kl_coef": 0.5}
    assert with_saved_advantages(estimator_from(*TEACHER))(pair[:0], 0.5).samples == []
    (saved,) = with_saved_advantages(estimator_from(*TEACHER))([replace(pair[0], advantages=policy)], 0.5).samples
    np.testing.assert_array_equal(saved.advantages, policy)


def test_distillation_advantages_equal_kl_penalized_returns_with_gamma_0() -> None:
    samples = samples_of(0.0, 0.0)
    returns = ("algorithm.name=reinforce_plus_plus", "algorithm.gamma=0", "algorithm.whiten_advantages=false")
    found, expected = (
        estimator_from(*chosen)(samples, 1.0).samples
        for chosen in (("algorithm.name=distill",), (*returns, "algorithm.beta=1", "algorithm.kl_in=reward"))
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.advantages, other.advantages, rtol=1e-6)
        np.testing.assert_allclose(one.advantages, -0.2, rtol=1e-6)


def test_advantage_metrics_are_measured_before_whitening() -> None:
    plain, white = (
        estimator_from("algorithm.name=dr_grpo", f"algorithm.whiten_advantages={whitens}")(samples_of(1.0, 4.0), 0.0)
        for whitens in ("false", "true")
    )
    assert plain.metrics == white.metrics == {"advantage/mean": 0.0, "advantage/std": 1.5}
    # Six tokens are 1.5 away from their mean 0, with ddof = 1.
    np.testing.assert_allclose(white.samples[1].advantages, 1.5 / np.sqrt(6 * 1.5**2 / 5), rtol=1e-6)
    np.testing.assert_array_equal(plain.samples[1].advantages, 1.5)


ALL_ESTIMATORS = (*GROUP_ADVANTAGES, *TOKEN_ADVANTAGES)
ONE_A_ROW = {"rows_per_micro_batch": 1, "num_tokens": 16, "num_targets": 9}


@pytest.mark.parametrize("name", ALL_ESTIMATORS)
def test_masked_truncated_samples_do_not_affect_their_groups(name: str) -> None:
    """The second group has one member left, and the third none."""
    kl_in_reward = () if name == "maxrl" else (*PENALTY, "algorithm.kl_target=0.4")
    settings = settings_of(f"algorithm.estimator={name}", "algorithm.mask_truncated=true", *kl_in_reward)
    estimator = make_advantage_estimator(settings)
    rng, is_cut = np.random.default_rng(1), [0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0]
    samples = [
        replace(
            sample,
            reward=abs(sample.reward or 0),
            values=rng.normal(0, 1, len(sample.completion_ids)).astype(np.float32),
            finish_reason="length" if cut else "stop",
        )
        for sample, cut in zip(random_samples(4, 3, vocab_size=5, with_holes=True), is_cut, strict=True)
    ]
    complete = [sample for sample in samples if sample.finish_reason == "stop"]
    masked, without = estimator(samples, 0.5), estimator(complete, 0.5)
    assert masked.kl_coef == without.kl_coef
    share = "completions/masked_token_fraction"
    left_out = 1 - sum(s.mask.sum() for s in complete) / sum(s.mask.sum() for s in samples)
    assert masked.metrics == pytest.approx({**without.metrics, share: left_out}) and without.metrics[share] == 0
    ends = np.cumsum([len(s.completion_ids) for s in samples])
    table = rng.normal(0, 1.5, (ends[-1], 5)).astype(np.float32)
    is_complete = np.repeat(np.equal(is_cut, 0), np.diff(ends, prepend=0))
    for weights in aggregations(max_new_tokens=9).values():
        gradient, parts = loss_and_gradient(
            PLAIN_LOSS, table, masked.samples, one_a_row(12, **ONE_A_ROW), weights=weights
        )
        expected, of_complete = loss_and_gradient(
            PLAIN_LOSS, table[is_complete], without.samples, one_a_row(6, **ONE_A_ROW), weights=weights
        )
        np.testing.assert_array_equal(gradient[is_complete], expected)
        assert np.abs(expected).max() > 1e-3 and not gradient[~is_complete].any()
        assert float(parts.sums["loss"]) == pytest.approx(float(of_complete.sums["loss"]), rel=1e-6)
    for sample, other in zip([s for s in masked.samples if s.finish_reason == "stop"], without.samples, strict=True):
        np.testing.assert_array_equal(sample.advantages, other.advantages)
        if settings.has_critic:
            np.testing.assert_array_equal(sample.returns, other.returns)


@pytest.mark.parametrize("name", ALL_ESTIMATORS)
def test_a_step_with_only_truncated_samples_has_zero_advantages(name: str) -> None:
    estimated = estimator_from(f"algorithm.estimator={name}", "algorithm.mask_truncated=true")(samples_of(1, 0), 0.0)
    for sample in estimated.samples:
        assert not sample.mask.any() and not sample.advantages.any() and not sample.returns.any()
    assert estimated.metrics["completions/masked_token_fraction"] == 1.0
    assert (estimated.metrics["advantage/mean"], estimated.metrics["advantage/std"]) == (0, 0)
    unmasked = estimator_from(f"algorithm.estimator={name}")(samples_of(1, 0), 0.0)
    assert all(sample.mask.all() for sample in unmasked.samples)


def test_gae_uses_the_settings_of_algorithm_and_critic() -> None:
    lams = ("algorithm.gamma=0.5", "algorithm.lam=0", "critic.lam=1.0")
    (one,) = by_gae(settings_of(*lams), samples_of(1.0))
    np.testing.assert_allclose(one.advantages, [0.125 - 0.5, 0.375 - 0.25, 1 - 0.75])
    np.testing.assert_allclose(one.returns, [0.25, 0.5, 1.0])
    (one,) = by_gae(settings_of(*lams, "algorithm.bootstrap_truncated=true"), samples_of(1.0))
    np.testing.assert_allclose(one.advantages, [0.125 - 0.5, 0.375 - 0.25, 1 + 0.5 * 2.0 - 0.75])
    np.testing.assert_allclose(one.returns, [0.5, 1.0, 2.0])


def test_token_returns_include_the_kl_penalty() -> None:
    estimator: Any = make_return_advantages(settings_of(*PENALTY, "algorithm.gamma=0.5"))
    (one,) = estimator(samples_of(1.0), 0.5)
    # The penalty is 0.1 at every token.
    np.testing.assert_allclose(one.advantages, [0.25 - 0.175, 0.5 - 0.15, 1 - 0.1], rtol=1e-6)


def test_kl_coefficient_is_adapted_once_per_step_by_the_kl_per_token() -> None:
    target = (*PENALTY, "algorithm.kl_target=0.4")
    # A KL of half its target lowers the coefficient by 20 % over 10,000 samples, of which this step has two.
    assert estimator_from(*target)(samples_of(1.0, 4.0), 0.5).kl_coef == pytest.approx(0.5 * (1 - 0.2 * 2 / 10_000))
    assert estimator_from(*PENALTY)(samples_of(1.0, 4.0), 0.5).kl_coef == 0.5
    assert estimator_from(*target)([], 0.5).kl_coef == 0.5
    broken = [replace(samples_of(1.0)[0], policy_logprobs=np.full(3, np.nan, np.float32))]
    assert estimator_from(*target)(broken, 0.5).kl_coef == 0.5


def test_vtrace_gradient_of_an_unlikely_token_vanishes_despite_whitening() -> None:
    chosen = settings_of("algorithm.estimator=vtrace", "rollout.max_staleness=1", "algorithm.correction_veto=0")
    vocabulary = 5
    scored = np.full(3, -np.log(vocabulary), np.float32)
    drawn = scored + np.array([0, 12, 0], np.float32)
    samples = [replace(s, policy_logprobs=scored, behavior_logprobs=drawn) for s in samples_of(1.0, 4.0)]
    estimated = make_advantage_estimator(chosen)(samples, 0.0).samples
    assert chosen.algorithm.whiten_advantages
    assert all(s.advantages is not None and abs(s.advantages[1]) > 0.1 for s in estimated)
    gradient, _ = loss_and_gradient(
        make_policy_loss(chosen.algorithm),
        np.zeros((6, vocabulary), np.float32),
        estimated,
        one_a_row(2, rows_per_micro_batch=2, num_tokens=8, num_targets=4),
        weights=token_mean,
    )
    of_tokens = np.abs(gradient).max(axis=1)
    assert of_tokens[[1, 4]].max() < 1e-5 < 1e-2 < of_tokens[[0, 2, 3, 5]].min()


TURNS = [(2, 2), (1, 1), (3, 0)]
"""Written and observed tokens of three turns."""


def played(rewards: list[float], *, seed: int = 0, bootstrapped: bool = False) -> Any:
    rng = np.random.default_rng(seed)
    sample = with_turns(TURNS, rewards, end="turns" if bootstrapped else "terminated", reward=sum(rewards))
    values = rng.normal(0, 1, len(sample.completion_ids) + bootstrapped).astype(np.float32)
    logprobs = rng.normal(-1, 0.3, len(sample.completion_ids)).astype(np.float32)
    sample = replace(sample, values=values, policy_logprobs=logprobs, behavior_logprobs=logprobs)
    return EnvironmentReward(weight=1.0, rewards_turns=True).set_token_rewards(sample)


def test_tokens_of_a_turn_have_the_discounted_return_of_its_own_and_later_rewards() -> None:
    settings = settings_of("algorithm.name=reinforce_plus_plus", "env.credit=turn", "env.turn_discount=0.5")
    (one,) = make_return_advantages(settings)([played([1.0, 2.0, 4.0])], 0.0)
    first, second, third = 1.0 + 0.5 * 2.0 + 0.25 * 4.0, 2.0 + 0.5 * 4.0, 4.0
    expected = [first, first, 0, 0, second, 0, third, third, third]
    np.testing.assert_array_equal(one.advantages, np.array(expected, np.float32))
    np.testing.assert_array_equal(one.returns, np.array(expected, np.float32))
    # Tokens that the environment wrote have no gradient.
    one = replace(one, completion_ids=one.completion_ids % 3, policy_logprobs=None)
    plan = one_a_row(1, rows_per_micro_batch=1, num_tokens=12, num_targets=10)
    gradient, _ = loss_and_gradient(PLAIN_LOSS, np.zeros((9, 3), np.float32), [one], plan, weights=token_mean)
    assert (np.abs(gradient).max(axis=1) > 0).tolist() == one.mask.tolist()


@pytest.mark.parametrize(
    ("name", "gamma", "turn_discount"),
    [("gae", 0.97, 0.6), ("gae", 1.0, 1.0), ("vtrace", 0.97, 0.6), ("vtrace", 1.0, 0.0)],
)
def test_advantages_of_rewarded_turns_equal_a_serial_float64_oracle(
    name: str, gamma: float, turn_discount: float
) -> None:
    settings = settings_of(
        *("algorithm.name=ppo", f"algorithm.estimator={name}", f"algorithm.gamma={gamma}", "algorithm.lam=0.9"),
        "algorithm.bootstrap_truncated=true",
        *("env.source=guess_number", "env.credit=turn", f"env.turn_discount={turn_discount}"),
    )
    samples = [played([0.5, -1.0, 2.0], seed=1), played([0.0, 3.0, 0.25], seed=2, bootstrapped=True)]
    estimated: Any = TOKEN_ADVANTAGES[name](settings)(samples, 0.0)
    discounts = np.full((1, 9), gamma)
    discounts[0, [1, 4]] *= turn_discount
    token_rewards = {0: [0, 0.5, 0, 0, -1.0, 0, 0, 0, 2.0], 1: [0, 0, 0, 0, 3.0, 0, 0, 0, 0.25]}
    for i, sample in enumerate(samples):
        values = sample.values[None] if sample.values.size == 10 else np.append(sample.values, 0.0)[None]
        case = Case(np.array([token_rewards[i]]), values, sample.mask[None])
        advantages, returns = oracle(case, gamma=discounts, lam=0.9)
        np.testing.assert_allclose(estimated[i].advantages, advantages[0], atol=1e-5 * max(1, np.abs(advantages).max()))
        np.testing.assert_allclose(estimated[i].returns, returns[0], atol=1e-5 * max(1, np.abs(returns).max()))
