"""Adaptive KL coefficient: adjusts the weight of a KL penalty to keep the KL near a target."""

from __future__ import annotations

MAX_ERROR = 0.2
"""Clip bound of the relative error KL / target - 1."""


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
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return kl_coef * (1 + error * min(num_samples / horizon, 1))
