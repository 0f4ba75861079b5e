"""Tests that checkpoints are restored bit for bit, and that the newest and the best are kept."""

import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from app.checkpoint.checkpoints import Checkpoints
from app.checkpoint.retention import LatestAndBestPolicy
from app.checkpoint.saved_arrays import checksums
from app.checkpoint.saved_policy import PolicyCheckpoint
from app.checkpoint.train_progress import NetworkStates
from app.mesh.placement import HOST_MEMORY, abstract_arrays
from tests.checkpoints import (
    SHAPES,
    assert_same,
    make_state,
    of_this_run,
    opened,
    progress,
    restored,
    shardings,
    steps_in,
    write,
    write_evaluated,
)


def test_newest_checkpoints_are_kept_and_restored_bit_for_bit_on_another_mesh(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 4, keep=2, num_devices=4)
    assert steps_in(tmp_path) == {"2", "4"}
    checkpoints = opened(tmp_path, num_devices=2)
    state, where = restored(checkpoints)
    assert_same(state, make_state(4))
    assert where == progress(4)
    assert len(state["policy"].params["kernel"].sharding.device_set) == 2
    checkpoints.close()


def test_the_best_link_always_points_to_a_complete_checkpoint(tmp_path: Path) -> None:
    checkpoints, named = opened(tmp_path, keep=1, best="eval/accuracy"), []
    assert checkpoints.restore(of_this_run) is None
    for step in range(1, 6):
        checkpoints.save(make_state(step), progress(step, step / 10))
        named += [os.readlink(tmp_path / "best")] if step > 1 else []
        assert step == 1 or (tmp_path / "best" / "state").is_dir()
    assert named == ["1", "2", "3", "4"], "the one that is being written is not yet the best on disk"
    checkpoints.finish()
    assert os.readlink(tmp_path / "best") == "5"
    assert steps_in(tmp_path) == {"5", "best"}, "the last best goes with the end of the run"
    checkpoints.close()


def test_resume_remembers_the_best_checkpoint_and_continues_from_the_newest(tmp_path: Path) -> None:
    write_evaluated(tmp_path, {1: 0.2, 2: 0.7, 3: 0.1, 4: 0.3})
    assert steps_in(tmp_path) == {"2", "4", "best"}
    (tmp_path / "best").unlink()
    checkpoints = opened(tmp_path, keep=1, best="eval/accuracy")
    state, where = restored(checkpoints)
    assert where == progress(4, 0.3)
    assert_same(state, make_state(4))
    assert checkpoints.best == (2, "eval/accuracy", 0.7)
    assert os.readlink(tmp_path / "best") == "2"
    assert not checkpoints.is_best(progress(5, 0.7)) and not checkpoints.is_best(progress(5))
    assert checkpoints.is_best(progress(5, 0.71))
    checkpoints.save(make_state(5), progress(5, 0.7))
    checkpoints.finish()
    assert steps_in(tmp_path) == {"2", "5", "best"}
    checkpoints.close()


def test_a_kill_during_a_save_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    running = opened(tmp_path / "run", keep=1, best="eval/accuracy")
    running.save(make_state(1), progress(1, 0.5))
    running.save(make_state(2), progress(2, 0.6))
    # This is what a kill would leave now, whether or not the second checkpoint is complete.
    unfinished = shutil.ignore_patterns("*.orbax-checkpoint-tmp")
    killed = shutil.copytree(tmp_path / "run", tmp_path / "killed", symlinks=True, ignore=unfinished)
    assert os.readlink(killed / "best") == "1"
    running.finish()
    running.close()
    checkpoints = opened(killed, keep=1, best="eval/accuracy")
    restored(checkpoints)
    assert checkpoints.best is not None and checkpoints.best[0] in (1, 2)
    assert os.readlink(killed / "best") == str(checkpoints.best[0])
    checkpoints.close()


def test_the_best_link_is_removed_without_a_best_metric(tmp_path: Path) -> None:
    write_evaluated(tmp_path, {1: 0.9, 2: 0.5})
    checkpoints = opened(tmp_path, keep=1)
    restored(checkpoints)
    assert checkpoints.best is None
    checkpoints.save(make_state(3), progress(3, 1.0))
    checkpoints.finish()
    assert steps_in(tmp_path) == {"3"}
    checkpoints.close()


def test_checksums_depend_on_every_array_but_not_on_the_mesh() -> None:
    state = make_state(1)
    expected = checksums(state)
    assert checksums(make_state(1, num_devices=8)) == expected
    assert {"policy/params/kernel", "policy/optimizer/0/mu/kernel", "policy/num_updates"} < expected.keys()
    leaves, tree = jax.tree.flatten(state)
    for i, (name, leaf) in enumerate(zip(checksums(state), leaves, strict=True)):
        changed = jax.tree.unflatten(tree, [*leaves[:i], leaf.at[(0,) * leaf.ndim].add(1), *leaves[i + 1 :]])
        found = checksums(changed)
        assert {path for path, value in found.items() if value != expected[path]} == {name}


def target(dtype: str, kind: str) -> NetworkStates:
    """Returns the shapes of a state on two devices whose moments have this dtype and memory kind."""
    state = abstract_arrays(SHAPES, shardings(2))["policy"]

    def moment(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding.with_memory_kind(kind))

    moments = {name: jax.tree.map(moment, optax.tree.get(state, name)) for name in ("mu", "nu")}
    return {"policy": optax.tree.set(state, **moments)}


def state_of(step: int, like: NetworkStates) -> NetworkStates:
    return jax.tree.map(lambda x, y: jax.device_put(x.astype(y.dtype), y.sharding), make_state(step, 2), like)


@pytest.mark.parametrize("is_rounded_when_saved", [False, True])
def test_optimizer_moments_are_restored_into_another_dtype_or_memory_kind(tmp_path, is_rounded_when_saved, caplog):
    layouts = [target("float32", "device"), target("bfloat16", HOST_MEMORY)]
    saved, wanted = reversed(layouts) if is_rounded_when_saved else layouts

    def with_moments_like(layout: NetworkStates) -> Checkpoints:
        return Checkpoints(tmp_path, policy=LatestAndBestPolicy(3), layout=layout)

    writing = with_moments_like(saved)
    writing.save(state_of(2, saved), progress(2))
    writing.finish()
    writing.close()
    reading = with_moments_like(wanted)
    found, _ = restored(reading)
    # The run continues in its own dtypes.
    reading.save(state_of(3, wanted), progress(3))
    reading.finish()
    reading.close()
    assert steps_in(tmp_path) == {"2", "3"} and "damaged" not in caplog.text
    for state in (found, PolicyCheckpoint.open(tmp_path / "2").restore_states(wanted)):
        for x, before, like in zip(*map(jax.tree.leaves, (state, state_of(2, saved), wanted)), strict=True):
            assert (x.dtype, x.sharding) == (like.dtype, like.sharding)
            np.testing.assert_array_equal(x, np.asarray(before).astype(like.dtype))
