"""Adaptive coefficient of a KL penalty, which keeps the KL near a target."""

from __future__ import annotations

MAX_ERROR = 0.2
"""Largest relative error of the KL that counts; a larger one changes the coefficient no faster."""


def update_kl_coef(kl_coef: float, kl: float, *, target: float, num_samples: int, horizon: int) -> float:
    """Returns the next coefficient, coef * (1 + clip(KL / target - 1, -0.2, 0.2) * min(num_samples / horizon, 1)).

    Args:
        kl, target: in the same unit.
        num_samples: number of samples that `kl` was measured on.
        horizon: number of samples over which the coefficient changes by at most about 20 %.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences"; its gain of 0.1 a step as
    `num_samples / horizon`, as in TRL and verl; they do not bound it, and beyond 5 the coefficient would become
    negative.
    """
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return kl_coef * (1 + error * min(num_samples / horizon, 1))
