from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.report.gae_benchmark_plot import BackendTiming, render_benchmark


def timing(backend: str, chunk_size: int | None, median_s: float, p90_s: float, rows: str = "full") -> BackendTiming:
    return BackendTiming("16x8192", rows, backend, chunk_size, median_s=median_s, p90_s=p90_s)


TIMINGS = [
    timing("copy", None, 1e-3, 1e-3),
    timing("loop", None, 9e-3, 1e-2),
    timing("chunked", 64, 3e-3, 4e-3),
    replace(timing("chunked", 128, 2e-3, 3e-3), is_auto=True),
    timing("numpy", None, 1.5e-3, 2e-3),
]


def test_the_same_numbers_make_the_same_picture() -> None:
    picture = render_benchmark(TIMINGS, title="GAE")
    assert picture.startswith(b"\x89PNG")
    assert render_benchmark(TIMINGS, title="GAE") == picture


@pytest.mark.parametrize(
    ("number", "change"),
    [(0, {"median_s": 5e-4}), (1, {"median_s": 8e-3}), (2, {"p90_s": 5e-3}), (3, {"is_auto": False})],
)
def test_every_number_is_drawn(number: int, change: dict[str, Any]) -> None:
    changed = [replace(one, **change) if i == number else one for i, one in enumerate(TIMINGS)]
    assert render_benchmark(changed, title="GAE") != render_benchmark(TIMINGS, title="GAE")
