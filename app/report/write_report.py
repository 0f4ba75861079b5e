"""Writes the report of a run directory: `report.html`, `rollouts.html` and `plots/`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.records.atomic_write import write_atomic
from app.report.alerts import find_alerts
from app.report.html_pages import report_page, rollouts_page
from app.report.matplotlib_figures import RenderedPlot, render_panel
from app.report.metrics_history import training_steps
from app.report.panels import PANELS
from app.report.plots import PlotData
from app.report.run_files import RunFiles
from app.report.viewer_content import DEFAULT_NUM_SAMPLES, build_viewer
from settings.errors import InputError

log = logging.getLogger(__name__)


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
    alerts = find_alerts(run.history)
    data = PlotData(run.history)
    drawn = {panel.name: render_panel(panel, data) for panel in PANELS}
    pages = {"report.html": report_page(run, drawn, alerts), "rollouts.html": rollouts_page(run, viewer)}
    try:
        _write_plots(path / "plots", drawn)
        for name, page in pages.items():
            # A lone surrogate has no UTF-8; as a character reference it is shown as undecodable.
            write_atomic(path / name, page.encode("utf-8", "xmlcharrefreplace"))
    except OSError as error:
        # The error of a full disk names no file.
        raise InputError(f"{error.filename or path}: cannot be written: {error.strerror}") from error
    return {
        "steps": len(training_steps(run.history)),
        "alerts": len(alerts),
        "samples shown": viewer.num_shown,
        "damaged lines": len(viewer.damaged),
        "report": str(path / "report.html"),
        "samples": str(path / "rollouts.html"),
        "plots": str(path / "plots"),
    }


def _write_plots(folder: Path, plots: Mapping[str, RenderedPlot | None]) -> None:
    """Writes the plots, and removes those without data, as after a resume from an earlier step."""
    if folder.is_symlink():
        raise InputError(f"{folder} is a symbolic link, which a report does not write through; remove it")
    folder.mkdir(exist_ok=True)
    for name, plot in plots.items():
        if plot is None:
            (folder / f"{name}.png").unlink(missing_ok=True)
        else:
            write_atomic(folder / f"{name}.png", plot.png)
