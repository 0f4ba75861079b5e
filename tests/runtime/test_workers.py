"""Tests that workers are what `rollout.workers` says."""

from __future__ import annotations

import pytest

from app.mesh import jax_startup
from app.runtime.model_spec import read_model_spec
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from settings import load

UNEQUAL = (
    *("data.max_prompt_length=16", "rollout.max_new_tokens=48", "model.dtype=float32", "mesh.shape='8,1,1'"),
    "rollout.scheduler=pdsr_v2",
    *("rollout.workers.fast.slots=24", "rollout.workers.fast.max_length=32", "rollout.workers.heavy.slots=16"),
)


@pytest.mark.parametrize(("mode", "rows_together"), [("exact", 8), ("fast", None)])
@pytest.mark.parametrize("ray", ["null", "local"])
def test_fast_workers_may_have_many_slots_for_short_rows(ray: str, mode: str, rows_together: int | None) -> None:
    if ray == "local":
        pytest.importorskip("ray")
    settings = load(None, [*UNEQUAL, f"rollout.mode={mode}", f"rollout.ray.address={ray}"], {}).settings
    jax_startup.initialize_distributed(settings.mesh)
    session = Session.open(ScoringSession.open(settings, read_model_spec(settings)))
    assert session.workers is not None
    fast, heavy = (worker.engine for worker in session.workers.workers)
    assert (fast.shapes.num_slots, fast.shapes.max_row_length) == (24, 32)
    assert (heavy.shapes.num_slots, heavy.shapes.max_row_length) == (16, 64)
    assert {engine.shapes.rows_together for engine in (fast, heavy)} == {rows_together}
    assert [engine.programs.table_width for engine in (fast, heavy)] == ([4, 4] if rows_together else [2, 4])
    assert session.workers.engine is heavy, "its cache is larger, for all its fewer slots"
    assert heavy.batch_shape.cache_length == 64 and fast.batch_shape.cache_length == 32
