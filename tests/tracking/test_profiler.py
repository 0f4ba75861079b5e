"""Tests that `logging.profile_steps` writes traces of the selected steps and changes nothing else."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import jax
import pytest

from app.tracking.timer import StepProfiler
from tests.program import metrics_of, reproducible, train_here


def test_the_chosen_steps_leave_a_trace_and_the_metrics_are_the_same(config: Path, finished: Path) -> None:
    result = train_here(config, "logging.profile_steps=[2, 4]")
    assert result.exit_code == 0, result.stderr
    run = config.parent / "runs" / "tiny"
    assert {path.name for path in (run / "profile").iterdir()} == {"step_000002", "step_000004"}
    for folder in (run / "profile").iterdir():
        assert len(list(folder.rglob("*.xplane.pb"))) == 1
    assert reproducible(metrics_of(run)) == reproducible(metrics_of(finished))
    (trace,) = (run / "profile" / "step_000004").rglob("*.trace.json.gz")
    events = {event.get("name"): event for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"rollout", "reward", "score", "advantage", "update"} <= events.keys()
    assert events["step"]["args"]["step_num"] == "4"


def test_a_profiler_that_somebody_else_uses_is_left_to_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traces = StepProfiler([1, 2], lambda step: tmp_path / str(step))
    with jax.profiler.trace(tmp_path / "theirs"), caplog.at_level(logging.WARNING):
        for step in (1, 2):
            traces.start(step)
            traces.stop()
    (warning,) = [record.message for record in caplog.records if record.name == "app.tracking.timer"]
    assert "Only one profile may be run at a time" in warning
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
