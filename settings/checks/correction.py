"""What settings of the correction for older policies contradict each other."""

from __future__ import annotations

from settings.loading.resolve import Resolved


def _an_older_policy_is_corrected(resolved: Resolved) -> str | None:
    settings = resolved.settings
    if settings.rollout.max_staleness == 0 or settings.algorithm.correction != "none":
        return None
    return (
        f"{resolved.named('rollout.max_staleness')}: tokens may come from an older policy, and "
        f"{resolved.named('algorithm.correction')} takes them for the policy's own; leave algorithm.correction null, "
        "or set rollout.max_staleness: 0"
    )


def _the_mask_lets_something_pass(resolved: Resolved) -> str | None:
    algorithm = resolved.settings.algorithm
    if algorithm.correction != "mask" or algorithm.correction_min < algorithm.correction_max:
        return None
    return (
        f"{resolved.named('algorithm.correction_min')} is not below {resolved.named('algorithm.correction_max')}, so "
        "rounding alone would leave every token out; lower the one, 0.5 is usual, or raise the other, to 2.0"
    )


CORRECTION = (_an_older_policy_is_corrected, _the_mask_lets_something_pass)
