"""The picture of a GAE benchmark."""

from __future__ import annotations

import pytest

from app.report.gae_picture import Speed, SpeedPanel, speed_picture

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


@pytest.mark.parametrize("speeds", [PANEL.speeds[:1], PANEL.speeds[1:3]])
def test_panels_may_lack_a_backend(speeds: tuple[Speed, ...]) -> None:
    panel = SpeedPanel(1, 9, "masked", 1e-3, speeds)
    assert speed_picture([PANEL, panel], title="GAE").startswith(b"\x89PNG")
