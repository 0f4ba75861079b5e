"""Tests that checkpoints are restored bit for bit, and that the best one is kept."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import jax
import pytest

from app.checkpoint.saved_arrays import checksums
from tests.checkpoints import (
    assert_same,
    make_state,
    of_this_run,
    opened,
    progress,
    restored,
    steps_in,
    write,
    write_evaluated,
)


def test_the_newest_comes_back_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path, 2, 4)
    checkpoints = opened(tmp_path)
    state, where = restored(checkpoints)
    assert_same(state, make_state(4))
    assert where == progress(4)
    checkpoints.close()


def test_a_directory_without_checkpoints_has_none(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path / "new")
    assert checkpoints.restore(of_this_run) is None
    checkpoints.close()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "kept", 1, 2, 3, keep=2)
    assert steps_in(tmp_path / "kept") == {"2", "3"}


def test_the_best_is_kept_beside_the_newest_and_a_link_names_it(tmp_path: Path) -> None:
    write_evaluated(tmp_path, {1: 0.2, 2: 0.7, 3: 0.7, 4: None, 5: 0.6})
    assert steps_in(tmp_path) == {"2", "5", "best"}
    assert os.readlink(tmp_path / "best") == "2"


def test_the_link_always_names_a_whole_checkpoint(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path, keep=1, best="eval/accuracy")
    named = []
    for step in range(1, 6):
        checkpoints.save(make_state(step), progress(step, step / 10))
        named += [os.readlink(tmp_path / "best")] if step > 1 else []
        assert step == 1 or (tmp_path / "best" / "state").is_dir()
    assert named == ["1", "2", "3", "4"], "the one that is being written is not yet the best on disk"
    checkpoints.finish()
    assert os.readlink(tmp_path / "best") == "5"
    assert steps_in(tmp_path) == {"5", "best"}, "the last best goes with the end of the run"
    checkpoints.close()


def test_the_best_is_read_back_from_the_checkpoints_and_the_newest_continues(tmp_path: Path) -> None:
    write_evaluated(tmp_path, {1: 0.2, 2: 0.7, 3: 0.1, 4: 0.3})
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


def test_killed_while_a_better_one_is_written_the_best_is_still_there(tmp_path: Path) -> None:
    running = opened(tmp_path / "run", keep=1, best="eval/accuracy")
    running.save(make_state(1), progress(1, 0.5))
    running.save(make_state(2), progress(2, 0.6))
    # What a kill would leave just now, whether or not the second one is complete.
    unfinished = shutil.ignore_patterns("*.orbax-checkpoint-tmp")
    killed = shutil.copytree(tmp_path / "run", tmp_path / "killed", symlinks=True, ignore=unfinished)
    assert os.readlink(killed / "best") == "1"
    running.finish()
    running.close()
    checkpoints = opened(killed, keep=1, best="eval/accuracy")
    restored(checkpoints)
    assert checkpoints.best is not None
    assert checkpoints.best[0] in (1, 2)
    assert os.readlink(killed / "best") == str(checkpoints.best[0])
    checkpoints.close()


def test_without_a_metric_nothing_is_the_best_and_no_link_is_left(tmp_path: Path) -> None:
    write_evaluated(tmp_path, {1: 0.9, 2: 0.5})
    checkpoints = opened(tmp_path, keep=1)
    restored(checkpoints)
    assert checkpoints.best is None
    checkpoints.save(make_state(3), progress(3, 1.0))
    checkpoints.finish()
    assert steps_in(tmp_path) == {"3"}
    checkpoints.close()


def test_something_else_in_the_place_of_the_link_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_evaluated(tmp_path, {1: 0.5})
    (tmp_path / "best").unlink()
    shutil.copytree(tmp_path / "1", tmp_path / "best")
    checkpoints = opened(tmp_path, keep=1, best="eval/accuracy")
    with caplog.at_level(logging.WARNING):
        restored(checkpoints)
    assert "checkpoints: cannot create the link to the best one" in caplog.text
    assert checkpoints.best == (1, "eval/accuracy", 0.5)
    checkpoints.close()


def test_another_mesh_can_read_it(tmp_path: Path) -> None:
    write(tmp_path / "four", 1, num_devices=4)
    checkpoints = opened(tmp_path / "four", num_devices=2)
    state, _ = restored(checkpoints)
    assert_same(state, make_state(1))
    assert len(state["policy"].params["kernel"].sharding.device_set) == 2
    checkpoints.close()


def test_checksums_see_every_array_and_no_mesh() -> None:
    state = make_state(1)
    expected = checksums(state)
    assert checksums(make_state(1, num_devices=8)) == expected
    assert {"policy/params/kernel", "policy/optimizer/0/mu/kernel", "policy/num_updates"} < expected.keys()
    leaves, tree = jax.tree.flatten(state)
    for i, (name, leaf) in enumerate(zip(checksums(state), leaves, strict=True)):
        changed = jax.tree.unflatten(tree, [*leaves[:i], leaf.at[(0,) * leaf.ndim].add(1), *leaves[i + 1 :]])
        found = checksums(changed)
        assert {path for path, value in found.items() if value != expected[path]} == {name}
