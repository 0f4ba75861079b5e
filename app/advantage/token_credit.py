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

from app.advantage.token_rewards import TokenRewards
from app.batching.ladder import rung
from app.flow import Sample
from app.masked import Moments, whiten


class TokenRow(NamedTuple):
    """Samples one behind the other, then padding: tokens of no sequence that nobody wrote."""

    rewards: Float32[np.ndarray, "1 T"]
    values: Float32[np.ndarray, "1 T"]
    bootstrap: Float32[np.ndarray, "1 T"]
    """Behind a sample's last token: the critic's value where it goes on, 0 where it is over."""
    mask: Bool[np.ndarray, "1 T"]
    """True where the policy wrote the token."""
    ends: Bool[np.ndarray, "1 T"]
    """True on the last token of a sample."""
    lengths: Float32[np.ndarray, "1 T"]
    """How many tokens the policy wrote of the sample that the token belongs to; 1 in the padding."""


class Estimate(Protocol):
    """`generalized_advantages` of app.advantage.gae with its settings, but for lambda."""

    def __call__(
        self,
        rewards: np.ndarray,
        values: np.ndarray,
        *,
        lam: ArrayLike,
        mask: np.ndarray,
        ends: np.ndarray,
        bootstrap: np.ndarray,
    ) -> tuple[ArrayLike, ArrayLike]: ...


Correct = Callable[..., tuple[ArrayLike, ArrayLike]]
"""`vtrace` of app.advantage with its settings: as `Estimate`, with log ratios behind the values."""

Lambda = Callable[[TokenRow], ArrayLike]
"""A row -> GAE's lambda: one number, or one at each token."""
Bootstrap = Callable[[Sample], float]
"""A sample -> the value behind its last token."""


def fixed_lam(row: TokenRow, *, lam: float) -> ArrayLike:
    """The same for every token."""
    return lam


def length_adaptive_lam(row: TokenRow, *, alpha: float) -> Float64[np.ndarray, "1 T"]:
    """That of each token's sample; see `adaptive_lam`."""
    return adaptive_lam(row.lengths, alpha=alpha)


def adaptive_lam(lengths: Float32[np.ndarray, "*shape"], *, alpha: float) -> Float64[np.ndarray, "*shape"]:
    """1 - 1 / (alpha * l), at least 0, with l the tokens that the policy wrote of the sample.

    The weights of the TD errors then sum to alpha * l: a long sample's reward reaches its beginning, too.

    Source: Yue et al. 2025, "VAPO" (length-adaptive GAE).
    """
    return np.clip(1 - 1 / (alpha * np.maximum(lengths, 1).astype(np.float64)), 0, 1)


def terminal(sample: Sample) -> float:
    """Every sample is over where it ends."""
    return 0.0


def bootstrapped_if_truncated(sample: Sample) -> float:
    """A sample that was cut goes on as the critic expects: its values hold one more, behind the last token."""
    if sample.finish_reason != "length":
        return 0.0
    assert sample.values is not None and len(sample.values) == len(sample.completion_ids) + 1
    return float(sample.values[-1])


def credit_by_gae(
    samples: Sequence[Sample],
    *,
    estimate: Estimate,
    lam: Lambda,
    critic_lam: Lambda | None,
    token_rewards: TokenRewards,
    bootstrap: Bootstrap,
) -> list[Sample]:
    """The samples with GAE's advantages and the critic's targets at every token, 0 where the policy did not write it.

    Args:
        lam: of the advantages.
        critic_lam: of the targets, which are advantages + values by this lambda; None = `lam`, in the same pass.

    Sources: Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE"; Yuan et al. 2025, "What's Behind
    PPO's Collapse in Long-CoT?" (two lambdas).
    """
    row = token_row(samples, token_rewards=token_rewards, values=_token_values, bootstrap=bootstrap)
    advantages, returns = _estimated(row, estimate, lam)
    if critic_lam is not None:
        _, returns = _estimated(row, estimate, critic_lam)
    return _credited(samples, advantages, returns)


def credit_by_vtrace(
    samples: Sequence[Sample], *, correct: Correct, lam: Lambda, token_rewards: TokenRewards, bootstrap: Bootstrap
) -> list[Sample]:
    """The samples with V-trace's advantages and targets: the critic learns the values of the policy as it is now.

    However far it has moved from the one that drew the samples: by how much is in `policy_logprobs`, scored now, and
    `behavior_logprobs`.

    Source: Espeholt et al. 2018 (IMPALA), section 4.
    """
    row = token_row(samples, token_rewards=token_rewards, values=_token_values, bootstrap=bootstrap)
    own = np.concatenate([np.zeros(0, np.float32), *map(_log_ratios, samples)])
    log_ratios = np.pad(own, (0, row.rewards.size - own.size))[None]

    def estimate(rewards: np.ndarray, values: np.ndarray, **rest: Any) -> tuple[ArrayLike, ArrayLike]:
        return correct(rewards, values, log_ratios, **rest)

    return _credited(samples, *_estimated(row, estimate, lam))


def _log_ratios(sample: Sample) -> Float[np.ndarray, "C"]:
    assert sample.policy_logprobs is not None
    return sample.policy_logprobs - sample.behavior_logprobs


def credit_by_return(samples: Sequence[Sample], *, estimate: Estimate, token_rewards: TokenRewards) -> list[Sample]:
    """The samples with sum_k gamma^k r_{t+k} as return and advantage of token t: GAE at lambda 1 without a critic.

    Source: Hu 2025, "REINFORCE++".
    """
    row = token_row(samples, token_rewards=token_rewards, values=_no_values, bootstrap=terminal)
    return _credited(samples, *_estimated(row, estimate, partial(fixed_lam, lam=1.0)))


def token_row(
    samples: Sequence[Sample],
    *,
    token_rewards: TokenRewards,
    values: Callable[[Sample], np.ndarray],
    bootstrap: Bootstrap,
) -> TokenRow:
    """`values`: a sample's value of the text before each of its tokens."""
    counts = [len(s.completion_ids) for s in samples]
    row = _empty_row(rung(sum(counts)))
    start = 0
    for sample, count in zip(samples, counts, strict=True):
        own = (0, slice(start, start + count))
        row.rewards[own], row.values[own], row.mask[own] = token_rewards(sample), values(sample), sample.mask
        row.lengths[own] = sample.mask.sum()
        start += count
        if count:
            row.ends[0, start - 1], row.bootstrap[0, start - 1] = True, bootstrap(sample)
    return row


def _empty_row(length: int) -> TokenRow:
    def zeros(dtype: type) -> np.ndarray:
        return np.zeros((1, length), dtype)

    ones = np.ones((1, length), np.float32)
    return TokenRow(zeros(np.float32), zeros(np.float32), zeros(np.float32), zeros(bool), zeros(bool), ones)


def _token_values(sample: Sample) -> Float[np.ndarray, "C"]:
    return sample.token_values


def _no_values(sample: Sample) -> Float[np.ndarray, "C"]:
    return np.zeros(len(sample.completion_ids), np.float32)


def _estimated(row: TokenRow, estimate: Estimate, lam: Lambda) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns, [T]."""
    credit = estimate(row.rewards, row.values, lam=lam(row), mask=row.mask, ends=row.ends, bootstrap=row.bootstrap)
    advantages, returns = (np.asarray(part)[0] for part in credit)
    return advantages, returns


def _credited(samples: Sequence[Sample], advantages: np.ndarray, returns: np.ndarray) -> list[Sample]:
    cuts = np.cumsum([len(s.completion_ids) for s in samples])
    parts = zip(samples, np.split(advantages, cuts), np.split(returns, cuts), strict=False)
    return [replace(s, advantages=a, returns=r) for s, a, r in parts]


def whitened(samples: Sequence[Sample], over: Moments) -> list[Sample]:
    """The samples with advantages of mean 0 and variance 1 over all that `over` was taken of; returns stay as they are.

    Args:
        over: of the advantages at the tokens that the policy wrote, of all hosts.
    """
    return [replace(s, advantages=whiten(s.advantages, s.mask, over)) for s in samples if s.advantages is not None]
