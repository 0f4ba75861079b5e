"""Rewards per token: the sample's reward on the policy's last token, and a KL penalty on every token of the policy.

The penalty may be applied to the advantages instead, and its coefficient may adapt to a target KL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float64

from app.records.moments import Moments, joint_moments
from app.records.sample import Sample

MAX_KL_ERROR = 0.2
"""Clip bound of the relative error KL / target - 1."""

TokenRewardFn = Callable[[Sample], Float64[np.ndarray, "C"]]
"""Returns the reward of each token of a sample; 0 on tokens that the policy did not write."""
TokenKLFn = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Estimates the KL per token from the logprobs of the policy and of the reference model."""


def task_token_rewards(sample: Sample) -> Float64[np.ndarray, "C"]:
    """Returns the sample's `token_rewards` if set, else its reward on the last token that the policy wrote.

    A reward on a masked last token (a tool's output) would be skipped, or decay before it reached a policy token.
    """
    if sample.token_rewards is not None:
        return sample.token_rewards.astype(np.float64)
    assert sample.reward is not None
    rewards = np.zeros(len(sample.completion_ids))
    rewards[sample.turn_places[-1:]] = sample.reward
    return rewards


def kl_penalized_token_rewards(sample: Sample, *, kl_estimator: TokenKLFn, kl_coef: float) -> Float64[np.ndarray, "C"]:
    """Computes r_t - kl_coef * KL_t(policy || reference) on the tokens that the policy wrote.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", equation 2 (with k1).
    """
    return task_token_rewards(sample) - kl_coef * token_kl(sample, kl_estimator)


def token_kl(sample: Sample, kl_estimator: TokenKLFn) -> Float64[np.ndarray, "C"]:
    """Estimates the KL at each token from the logprobs at the start of the step; 0 on masked tokens."""
    policy, reference = sample.policy_logprobs, sample.reference_logprobs
    assert policy is not None and reference is not None
    kl = np.zeros(len(sample.completion_ids))
    kl[sample.mask] = kl_estimator(policy[sample.mask].astype(np.float64), reference[sample.mask].astype(np.float64))
    return kl


def kl_penalized_advantages(sample: Sample, *, kl_estimator: TokenKLFn, kl_coef: float) -> Sample:
    """Returns the sample with A_t - kl_coef * KL_t(policy || reference) on the tokens that the policy wrote.

    With k1 and on-policy samples, the expected gradient of the penalty is the gradient of each token's KL given its
    prefix; a token's effect on the KL of later tokens is ignored, as with a discount of 0.

    Source: Lu 2025, "On-Policy Distillation" (Thinking Machines Lab).
    """
    assert sample.advantages is not None
    penalized = sample.advantages - kl_coef * token_kl(sample, kl_estimator)
    return replace(sample, advantages=penalized.astype(np.float32))


def kl_moments(samples: Sequence[Sample], kl_estimator: TokenKLFn) -> Moments:
    """Computes the moments of the KL over the tokens that the policy wrote, for this host's samples."""
    return joint_moments([(token_kl(s, kl_estimator), s.mask) for s in samples])


def update_kl_coef(kl_coef: float, kl: float, *, target: float, num_samples: int, horizon: int) -> float:
    """Returns the next coefficient, coef * (1 + clip(KL / target - 1, -0.2, 0.2) * min(num_samples / horizon, 1)).

    Args:
        kl, target: measured and desired KL, in the same unit.
        num_samples: number of samples used to measure `kl`.
        horizon: number of samples over which the coefficient changes by at most about 20 %.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences". As in TRL and verl, its gain of
    0.1 per step is replaced by `num_samples / horizon`. Here this ratio is at most 1: above 5, the coefficient could
    become negative.
    """
    error = min(max(kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    return kl_coef * (1 + error * min(num_samples / horizon, 1))
