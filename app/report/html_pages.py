"""HTML pages of a run and of a timeline: single files that need no network and run only their own script."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from app.report.alerts import Alert
from app.report.before_after import before_and_after, best_evaluation
from app.report.early_stopping import early_stopping_reason
from app.report.matplotlib_figures import RenderedPlot
from app.report.metric_registry import find_metric
from app.report.metrics_history import finite_metric, training_steps
from app.report.panels import PANELS
from app.report.run_files import RunFiles
from app.report.viewer_content import ViewerContent

SESSION_COLUMNS = (
    *("started", "after_step", "grpo", "python", "jax", "devices", "processes", "from_rollouts", "checkpoint"),
)
"""Columns of the table of sessions; one that no session has is omitted."""


def report_page(run: RunFiles, plots: Mapping[str, RenderedPlot | None], alerts: Sequence[Alert]) -> str:
    """Renders `report.html`: results, alerts, plots, settings and versions."""
    last = training_steps(run.history)[-1]
    metric, patience = run.setting("checkpoint.best_metric"), run.setting("run.early_stopping.patience")
    return _render(
        "report.html",
        run=run,
        last_step=last["step"],
        early_end=early_stopping_reason(run.history, metric=metric, patience=patience),
        last_metrics=[
            (name, finite_metric(last, name), find_metric(name)) for name in sorted(last) if find_metric(name)
        ],
        result=before_and_after(run.history),
        best=best_evaluation(run.history, metric),
        alerts=alerts,
        panels=[(panel, plots[panel.name]) for panel in PANELS],
        text=_text_or_json,
        session_columns=[c for c in SESSION_COLUMNS if any(c in one for one in run.settings_history.sessions)],
    )


def rollouts_page(run: RunFiles, viewer: ViewerContent) -> str:
    """Renders `rollouts.html`: the viewer of saved samples."""
    script = _template("viewer.js")
    return _render(
        "rollouts.html",
        run=run,
        viewer=viewer,
        data=json_for_html(viewer.groups),
        script=script,
        script_hash=_content_hash(script),
    )


def timeline_page(svg: str, *, title: str) -> str:
    """Renders the page of a timeline, whose plot is an SVG element."""
    return _render("timeline.html", picture=svg, title=title)


def json_for_html(value: Any) -> str:
    """Returns JSON for a script element, escaped so that it cannot end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _render(name: str, **values: Any) -> str:
    style = _template("style.css")
    return _environment().get_template(name).render(style=style, style_hash=_content_hash(style), **values)


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("app.report"),
        autoescape=True,  # `| safe` is used only for what this package generates
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _template(name: str) -> str:
    return (files("app.report") / "templates" / name).read_text(encoding="utf-8")


def _content_hash(text: str) -> str:
    """Returns the hash with which a Content-Security-Policy allows an inline element."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
