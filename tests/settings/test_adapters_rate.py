from __future__ import annotations

from pathlib import Path

from settings.checks.unused_settings import launch_notices
from tests.settings.loading import load_text

ADAPTERS = "model: {lora: {rank: 8}}"


def test_the_rate_that_suits_all_weights_is_noted_where_adapters_learn_alone(folder: Path) -> None:
    (line,) = launch_notices(load_text(folder, ADAPTERS))
    assert line == (
        "optimizer.learning_rate = 1e-06 (from the default) suits training all weights and is too low for adapters "
        "(model.lora.rank = 8 (from yaml:c.yaml:1)); 10 to 100 times that is usual"
    )
    assert launch_notices(load_text(folder, ADAPTERS, "optimizer.learning_rate=1e-6")) == ()
    assert launch_notices(load_text(folder, ADAPTERS, "model.lora.rank=0")) == ()
