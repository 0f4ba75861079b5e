"""What must hold between the settings of evaluations."""

from __future__ import annotations

from settings.loading.resolve import Resolved


def check_evaluation_temperature(resolved: Resolved) -> str | None:
    if resolved.settings.eval.num_samples == 1 or resolved.settings.eval.temperature > 0:
        return None
    return (
        f"{resolved.describe('eval.num_samples')}: {resolved.describe('eval.temperature')} is greedy, and greedy "
        f"samples of "
        "a prompt are all alike; set eval.temperature above 0, 1.0 is usual, or eval.num_samples to 1"
    )


def _check_training_evaluation(resolved: Resolved) -> str | None:
    return check_evaluation_temperature(resolved) if resolved.settings.eval.every_steps else None


def _check_best_metric(resolved: Resolved) -> str | None:
    settings = resolved.settings
    if settings.checkpoint.best_metric is None or settings.eval.every_steps > 0:
        return None
    return (
        f"{resolved.describe('checkpoint.best_metric')}: {resolved.describe('eval.every_steps')} means no evaluation, "
        f"so "
        "it is never measured; set it to null, or eval.every_steps to 1 or more"
    )


EVALUATION_CHECKS = (_check_training_evaluation, _check_best_metric)
"""Of a run, which may have no evaluation at all."""
