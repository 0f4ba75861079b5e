"""What goes to disk comes back bit for bit, or is not taken for good."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from app.training.checkpoint import CHECKSUMS, Checkpoints, Progress, check_fingerprints, checksums, is_damage, known
from app.training.preservation import NewestAndBest
from app.training.saved_policy import SavedPolicy
from app.update.optimizer import TrainState
from settings import InputError
from tests.free_address import free_address
from tests.tiny import make_mesh
from tests.training.program import DEADLINE_S, REPOSITORY

FINGERPRINTS = {"model": "m", "tokenizer": "t", "data": "d"}


def empty_state() -> TrainState:
    params = {"kernel": jnp.zeros((8, 512)), "scale": jnp.zeros(8)}
    return TrainState(params, optax.adam(1e-3).init(params), *[jnp.zeros((), jnp.int32)] * 3)


SHAPES = jax.eval_shape(empty_state)


def make_state(seed: int, num_devices: int = 1) -> TrainState:
    """A state of which every array differs from that of another seed, its rows split over the devices."""
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda x: (seed + rng.normal(size=x.shape)).astype(x.dtype), SHAPES)
    return jax.device_put(state, shardings(num_devices))


def shardings(num_devices: int) -> TrainState:
    mesh = make_mesh((1, num_devices, 1))
    return jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec("fsdp") if x.ndim else PartitionSpec()), SHAPES)


def opened(
    folder: Path, *, keep: int = 3, num_devices: int = 1, best: str | None = None, mode: Literal["max", "min"] = "max"
) -> Checkpoints:
    policy = NewestAndBest(keep, best, mode)
    return Checkpoints(folder, policy=policy, shapes=SHAPES, shardings=shardings(num_devices))


def progress(step: int, accuracy: float | None = None) -> Progress:
    evaluation = None if accuracy is None else {"eval/accuracy": accuracy}
    return Progress(step=step, position=4 * step, fingerprints=FINGERPRINTS, wandb_id="w", evaluation=evaluation)


def write(folder: Path, *steps: int, keep: int = 3, num_devices: int = 1) -> None:
    checkpoints = opened(folder, keep=keep, num_devices=num_devices)
    for step in steps:
        checkpoints.save(make_state(step, num_devices), progress(step))
    checkpoints.finish()
    checkpoints.close()


def write_evaluated(folder: Path, accuracies: dict[int, float | None], *, keep: int = 1) -> None:
    """Checkpoints of which those with an accuracy were evaluated, one after another by one process."""
    checkpoints = opened(folder, keep=keep, best="eval/accuracy")
    for step, accuracy in accuracies.items():
        checkpoints.save(make_state(step), progress(step, accuracy))
    checkpoints.finish()
    checkpoints.close()


def steps_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_same(state: TrainState, expected: TrainState) -> None:
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, wanted)
        assert leaf.dtype == wanted.dtype


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4. Not to be written to."""
    folder = tmp_path_factory.mktemp("saved")
    write(folder, 2, 4)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


@pytest.fixture
def checkpoints(folder: Path) -> Iterator[Checkpoints]:
    """Opened before anything happens to its files, as a test damages them."""
    checkpoints = opened(folder)
    yield checkpoints
    checkpoints.close()


def restored(checkpoints: Checkpoints) -> tuple[TrainState, Progress]:
    found = checkpoints.restore(FINGERPRINTS)
    assert found is not None
    return found


def test_the_newest_comes_back_bit_for_bit(checkpoints: Checkpoints) -> None:
    state, where = restored(checkpoints)
    assert_same(state, make_state(4))
    assert where == progress(4)


def test_a_directory_without_checkpoints_has_none(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path / "new")
    assert checkpoints.restore(FINGERPRINTS) is None
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


def test_a_damaged_best_gives_way_to_the_next_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_evaluated(tmp_path, {1: 0.9, 2: 0.5, 3: 0.4}, keep=3)
    flip_a_bit(tmp_path / "1")
    checkpoints = opened(tmp_path, keep=3, best="eval/accuracy")
    with caplog.at_level(logging.WARNING):
        state, where = restored(checkpoints)
    assert where.step == 3
    assert_same(state, make_state(3))
    assert checkpoints.best == (2, "eval/accuracy", 0.5)
    assert steps_in(tmp_path) == {"2", "3", "damaged-1", "best"}
    assert os.readlink(tmp_path / "best") == "2"
    assert "checkpoint of step 1 is damaged" in caplog.text
    checkpoints.close()


def test_where_the_newest_is_damaged_the_best_may_be_what_is_left(tmp_path: Path) -> None:
    write_evaluated(tmp_path, {1: 0.9, 2: 0.5, 3: 0.4}, keep=1)
    truncate_arrays(tmp_path / "3")
    checkpoints = opened(tmp_path, keep=1, best="eval/accuracy")
    state, where = restored(checkpoints)
    assert where.step == 1
    assert_same(state, make_state(1))
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
    assert "checkpoints: no link to the best one" in caplog.text
    assert checkpoints.best == (1, "eval/accuracy", 0.5)
    checkpoints.close()


def test_another_mesh_can_read_it(tmp_path: Path) -> None:
    write(tmp_path / "four", 1, num_devices=4)
    checkpoints = opened(tmp_path / "four", num_devices=2)
    state, _ = restored(checkpoints)
    assert_same(state, make_state(1))
    assert len(state.params["kernel"].sharding.device_set) == 2
    checkpoints.close()


def largest(folder: Path) -> Path:
    """The file that holds most of the arrays' bytes."""
    return max(folder.rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)


def truncate_arrays(folder: Path) -> None:
    os.truncate(largest(folder), 1000)


def flip_a_bit(folder: Path) -> None:
    path = largest(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty_manifest(folder: Path) -> None:
    os.truncate(folder / "state" / "manifest.ocdbt", 0)


def remove_arrays(folder: Path) -> None:
    shutil.rmtree(folder / "state" / "ocdbt.process_0")


def remove_progress(folder: Path) -> None:
    shutil.rmtree(folder / "progress")


def halve_progress(folder: Path) -> None:
    os.truncate(folder / "progress" / "metadata", 20)


DAMAGES = [truncate_arrays, flip_a_bit, empty_manifest, remove_arrays, remove_progress, halve_progress]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_one_gives_way_to_the_one_before(
    folder: Path,
    checkpoints: Checkpoints,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    damage(folder / "4")
    with caplog.at_level(logging.WARNING):
        state, where = restored(checkpoints)
    assert_same(state, make_state(2))
    assert where == progress(2)
    (warning,) = [record.message for record in caplog.records if record.name == "app.training.checkpoint"]
    assert warning.startswith("checkpoint of step 4 is damaged (")
    assert len(warning) < 300
    assert "Traceback" not in capfd.readouterr().err


def test_the_step_of_a_damaged_one_can_be_saved_again(folder: Path, checkpoints: Checkpoints) -> None:
    truncate_arrays(folder / "4")
    restored(checkpoints)
    assert steps_in(folder) == {"2", "damaged-4"}
    for step in (3, 4):
        checkpoints.save(make_state(10 + step), progress(step))
    checkpoints.finish()
    assert steps_in(folder) == {"2", "3", "4", "damaged-4"}
    state, where = restored(checkpoints)
    assert_same(state, make_state(14))
    assert where.step == 4


def test_where_all_are_damaged_nothing_is_guessed_or_moved(folder: Path, checkpoints: Checkpoints) -> None:
    for step in ("2", "4"):
        flip_a_bit(folder / step)
    with pytest.raises(InputError, match=r"none of the checkpoints of steps \[4, 2\] in .* can be read"):
        checkpoints.restore(FINGERPRINTS)
    assert steps_in(folder) == {"2", "4"}


def test_a_good_one_that_cannot_be_read_now_stays_where_it_is(folder: Path, checkpoints: Checkpoints) -> None:
    metadata = folder / "4" / "progress" / "metadata"
    content = metadata.read_bytes()
    metadata.unlink()
    metadata.symlink_to("/proc/self/mem")  # at its beginning, a read is an I/O error
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.restore(FINGERPRINTS)
    assert steps_in(folder) == {"2", "4"}
    metadata.unlink()
    metadata.write_bytes(content)
    assert restored(checkpoints)[1].step == 4


def wrapped(cause: Exception) -> Exception:
    """As Orbax does."""
    error = Exception("Encountered error while reading array")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 512 bytes"),
        ValueError('PERMISSION_DENIED: Error opening "zarr" driver'),
        ValueError("UNAVAILABLE: Connection reset by peer"),
        OSError(5, "Input/output error"),
        AttributeError("a bug"),
        Exception("of which nothing is known"),
    ],
    ids=repr,
)
def test_what_is_wrong_with_the_machine_or_the_program_is_no_damage(error: Exception) -> None:
    assert not is_damage(error)
    assert not is_damage(wrapped(error))


JOIN = """
import sys
from pathlib import Path
import jax
address, process_id, folder = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, int(process_id))
from settings import InputError
from tests.training.test_checkpoint import FINGERPRINTS, make_state, opened, progress
"""

RESTORE = """
checkpoints = opened(Path(folder), num_devices=2)
try:
    found = checkpoints.restore(FINGERPRINTS)
    print("\\nfound", found and found[1].step)
except InputError as error:
    print("\\nerror", error)
checkpoints.close()
"""

SAVE = """
checkpoints = opened(Path(folder), keep=1, num_devices=2, best="eval/accuracy")
for step, accuracy in ((1, 0.5), (2, 0.2), (3, 0.7)):
    checkpoints.save(make_state(step, num_devices=2), progress(step, accuracy))
checkpoints.finish()
print("\\nbest", checkpoints.best.step)
checkpoints.close()
"""


def said_by_hosts(*folders: Path, program: str = RESTORE) -> list[str]:
    """The last word of each of two processes, of one device each, on its folder."""
    address = free_address()
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN + program, address, str(i), str(folder)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, folder in enumerate(folders)
    ]
    try:
        outputs = [host.communicate(timeout=DEADLINE_S) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    assert [host.returncode for host in hosts] == [0, 0], outputs
    return [stdout.splitlines()[-1] for stdout, _ in outputs]


@pytest.mark.two_hosts
@pytest.mark.parametrize("damage", [truncate_arrays, remove_progress], ids=lambda damage: damage.__name__)
def test_what_one_host_cannot_read_all_pass_over(folder: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    damage(other / "4")
    assert said_by_hosts(folder, other) == ["found 2", "found 2"]


@pytest.mark.two_hosts
def test_hosts_that_see_different_checkpoints_are_told_to_share(folder: Path, tmp_path: Path) -> None:
    first, second = said_by_hosts(folder, tmp_path / "not_shared")
    for line in (first, second):
        assert line.startswith("error run.dir: the hosts see checkpoints of different steps")
        assert "(host 0: [4, 2]; host 1: [])" in line
    assert steps_in(folder) == {"2", "4"}


@pytest.mark.two_hosts
def test_two_hosts_keep_the_same_best(tmp_path: Path) -> None:
    assert said_by_hosts(tmp_path, tmp_path, program=SAVE) == ["best 3", "best 3"]
    assert steps_in(tmp_path) == {"3", "best"}
    assert os.readlink(tmp_path / "best") == "3"


def test_what_changed_since_is_named(checkpoints: Checkpoints) -> None:
    with pytest.raises(InputError, match="--resume: model and data changed since this run was started"):
        checkpoints.restore({"model": "x", "tokenizer": "t", "data": "y"})
    check_fingerprints(FINGERPRINTS, FINGERPRINTS)


def test_an_unfinished_save_is_no_checkpoint_and_is_cleared_away(folder: Path) -> None:
    shutil.copytree(folder / "4", folder / "6.orbax-checkpoint-tmp")
    checkpoints = opened(folder)
    assert restored(checkpoints)[1].step == 4
    checkpoints.save(make_state(6), progress(6))  # waits for the clearing
    checkpoints.finish()
    assert steps_in(folder) == {"2", "4", "6"}
    checkpoints.close()


def test_checksums_see_every_array_and_no_mesh() -> None:
    state = make_state(1)
    expected = known(checksums(state))
    assert known(jax.jit(checksums)(make_state(1, num_devices=8))) == expected
    assert {"params/kernel", "optimizer/0/mu/kernel", "num_updates"} < expected.keys()
    leaves, tree = jax.tree.flatten(state)
    for i, (name, leaf) in enumerate(zip(checksums(state), leaves, strict=True)):
        changed = jax.tree.unflatten(tree, [*leaves[:i], leaf.at[(0,) * leaf.ndim].add(1), *leaves[i + 1 :]])
        found = known(checksums(changed))
        assert {path for path, value in found.items() if value != expected[path]} == {name}


def test_one_of_an_older_version_is_named_as_such_and_stays(folder: Path, checkpoints: Checkpoints) -> None:
    for step in ("2", "4"):
        path = folder / step / "progress" / "metadata"
        record = json.loads(path.read_text())
        del record[CHECKSUMS]
        path.write_text(json.dumps({**record, "checksum": 1}))
    older = "was written by an older version; finish that run with that version, or start another run.name"
    with pytest.raises(InputError, match=f"^--resume: {re.escape(str(folder))}/4 {re.escape(older)}$"):
        checkpoints.restore(FINGERPRINTS)
    with pytest.raises(InputError, match=f"^--checkpoint: {re.escape(str(folder))}/2 {re.escape(older)}$"):
        SavedPolicy.open(folder / "2")
    assert steps_in(folder) == {"2", "4"}
