"""Checkpoints whose moments have another type, or are in another memory, than those of the run that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from app.checkpoint.checkpoints import Checkpoints
from app.checkpoint.retention import LatestAndBestPolicy
from app.checkpoint.saved_policy import PolicyCheckpoint
from app.checkpoint.train_progress import NetworkStates
from app.mesh.placement import HOST_MEMORY, abstract_arrays
from tests.checkpoints import SHAPES, make_state, of_this_run, progress, shardings, steps_in

Layout = tuple[str, str]
"""Type and kind of memory of the moments."""
HERE, ROUNDED, AWAY, ROUNDED_AWAY = (
    (dtype, kind) for kind in ("device", HOST_MEMORY) for dtype in ("float32", "bfloat16")
)


def laid_out(state: Any, layout: Layout) -> Any:
    """Returns the shapes of a state with its moments laid out."""

    def moment(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, layout[0], sharding=x.sharding.with_memory_kind(layout[1]))

    moments = {name: jax.tree.map(moment, optax.tree.get(state, name)) for name in ("mu", "nu")}
    return optax.tree.set(state, **moments)


def target(layout: Layout, num_devices: int = 2) -> NetworkStates:
    return {"policy": laid_out(abstract_arrays(SHAPES, shardings(num_devices))["policy"], layout)}


def state_of(step: int, layout: Layout, num_devices: int = 2) -> NetworkStates:
    return jax.tree.map(
        lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding),
        make_state(step, num_devices),
        target(layout, num_devices),
    )


def opened(folder: Path, layout: Layout) -> Checkpoints:
    shapes = target(layout)
    of_shapes = jax.tree.map(lambda x: x.sharding, shapes)
    return Checkpoints(folder, policy=LatestAndBestPolicy(3), shapes=shapes, shardings=of_shapes)


def assert_converted(found: NetworkStates, layouts: tuple[Layout, Layout]) -> None:
    """Asserts that a state was saved in the first layout, and is now in the second."""
    saved, wanted = state_of(2, layouts[0]), target(layouts[1])
    for x, before, like in zip(*map(jax.tree.leaves, (found, saved, wanted)), strict=True):
        assert (x.dtype, x.sharding) == (like.dtype, like.sharding)
        np.testing.assert_array_equal(x, np.asarray(before).astype(like.dtype))


LAYOUTS = [(HERE, ROUNDED), (HERE, AWAY), (ROUNDED_AWAY, HERE)]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_moments_in_another_type_or_memory_are_converted_and_nothing_counts_as_damaged(
    tmp_path: Path, layouts: tuple[Layout, Layout], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    writing = opened(folder, layouts[0])
    for step in (1, 2):
        writing.save(state_of(step, layouts[0]), progress(step))
    writing.finish()
    writing.close()
    reading = opened(folder, layouts[1])
    found = reading.restore(of_this_run)
    assert found is not None
    assert_converted(found[0], layouts)
    # The run goes on in its own types.
    reading.save(state_of(3, layouts[1]), progress(3))
    reading.finish()
    reading.close()
    assert steps_in(folder) == {"1", "2", "3"} and "damaged" not in caplog.text
    shapes = target(layouts[1])
    of_shapes = jax.tree.map(lambda x: x.sharding, shapes)
    assert_converted(PolicyCheckpoint.open(folder / "2").restore_states(shapes, of_shapes), layouts)
