"""Writes the report of a run directory: `report.html`, `rollouts.html` and `plots/`.

Pages are single files that need no network and run only their own script.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import logging
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from app.records.atomic_write import write_atomic
from app.report.alerts import find_alerts
from app.report.before_after import before_and_after, best_evaluation
from app.report.matplotlib_figures import RenderedPlot, render_panel
from app.report.metric_registry import find_metric
from app.report.metrics_history import early_stopping_reason, finite_metric, training_steps
from app.report.plots import PANELS
from app.report.run_files import RunFiles
from app.report.viewer_content import DEFAULT_NUM_SAMPLES, build_viewer
from settings.errors import InputError

log = logging.getLogger(__name__)

SESSION_COLUMNS = (
    *("started", "after_step", "grpo", "python", "jax", "devices", "processes", "from_rollouts", "checkpoint"),
)
"""Columns of the table of sessions; one that no session has is omitted."""


def write_report(path: Path, *, num_samples: int = DEFAULT_NUM_SAMPLES) -> dict[str, Any]:
    """Writes the report from the files of a run, each file atomically, and returns a summary.

    Raises:
        InputError: `path` is not a run or has no step yet, its metrics are damaged, or it cannot be written to.
    """
    log.info("writing the report of %s", path)
    run = RunFiles.read(path)
    for gap in run.gaps:
        log.warning("%s: %s", path, gap)
    viewer = build_viewer(run.rollouts, run.evaluations, num_samples=num_samples)
    alerts, steps, metric = find_alerts(run.history), training_steps(run.history), run.setting("checkpoint.best_metric")
    panels = [(panel, render_panel(panel, run.history)) for panel in PANELS]
    report = render_page(
        "report.html",
        run=run,
        last_step=steps[-1]["step"],
        early_end=early_stopping_reason(
            run.history, metric=metric, patience=run.setting("run.early_stopping.patience")
        ),
        last_metrics=[
            (name, finite_metric(steps[-1], name), entry) for name in sorted(steps[-1]) if (entry := find_metric(name))
        ],
        result=before_and_after(run.history),
        best=best_evaluation(run.history, metric),
        alerts=alerts,
        panels=panels,
        text=lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str),
        session_columns=[c for c in SESSION_COLUMNS if any(c in one for one in run.settings_history.sessions)],
    )
    script = _template("viewer.js")
    data, script_hash = json_for_html(viewer.groups), _content_hash(script)
    samples = render_page("rollouts.html", run=run, viewer=viewer, data=data, script=script, script_hash=script_hash)
    try:
        _write_plots(path / "plots", {panel.name: plot for panel, plot in panels})
        for name, page in (("report.html", report), ("rollouts.html", samples)):
            # A lone surrogate has no UTF-8 encoding; as a character reference it is shown as undecodable.
            write_atomic(path / name, page.encode("utf-8", "xmlcharrefreplace"))
    except OSError as error:
        # The error of a full disk does not name a file.
        raise InputError(
            f"{error.filename or path}: cannot be written: {error.strerror}; correct this and run grpo report again"
        ) from error
    return {
        "steps": len(steps),
        "alerts": len(alerts),
        "samples shown": viewer.num_shown,
        "damaged lines": len(viewer.damaged),
        "report": str(path / "report.html"),
        "samples": str(path / "rollouts.html"),
        "plots": str(path / "plots"),
    }


def _write_plots(folder: Path, plots: dict[str, RenderedPlot | None]) -> None:
    """Writes the plots, and deletes the old files of plots that no longer have data."""
    if folder.is_symlink():
        raise InputError(f"{folder} is a symbolic link, and reports are not written through links; remove it")
    folder.mkdir(exist_ok=True)
    for name, plot in plots.items():
        if plot is None:
            (folder / f"{name}.png").unlink(missing_ok=True)
        else:
            write_atomic(folder / f"{name}.png", plot.png)


def json_for_html(value: Any) -> str:
    """Returns JSON for a script element, escaped so that it cannot end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def render_page(name: str, **values: Any) -> str:
    """Renders the page `name` from its template, with `values` as the template's variables."""
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
