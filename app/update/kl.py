"""Per-token estimators of KL(policy || reference) from tokens the policy drew.

With d = log policy - log reference. Source: Schulman 2020, "Approximating KL divergence".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jaxtyping import Array, Float32

Estimator = Callable[[Array, Array], Array]

DIFFERENCE_LIMIT = 20.0
"""exp(20) is 5e8: beyond it k3 says only that a token is hopeless, and overflows."""


def k1(policy_logprobs: Float32[Array, "*tokens"], reference_logprobs: Float32[Array, "*tokens"]) -> Array:
    """d: unbiased, can be negative; as a loss its expected gradient is zero."""
    return policy_logprobs - reference_logprobs


def k2(policy_logprobs: Float32[Array, "*tokens"], reference_logprobs: Float32[Array, "*tokens"]) -> Array:
    """d^2 / 2: biased, never negative; its gradient is an unbiased estimate of the KL's."""
    return 0.5 * (policy_logprobs - reference_logprobs) ** 2


def k3(policy_logprobs: Float32[Array, "*tokens"], reference_logprobs: Float32[Array, "*tokens"]) -> Array:
    """exp(-d) + d - 1: unbiased, never negative. The estimator of the GRPO paper."""
    d = jnp.clip(policy_logprobs - reference_logprobs, -DIFFERENCE_LIMIT, DIFFERENCE_LIMIT)
    return jnp.expm1(-d) + d


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})
