"""Decides from the evaluations of a run whether it ends before its last step."""

from __future__ import annotations

from app.report.metrics_history import LOWER_IS_BETTER, History, finite_metric


def early_stopping_reason(history: History, *, metric: str | None, patience: int | None) -> str | None:
    """Returns why a run ends after the last line of its metrics, or None if it goes on.

    It ends if the last `patience` evaluations are not better than the best one before them. Before the first step it
    never ends. An evaluation without a finite value is not better. The result depends on nothing else, so that it is
    the same after a resume.

    Source: Keras, `EarlyStopping`; transformers, `EarlyStoppingCallback`.
    """
    if patience is None or metric is None or not history or not history[-1]["step"] or metric not in history[-1]:
        return None
    sign = -1 if metric in LOWER_IS_BETTER else 1
    values = [finite_metric(record, metric) for record in history if metric in record]
    best, num_stale = None, 0
    for value in values:
        is_better = value is not None and (best is None or sign * (value - best) > 0)
        best, num_stale = (value, 0) if is_better else (best, num_stale + 1)
    if num_stale >= patience:
        shown = "it has had no value" if best is None else f"its best value is {best:g}"
        return f"{metric} has not improved in {num_stale} evaluations (run.early_stopping.patience); {shown}"
    return None
