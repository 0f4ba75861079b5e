"""The timings of the GAE benchmark, and their plot: time over chunk size, compared with the time of a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.report.matplotlib_figures import new_figure, save_figure
from app.report.plots import BLUE, GREEN, GREY, ORANGE

COLORS = {"copy": GREY, "chunked": BLUE, "numpy": GREEN, "loop": ORANGE}
ROW_NAMES = {"full": "full rows", "masked": "a mask", "packed": "packed samples"}


@dataclass(frozen=True)
class BackendTiming:
    """Timing of one backend on one shape; all times but `first_call_s` are of warm calls."""

    shape: str
    rows: str
    """One of `ROW_NAMES`."""
    backend: str
    """A GAE backend; `loop`, over time in numpy; or `copy`: a pass that reads two matrices and writes two."""
    chunk_size: int | None = None
    """Tokens per chunk; None if the backend has no chunks."""
    is_auto: bool = False
    first_call_s: float = 0.0
    """Time of tracing and compiling."""
    max_error: float | None = None
    """Largest error of advantages and returns against float64, over max(1, max |A|)."""
    median_s: float = 0.0
    p90_s: float = 0.0
    gb_per_s: float = 0.0
    percent_of_copy: float = 100.0
    """Throughput relative to the copy of the same shape; 100 = as fast."""

    @property
    def name(self) -> str:
        return self.backend if self.chunk_size is None else f"{self.backend} in chunks of {self.chunk_size}"


def render_benchmark(timings: Sequence[BackendTiming], *, title: str) -> bytes:
    """Returns a PNG with one panel per shape and kind of rows; equal timings give equal bytes."""
    panels = list(dict.fromkeys((t.shape, t.rows) for t in timings))
    with new_figure(max(6.0, 3.6 * len(panels)), 3.8) as figure:
        for axes, (shape, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            for backend, color in COLORS.items():
                shown = [t for t in timings if (t.shape, t.rows, t.backend) == (shape, rows, backend)]
                label = f"{backend} (auto)" if any(t.is_auto for t in shown) else backend
                medians, p90s = [1e3 * t.median_s for t in shown], [1e3 * t.p90_s for t in shown]
                if backend == "chunked":
                    sizes = [t.chunk_size or 0 for t in shown]
                    axes.plot(sizes, medians, color=color, marker="o", markersize=4, label=label)
                    axes.fill_between(sizes, medians, p90s, color=color, alpha=0.15, linewidth=0)
                    axes.set_xticks(sizes, [str(size) for size in sizes])
                else:
                    axes.axhline(medians[0], color=color, linestyle="--" if backend == "copy" else "-", label=label)
                    axes.axhspan(medians[0], p90s[0], color=color, alpha=0.15, linewidth=0)
            axes.set_title(f"{shape}, {ROW_NAMES[rows]}", fontsize=9, loc="left")
            axes.set_xlabel("chunk size, tokens")
            axes.set_ylabel("milliseconds")
            axes.legend(frameon=False, fontsize=7)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        return save_figure(figure, "png")
