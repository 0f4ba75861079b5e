"""The picture of a GAE benchmark."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from app.report.gae_benchmark_plot import Speed, SpeedPanel, speed_picture

PANEL = SpeedPanel(
    rows=16,
    tokens=8192,
    decay="scalar",
    copy_s=1e-3,
    speeds=(
        Speed("serial", None, 9e-3, 1e-2, False),
        Speed("chunked", 64, 3e-3, 4e-3, False),
        Speed("chunked", 128, 2e-3, 3e-3, True),
        Speed("fused", None, 1.5e-3, 2e-3, False),
    ),
)


def test_the_same_numbers_make_the_same_picture() -> None:
    picture = speed_picture([PANEL], title="GAE")
    assert picture.startswith(b"\x89PNG")
    assert speed_picture([PANEL], title="GAE") == picture


@pytest.mark.parametrize(("number", "change"), [(0, {"median_s": 8e-3}), (1, {"p90_s": 5e-3}), (3, {"p90_s": 3e-3})])
def test_every_number_is_drawn(number: int, change: dict[str, float]) -> None:
    assert image(with_speed(number, **change)) != image(PANEL)


def test_the_copy_and_what_auto_takes_are_drawn() -> None:
    assert image(replace(PANEL, copy_s=5e-4)) != image(PANEL)
    assert image(with_speed(2, is_auto=False)) != image(PANEL)
    assert image(with_speed(3, is_auto=True)) != image(PANEL)


def with_speed(number: int, **changes: Any) -> SpeedPanel:
    speeds = list(PANEL.speeds)
    speeds[number] = speeds[number]._replace(**changes)
    return replace(PANEL, speeds=tuple(speeds))


@cache
def image(panel: SpeedPanel) -> bytes:
    return speed_picture([panel], title="GAE")


@pytest.mark.parametrize("speeds", [PANEL.speeds[:1], PANEL.speeds[1:3]])
def test_panels_may_lack_a_backend(speeds: tuple[Speed, ...]) -> None:
    panel = SpeedPanel(1, 9, "masked", 1e-3, speeds)
    assert speed_picture([PANEL, panel], title="GAE").startswith(b"\x89PNG")
