"""Credit token by token: GAE with a critic, discounted returns without one.

The samples lie one behind the other in a single row, so that a step costs as many tokens as were written, and the row
is padded to a rung of a ladder, so that few lengths are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Float32, Float64

from app.advantage.token_rewards import TokenRewardFn
from app.batching.length_buckets import bucket_length
from app.records.moments import Moments, whiten
from app.records.sample import Sample


class TokenRows(NamedTuple):
    """A sequence in each row; or samples one behind the other, then padding: tokens of none that nobody wrote."""

    rewards: Float32[np.ndarray, "B T"]
    values: Float32[np.ndarray, "B T"] | Float32[np.ndarray, "B T+1"]
    """One more: that of what follows the row."""
    lengths: Float32[np.ndarray, "B T"]
    """How many tokens the policy wrote of the sequence that the token belongs to; 1 in the padding."""
    mask: Bool[np.ndarray, "B T"] | None = None
    """True where the policy wrote the token; None = everywhere."""
    ends: Bool[np.ndarray, "B T"] | None = None
    """True on the last token of a sample; None = a row is one."""
    bootstrap: Float32[np.ndarray, "B T"] | None = None
    """Behind a sample's last token: the critic's value where it goes on, 0 where it is over."""


class TokenAdvantages(NamedTuple):
    advantages: Float32[np.ndarray, "B T"]
    returns: Float32[np.ndarray, "B T"]


class GaeEstimator(Protocol):
    """`generalized_advantages` of app.advantage.gae with its settings, but for lambda."""

    def __call__(
        self,
        rewards: np.ndarray,
        values: np.ndarray,
        *,
        lam: ArrayLike,
        mask: np.ndarray | None,
        ends: np.ndarray | None,
        bootstrap: np.ndarray | None,
    ) -> tuple[ArrayLike, ArrayLike]: ...


VTraceEstimator = Callable[..., tuple[ArrayLike, ArrayLike]]
"""`vtrace` of app.advantage with its settings: as `Estimate`, with log ratios behind the values."""

LambdaFn = Callable[[TokenRows], ArrayLike]
"""Rows -> GAE's lambda: one number, or one at each token."""
BootstrapFn = Callable[[Sample], float]
"""A sample -> the value behind its last token."""


def fixed_lambda(rows: TokenRows, *, lam: float) -> ArrayLike:
    """The same for every token."""
    return lam


def length_adaptive_lambda(rows: TokenRows, *, alpha: float) -> Float64[np.ndarray, "B T"]:
    """1 - 1 / (alpha * l), at least 0, with l the tokens that the policy wrote of the sample.

    The weights of the TD errors then sum to alpha * l: a long sample's reward reaches its beginning, too.

    Source: Yue et al. 2025, "VAPO" (length-adaptive GAE).
    """
    return np.clip(1 - 1 / (alpha * np.maximum(rows.lengths, 1).astype(np.float64)), 0, 1)


def zero_bootstrap(sample: Sample) -> float:
    """Every sample is over where it ends."""
    return 0.0


def truncation_bootstrap(sample: Sample) -> float:
    """A sample that was cut goes on as the critic expects: its values hold one more, behind the last token."""
    if sample.finish_reason != "length":
        return 0.0
    assert sample.values is not None and len(sample.values) == len(sample.completion_ids) + 1
    return float(sample.values[-1])


def compute_gae(
    rows: TokenRows, *, estimate: GaeEstimator, lam: LambdaFn, critic_lam: LambdaFn | None
) -> TokenAdvantages:
    """GAE's advantages and the critic's targets at every token, 0 where the policy did not write it.

    Args:
        lam: of the advantages.
        critic_lam: of the targets, which are advantages + values by this lambda; None = `lam`, in the same pass.

    Sources: Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE"; Yuan et al. 2025, "What's Behind
    PPO's Collapse in Long-CoT?" (two lambdas).
    """
    credit = _estimate_advantages(rows, estimate, lam)
    return (
        credit
        if critic_lam is None
        else credit._replace(returns=_estimate_advantages(rows, estimate, critic_lam).returns)
    )


def assign_gae_advantages(
    samples: Sequence[Sample],
    *,
    gae: Callable[[TokenRows], TokenAdvantages],
    token_rewards: TokenRewardFn,
    bootstrap: BootstrapFn,
) -> list[Sample]:
    """The samples with the advantages and returns of `gae`: `gae_of_rows` with its settings."""
    row = concatenate_samples(samples, token_rewards=token_rewards, values=_token_values, bootstrap=bootstrap)
    return _assign_advantages(samples, gae(row))


def assign_vtrace_advantages(
    samples: Sequence[Sample],
    *,
    vtrace: VTraceEstimator,
    lam: LambdaFn,
    token_rewards: TokenRewardFn,
    bootstrap: BootstrapFn,
) -> list[Sample]:
    """The samples with V-trace's advantages and targets: the critic learns the values of the policy as it is now.

    However far it has moved from the one that drew the samples: by how much is in `policy_logprobs`, scored now, and
    `behavior_logprobs`. What each token weighs by that in the policy's loss is for the loss.

    Source: Espeholt et al. 2018 (IMPALA), section 4.
    """
    row = concatenate_samples(samples, token_rewards=token_rewards, values=_token_values, bootstrap=bootstrap)
    own = np.concatenate([np.zeros(0, np.float32), *map(_log_ratios, samples)])
    log_ratios = np.pad(own, (0, row.rewards.size - own.size))[None]

    def estimate(rewards: np.ndarray, values: np.ndarray, **rest: Any) -> tuple[ArrayLike, ArrayLike]:
        return vtrace(rewards, values, log_ratios, **rest)

    return _assign_advantages(samples, _estimate_advantages(row, estimate, lam))


def _log_ratios(sample: Sample) -> Float[np.ndarray, "C"]:
    assert sample.policy_logprobs is not None
    return sample.policy_logprobs - sample.behavior_logprobs


def assign_return_advantages(
    samples: Sequence[Sample], *, estimate: GaeEstimator, token_rewards: TokenRewardFn
) -> list[Sample]:
    """The samples with sum_k gamma^k r_{t+k} as return and advantage of token t: GAE at lambda 1 without a critic.

    Source: Hu 2025, "REINFORCE++".
    """
    row = concatenate_samples(samples, token_rewards=token_rewards, values=_zero_values, bootstrap=zero_bootstrap)
    return _assign_advantages(samples, _estimate_advantages(row, estimate, partial(fixed_lambda, lam=1.0)))


def concatenate_samples(
    samples: Sequence[Sample],
    *,
    token_rewards: TokenRewardFn,
    values: Callable[[Sample], np.ndarray],
    bootstrap: BootstrapFn,
) -> TokenRows:
    """`values`: a sample's value of the text before each of its tokens."""
    counts = [len(s.completion_ids) for s in samples]
    shape = (1, bucket_length(sum(counts)))
    rewards, token_values, behind = np.zeros((3, *shape), np.float32)
    mask, ends = np.zeros((2, *shape), bool)
    lengths = np.ones(shape, np.float32)
    start = 0
    for sample, count in zip(samples, counts, strict=True):
        own = (0, slice(start, start + count))
        rewards[own], token_values[own], mask[own] = token_rewards(sample), values(sample), sample.mask
        lengths[own] = sample.mask.sum()
        start += count
        if count:
            ends[0, start - 1], behind[0, start - 1] = True, bootstrap(sample)
    return TokenRows(rewards, token_values, lengths, mask, ends, behind)


def _token_values(sample: Sample) -> Float[np.ndarray, "C"]:
    return sample.token_values


def _zero_values(sample: Sample) -> Float[np.ndarray, "C"]:
    return np.zeros(len(sample.completion_ids), np.float32)


def _estimate_advantages(rows: TokenRows, estimate: GaeEstimator, lam: LambdaFn) -> TokenAdvantages:
    credit = estimate(
        rows.rewards, rows.values, lam=lam(rows), mask=rows.mask, ends=rows.ends, bootstrap=rows.bootstrap
    )
    return TokenAdvantages(*map(np.asarray, credit))


def _assign_advantages(samples: Sequence[Sample], credit: TokenAdvantages) -> list[Sample]:
    """The samples with what is theirs of a single row."""
    cuts = np.cumsum([len(s.completion_ids) for s in samples])
    parts = zip(samples, np.split(credit.advantages[0], cuts), np.split(credit.returns[0], cuts), strict=False)
    return [replace(s, advantages=a, returns=r) for s, a, r in parts]


def whiten_advantages(samples: Sequence[Sample], moments: Moments) -> list[Sample]:
    """The samples with advantages of mean 0 and variance 1 over all that `over` was taken of; returns stay as they are.

    Args:
        over: of the advantages at the tokens that the policy wrote, of all hosts.
    """
    return [replace(s, advantages=whiten(s.advantages, s.mask, moments)) for s in samples if s.advantages is not None]
