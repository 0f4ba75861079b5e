"""Pages of a run, and of a timeline: one file each, which needs no network and runs no script but its own."""

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
from app.report.before_after import before_and_after
from app.report.metrics_history import training_steps
from app.report.panels import PANELS
from app.report.render import RenderedPlot
from app.report.rollout_viewer import ViewerContent
from app.report.run_files import RunFiles

SESSION_COLUMNS = ("started", "after_step", "grpo", "python", "jax", "devices", "processes")
REPLAY_COLUMNS = ("from_rollouts", "checkpoint")
"""Of starts that learned from saved samples; left out where there are none."""


def report_page(run: RunFiles, plots: Mapping[str, RenderedPlot | None], alerts: Sequence[Alert]) -> str:
    """`report.html`: before -> after, alerts, plots, settings, versions."""
    return _render(
        "report.html",
        run=run,
        last_step=training_steps(run.history)[-1]["step"],
        result=before_and_after(run.history),
        alerts=alerts,
        panels=[(panel, plots[panel.name]) for panel in PANELS],
        chosen=[
            (s.name, _format_value(s.value), _format_value(s.default), s.origin) for s in run.non_default_settings()
        ],
        session_columns=(*SESSION_COLUMNS, *(c for c in REPLAY_COLUMNS if any(c in one for one in run.sessions))),
    )


def rollouts_page(run: RunFiles, viewer: ViewerContent) -> str:
    """`rollouts.html`: the viewer of saved samples."""
    script = _template("viewer.js")
    return _render(
        "rollouts.html",
        run=run,
        viewer=viewer,
        data=json_for_html(viewer.groups),
        script=script,
        script_hash=_content_hash(script),
    )


def timeline_page(svg: str, table: Sequence[Sequence[str]], *, title: str) -> str:
    """The picture of a schedule, as an SVG element, over its figures.

    Args:
        table: headings first.
    """
    return _render("timeline.html", picture=svg, table=table, title=title)


def json_for_html(value: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element or open a comment."""
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
        autoescape=True,  # `| safe` stands only after what this room made itself
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _template(name: str) -> str:
    return (files("app.report") / "templates" / name).read_text(encoding="utf-8")


def _content_hash(text: str) -> str:
    """What a Content-Security-Policy names an inline element by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
