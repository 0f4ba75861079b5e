"""Advantages per token: GAE with a critic, discounted returns without one.

The samples are concatenated into a single row, so that the cost is proportional to the number of tokens. The row is
padded to a bucketed length, so that only a few lengths are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Bool, Float32, Float64

from app.advantage.gae.estimate import generalized_advantages
from app.advantage.gae.recurrence import Number, TokenAdvantages
from app.advantage.token_rewards import TokenRewardFn
from app.advantage.vtrace import vtrace
from app.batching.micro_batch_shapes import bucket_length
from app.records.moments import Moments, whiten
from app.records.sample import Sample


class TokenRows(NamedTuple):
    """Rows that each contain one sequence, or several concatenated samples followed by padding."""

    rewards: Float32[np.ndarray, "B T"]
    values: Float32[np.ndarray, "B T"] | Float32[np.ndarray, "B T+1"]
    """Value of the state before each token; with T+1 columns, the last is the value after the row."""
    lengths: Float32[np.ndarray, "B T"]
    """Number of tokens that the policy wrote in the sequence containing this token; 1 on padding."""
    mask: Bool[np.ndarray, "B T"] | None = None
    """True on tokens that the policy wrote; None = all."""
    ends: Bool[np.ndarray, "B T"] | None = None
    """True on the last token of each sample; None = every row is one sample."""
    turn_ends: Bool[np.ndarray, "B T"] | None = None
    """True on the policy's last token in each turn of a sample except the last turn; None = single turns."""
    bootstrap: Float32[np.ndarray, "B T"] | None = None
    """Value after a sample's last token: from the critic if the sample is truncated, 0 if it is complete."""


GaeEstimator = Callable[..., tuple[ArrayLike, ArrayLike]]
"""`app.advantage.gae.estimate.generalized_advantages` with its other options bound: (rewards, values, *, gamma,
lam, mask, ends, bootstrap) -> advantages and returns."""
DiscountFn = Callable[[TokenRows], Number]
"""Computes gamma or GAE's lambda from the rows: one number, or one per token."""
BootstrapFn = Callable[[Sample], float]
"""Returns the value after a sample's last token."""


def fixed_discount(rows: TokenRows, *, discount: float) -> Number:
    """Returns the same discount for every token."""
    return discount


def turn_gamma(rows: TokenRows, *, gamma: float, turn_discount: float) -> Number:
    """Returns gamma for every token, times `turn_discount` on the last token of each turn except the last turn.

    With gamma 1, a reward is thus discounted once per turn, however long turns and observations are.
    """
    return gamma if rows.turn_ends is None else np.where(rows.turn_ends, gamma * turn_discount, gamma)


def length_adaptive_lambda(rows: TokenRows, *, alpha: float) -> Float64[np.ndarray, "B T"]:
    """Returns max(0, 1 - 1 / (alpha * l)), where l is the number of tokens that the policy wrote in the sample.

    The weights of the TD errors then sum to alpha * l, so the reward of a long sample also reaches its beginning.

    Source: Yue et al. 2025, "VAPO" (length-adaptive GAE).
    """
    return np.clip(1 - 1 / (alpha * np.maximum(rows.lengths, 1).astype(np.float64)), 0, 1)


def zero_bootstrap(sample: Sample) -> float:
    """Returns 0: treats every sample as complete."""
    return 0.0


def truncation_bootstrap(sample: Sample) -> float:
    """Returns the critic's value after the last token of a truncated sample, and 0 for a complete one."""
    if sample.finish_reason != "length":
        return 0.0
    assert sample.values is not None and len(sample.values) == len(sample.completion_ids) + 1
    return float(sample.values[-1])


def compute_gae(
    rows: TokenRows, *, estimate: GaeEstimator, gamma: DiscountFn, lam: DiscountFn, critic_lam: DiscountFn | None
) -> TokenAdvantages:
    """Computes the GAE advantages and the critic's targets of every token; both are 0 on masked tokens.

    Args:
        lam: lambda of the advantages.
        critic_lam: lambda of the targets (advantages + values); None = `lam`, computed in the same pass.

    Sources: Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE"; Yuan et al. 2025, "What's Behind
    PPO's Collapse in Long-CoT?" (two lambdas).
    """
    result = _estimate_advantages(rows, estimate, gamma, lam)
    if critic_lam is None:
        return result
    return result._replace(returns=_estimate_advantages(rows, estimate, gamma, critic_lam).returns)


def assign_gae_advantages(
    samples: Sequence[Sample],
    *,
    gae: Callable[[TokenRows], TokenAdvantages],
    token_rewards: TokenRewardFn,
    bootstrap: BootstrapFn,
) -> list[Sample]:
    """Returns the samples with the advantages and returns of `gae`, which is `compute_gae` with its settings bound."""
    row = concatenate_samples(samples, token_rewards=token_rewards, bootstrap=bootstrap)
    return _assign_advantages(samples, gae(row))


def assign_vtrace_advantages(
    samples: Sequence[Sample],
    *,
    gamma: DiscountFn,
    lam: DiscountFn,
    token_rewards: TokenRewardFn,
    bootstrap: BootstrapFn,
) -> list[Sample]:
    """Returns the samples with V-trace advantages and targets, which estimate the values of the current policy.

    The ratio to the policy that sampled a token is exp(policy_logprobs - behavior_logprobs). The advantages
    exclude the importance weight of their own token, which the policy loss applies.

    Source: Espeholt et al. 2018 (IMPALA), section 4.
    """
    row = concatenate_samples(samples, token_rewards=token_rewards, bootstrap=bootstrap)
    assert all(s.policy_logprobs is not None for s in samples)
    ratios = np.concatenate([np.zeros(0, np.float32), *(s.policy_logprobs - s.behavior_logprobs for s in samples)])
    log_ratios = np.pad(ratios, (0, row.rewards.size - ratios.size))[None]
    given = {"mask": row.mask, "ends": row.ends, "bootstrap": row.bootstrap}
    result = vtrace(row.rewards, row.values, log_ratios, gamma=gamma(row), lam=lam(row), **given)
    return _assign_advantages(samples, result)


def assign_return_advantages(
    samples: Sequence[Sample], *, gamma: DiscountFn, token_rewards: TokenRewardFn
) -> list[Sample]:
    """Returns the samples with sum_k gamma^k r_{t+k} as both the return and the advantage of token t.

    This is GAE with lambda 1 and all values 0.

    With `turn_gamma` and gamma 1, every token of turn i has the return sum_{j >= 0} turn_discount^j R_{i+j}, where
    R_i is the reward of turn i.

    Source: Hu 2025, "REINFORCE++".
    """
    row = concatenate_samples(
        samples, token_rewards=token_rewards, values=lambda s: np.zeros(len(s.completion_ids)), bootstrap=zero_bootstrap
    )
    all_rewards = partial(fixed_discount, discount=1.0)
    return _assign_advantages(samples, _estimate_advantages(row, generalized_advantages, gamma, all_rewards))


def concatenate_samples(
    samples: Sequence[Sample],
    *,
    token_rewards: TokenRewardFn,
    values: Callable[[Sample], np.ndarray] = lambda sample: sample.token_values,
    bootstrap: BootstrapFn,
) -> TokenRows:
    """Concatenates samples into one row; `values` maps a sample to the value of the state before each token."""
    counts = [len(s.completion_ids) for s in samples]
    shape = (1, bucket_length(sum(counts)))
    rewards, token_values, bootstraps = np.zeros((3, *shape), np.float32)
    mask, ends, turn_ends = np.zeros((3, *shape), bool)
    lengths = np.ones(shape, np.float32)
    start = 0
    for sample, count in zip(samples, counts, strict=True):
        place = (0, slice(start, start + count))
        rewards[place], token_values[place], mask[place] = token_rewards(sample), values(sample), sample.mask
        lengths[place] = sample.mask.sum()
        turn_ends[0, start + sample.turn_places[:-1]] = True
        start += count
        if count:
            ends[0, start - 1], bootstraps[0, start - 1] = True, bootstrap(sample)
    return TokenRows(rewards, token_values, lengths, mask, ends, turn_ends, bootstraps)


def _estimate_advantages(
    rows: TokenRows, estimate: GaeEstimator, gamma: DiscountFn, lam: DiscountFn
) -> TokenAdvantages:
    given = {"mask": rows.mask, "ends": rows.ends, "bootstrap": rows.bootstrap}
    result = estimate(rows.rewards, rows.values, gamma=gamma(rows), lam=lam(rows), **given)
    return TokenAdvantages(*map(np.asarray, result))


def _assign_advantages(samples: Sequence[Sample], row: TokenAdvantages) -> list[Sample]:
    """Returns the samples, each with its part of the row."""
    ends = np.cumsum([len(s.completion_ids) for s in samples])
    parts = zip(samples, np.split(row.advantages[0], ends), np.split(row.returns[0], ends), strict=False)
    return [replace(s, advantages=a, returns=r) for s, a, r in parts]


def whiten_advantages(samples: Sequence[Sample], moments: Moments) -> list[Sample]:
    """Returns the samples with whitened advantages, given their moments over all hosts; returns are unchanged."""
    return [replace(s, advantages=whiten(s.advantages, s.mask, moments)) for s in samples if s.advantages is not None]
