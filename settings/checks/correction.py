"""What settings of the correction for older policies contradict each other."""

from __future__ import annotations

from settings.loading.resolve import Resolved


def _check_staleness_correction(resolved: Resolved) -> str | None:
    settings = resolved.settings
    if settings.rollout.max_staleness == 0 or settings.algorithm.correction != "none":
        return None
    return (
        f"{resolved.describe('rollout.max_staleness')}: tokens may come from an older policy, and "
        f"{resolved.describe('algorithm.correction')} takes them for the policy's own; leave algorithm.correction "
        f"null, "
        "or set rollout.max_staleness: 0"
    )


def _check_mask_bounds(resolved: Resolved) -> str | None:
    algorithm = resolved.settings.algorithm
    if algorithm.correction != "mask" or algorithm.correction_min < algorithm.correction_max:
        return None
    return (
        f"{resolved.describe('algorithm.correction_min')} is not below "
        f"{resolved.describe('algorithm.correction_max')}, so "
        "rounding alone would leave every token out; lower the one, 0.5 is usual, or raise the other, to 2.0"
    )


CORRECTION_CHECKS = (_check_staleness_correction, _check_mask_bounds)
