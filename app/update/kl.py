"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled.

Here d = policy logprob - reference logprob, as JAX or numpy arrays. A good estimator is not always a good penalty: on
tokens sampled by the current policy, the expected gradient of each estimator minimizes

               k1                       k2                       k3
    reward     KL(policy || reference)  biased                   KL(policy || reference) - KL(reference || policy)
    loss       zero                     KL(policy || reference)  KL(reference || policy)

The KL in the row `loss` is between distributions of the next token, the KL in the row `reward` between distributions
of whole sequences.

Sources: Schulman 2020, "Approximating KL divergence" (the estimates); Tang & Munos 2025, "On a few pitfalls in KL
divergence gradient estimation for RL" (their gradients).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxtyping import Float

from app.model.segment_layout import HostOrDevice

KLEstimator = Callable[[HostOrDevice, HostOrDevice], Any]

DIFFERENCE_LIMIT = 20.0
"""k3 clips d to +-20, so that exp(-d) cannot overflow; exp(20) is 5e8."""


def k1(policy_logprobs: Float[HostOrDevice, "*tokens"], reference_logprobs: Float[HostOrDevice, "*tokens"]) -> Any:
    """Returns d, an unbiased estimate of KL that can be negative. As a loss, its expected gradient is zero."""
    return policy_logprobs - reference_logprobs


def k2(policy_logprobs: Float[HostOrDevice, "*tokens"], reference_logprobs: Float[HostOrDevice, "*tokens"]) -> Any:
    """Returns d^2 / 2, a biased estimate of KL that is never negative; its gradient is unbiased."""
    return 0.5 * (policy_logprobs - reference_logprobs) ** 2


def k3(policy_logprobs: Float[HostOrDevice, "*tokens"], reference_logprobs: Float[HostOrDevice, "*tokens"]) -> Any:
    """Returns exp(-d) + d - 1, an unbiased estimate of KL that is never negative; used in the GRPO paper."""
    # numpy for the reward, jax.numpy for the loss: both implement the array API.
    d = policy_logprobs - reference_logprobs
    xp = d.__array_namespace__()
    d = xp.clip(d, -DIFFERENCE_LIMIT, DIFFERENCE_LIMIT)
    return xp.expm1(-d) + d


KL_ESTIMATORS: Mapping[str, KLEstimator] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})
