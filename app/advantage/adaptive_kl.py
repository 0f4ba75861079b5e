"""The coefficient of a KL penalty, held where the KL is near a target."""

from __future__ import annotations

MAX_ERROR = 0.2
"""A KL further from its target than this share of it moves the coefficient no faster."""


def update_kl_coef(kl_coef: float, kl: float, *, target: float, num_samples: int, horizon: int) -> float:
    """coef * (1 + clip(KL / target - 1, -0.2, 0.2) * min(num_samples / horizon, 1)): the next step's coefficient.

    Args:
        kl, target: in the same unit.
        num_samples: that `kl` was measured on.
        horizon: samples over which the coefficient changes by at most about 20 %, as it does in a step of more.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences"; its gain of 0.1 a step as
    `num_samples / horizon`, as TRL and verl have it; they do not bound it, and beyond 5 the coefficient would turn
    negative.
    """
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return kl_coef * (1 + error * min(num_samples / horizon, 1))
