"""The picture of a GAE benchmark."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from app.report.gae_benchmark_plot import BenchmarkPanel, PlottedTiming, render_benchmark

PANEL = BenchmarkPanel(
    rows=16,
    tokens=8192,
    decay="scalar",
    copy_s=1e-3,
    timings=(
        PlottedTiming("serial", None, 9e-3, 1e-2, False),
        PlottedTiming("chunked", 64, 3e-3, 4e-3, False),
        PlottedTiming("chunked", 128, 2e-3, 3e-3, True),
        PlottedTiming("fused", None, 1.5e-3, 2e-3, False),
    ),
)


def test_the_same_numbers_make_the_same_picture() -> None:
    picture = render_benchmark([PANEL], title="GAE")
    assert picture.startswith(b"\x89PNG")
    assert render_benchmark([PANEL], title="GAE") == picture


@pytest.mark.parametrize(("number", "change"), [(0, {"median_s": 8e-3}), (1, {"p90_s": 5e-3}), (3, {"p90_s": 3e-3})])
def test_every_number_is_drawn(number: int, change: dict[str, float]) -> None:
    assert image(with_speed(number, **change)) != image(PANEL)


def test_the_copy_and_what_auto_takes_are_drawn() -> None:
    assert image(replace(PANEL, copy_s=5e-4)) != image(PANEL)
    assert image(with_speed(2, is_auto=False)) != image(PANEL)
    assert image(with_speed(3, is_auto=True)) != image(PANEL)


def with_speed(number: int, **changes: Any) -> BenchmarkPanel:
    speeds = list(PANEL.timings)
    speeds[number] = speeds[number]._replace(**changes)
    return replace(PANEL, timings=tuple(speeds))


@cache
def image(panel: BenchmarkPanel) -> bytes:
    return render_benchmark([panel], title="GAE")


@pytest.mark.parametrize("speeds", [PANEL.timings[:1], PANEL.timings[1:3]])
def test_panels_may_lack_a_backend(speeds: tuple[PlottedTiming, ...]) -> None:
    panel = BenchmarkPanel(1, 9, "masked", 1e-3, speeds)
    assert render_benchmark([PANEL, panel], title="GAE").startswith(b"\x89PNG")
