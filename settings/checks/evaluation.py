"""What must hold between the settings of evaluations."""

from __future__ import annotations

from settings.loading.resolve import Resolved


def evaluated_samples_differ(resolved: Resolved) -> str | None:
    if resolved.settings.eval.num_samples == 1 or resolved.settings.eval.temperature > 0:
        return None
    return (
        f"{resolved.named('eval.num_samples')}: {resolved.named('eval.temperature')} is greedy, and greedy samples of "
        "a prompt are all alike; set eval.temperature above 0, 1.0 is usual, or eval.num_samples to 1"
    )


def _samples_of_a_run_differ(resolved: Resolved) -> str | None:
    return evaluated_samples_differ(resolved) if resolved.settings.eval.every_steps else None


def _the_best_is_measured(resolved: Resolved) -> str | None:
    settings = resolved.settings
    if settings.checkpoint.best_metric is None or settings.eval.every_steps > 0:
        return None
    return (
        f"{resolved.named('checkpoint.best_metric')}: {resolved.named('eval.every_steps')} means no evaluation, so "
        "it is never measured; set it to null, or eval.every_steps to 1 or more"
    )


EVALUATED = (_samples_of_a_run_differ, _the_best_is_measured)
"""Of a run, which may have no evaluation at all."""
