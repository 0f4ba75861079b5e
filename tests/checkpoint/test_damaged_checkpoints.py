"""Tests that damaged, incomplete, outdated and foreign checkpoints are not restored."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from app.checkpoint.checkpoints import Checkpoints, check_fingerprints
from app.checkpoint.full_disk import DiskFullError, explain_full_disk
from app.checkpoint.reading import is_damage
from app.checkpoint.saved_policy import PolicyCheckpoint
from app.checkpoint.train_progress import ProgressRecord, progress_path
from app.records.run_directory import RunDirectory
from settings import InputError
from tests.checkpoints import (
    FINGERPRINTS,
    assert_same,
    make_state,
    of_this_run,
    opened,
    progress,
    restored,
    steps_in,
    write,
)
from tests.program import digest_of, limited_file_size


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with checkpoints of steps 2 and 4, which tests must not change."""
    folder = tmp_path_factory.mktemp("saved")
    write(folder, 2, 4)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


@pytest.fixture
def checkpoints(folder: Path) -> Iterator[Checkpoints]:
    """Opens checkpoints before a test damages their files."""
    checkpoints = opened(folder)
    yield checkpoints
    checkpoints.close()


def largest(folder: Path) -> Path:
    """Returns the file with most of the arrays' bytes."""
    return max(folder.rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)


def truncate_arrays(folder: Path) -> None:
    os.truncate(largest(folder), 1000)


def flip_a_bit(folder: Path) -> None:
    path = largest(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def copy_of_the_step_before(folder: Path, part: str) -> None:
    shutil.rmtree(folder / part)
    shutil.copytree(folder.with_name("2") / part, folder / part)


@pytest.mark.parametrize(
    "damage",
    [
        *(truncate_arrays, flip_a_bit),
        *(lambda folder, part=part: shutil.rmtree(folder / part) for part in ("state/ocdbt.process_0", "progress")),
        *(partial(copy_of_the_step_before, part=part) for part in ("", "state")),
    ],
    ids=["truncated arrays", "flipped bit", "no arrays", "no progress", "another step", "arrays of another step"],
)
def test_restore_falls_back_from_a_damaged_checkpoint(folder, checkpoints, damage, caplog, capfd):
    damage(folder / "4")
    with caplog.at_level(logging.WARNING):
        state, where = restored(checkpoints)
    assert_same(state, make_state(2))
    assert where == progress(2)
    (warning,) = [record.message for record in caplog.records if record.name == "app.checkpoint.checkpoints"]
    assert warning.startswith("skipping the checkpoint of step 4: damaged (") and len(warning) < 300
    assert "Traceback" not in capfd.readouterr().err


def test_every_flipped_bit_in_the_progress_record_is_detected(folder: Path) -> None:
    path = progress_path(folder / "4")
    content = path.read_bytes()
    for place in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError):
            ProgressRecord.read(folder / "4")


def test_the_step_of_a_damaged_checkpoint_can_be_saved_again(folder: Path, checkpoints: Checkpoints) -> None:
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


def test_if_all_checkpoints_are_damaged_none_is_restored_or_moved(folder: Path, checkpoints: Checkpoints) -> None:
    for step in ("2", "4"):
        flip_a_bit(folder / step)
    with pytest.raises(InputError, match=r"no checkpoint in .* can be read \(steps \[4, 2\]\)"):
        checkpoints.restore(of_this_run)
    assert steps_in(folder) == {"2", "4"}


def test_a_checkpoint_is_kept_after_an_io_error(folder: Path, checkpoints: Checkpoints) -> None:
    metadata = folder / "4" / "progress" / "metadata"
    content = metadata.read_bytes()
    metadata.unlink()
    metadata.symlink_to("/proc/self/mem")  # reading its first byte is an I/O error
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.restore(of_this_run)
    assert steps_in(folder) == {"2", "4"}
    metadata.unlink()
    metadata.write_bytes(content)
    assert restored(checkpoints)[1].step == 4


def test_machine_and_program_errors_do_not_count_as_checkpoint_damage() -> None:
    for error in (
        MemoryError(),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 512 bytes"),
        ValueError('PERMISSION_DENIED: Error opening "zarr" driver'),
        ValueError("UNAVAILABLE: Connection reset by peer"),
        OSError(5, "Input/output error"),
        AttributeError("a bug"),
        Exception("an unknown error"),
    ):
        # Orbax wraps errors like this.
        wrapped = Exception("Encountered error while reading array")
        wrapped.__cause__ = error
        assert not is_damage(error) and not is_damage(wrapped), error


def test_full_disk_error_names_sizes_and_the_last_checkpoint(tmp_path: Path) -> None:
    no_space = 'RESOURCE_EXHAUSTED: Error writing "a" in OCDBT database at local file "b/": No space left on device'
    wrapped = Exception("Encountered error while writing array")
    wrapped.__cause__ = ValueError(no_space)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    messages = []
    for error in (ValueError(no_space), wrapped, full):
        with pytest.raises(DiskFullError) as caught, explain_full_disk(RunDirectory(tmp_path), np.zeros(2048, "f4")):
            raise error
        messages.append(str(caught.value))
        (tmp_path / "checkpoints" / "12").mkdir(parents=True, exist_ok=True)
    assert messages[0].startswith("no space is left to write a checkpoint: a checkpoint takes about 8.0 KiB, and ")
    assert "there is no checkpoint. Free" in messages[0] and "checkpoint 12 is complete. Free some space" in messages[1]
    assert messages[2].startswith("no space is left to write a file: ")
    with pytest.raises(ValueError, match="a bug"), explain_full_disk(RunDirectory(tmp_path), ()):
        raise ValueError("a bug")


def test_resume_error_names_changed_fingerprints() -> None:
    changed = {"model": "x", "tokenizer": "t", "data": "y"}
    with pytest.raises(InputError, match=r"--resume: model and data changed since this run was started.*run.name$"):
        check_fingerprints(FINGERPRINTS, changed, changeable={"data": ["data"]})
    with pytest.raises(InputError, match=r"--resume: data changed .* with --allow-changed data$"):
        check_fingerprints(FINGERPRINTS, {**changed, "model": "m"}, changeable={"data": ["data", "run.seed"]})
    check_fingerprints(FINGERPRINTS, {**changed, "model": "m"}, changeable={"data": ["data"]}, allowed=["data"])


def test_an_unfinished_save_is_ignored_and_removed(folder: Path) -> None:
    shutil.copytree(folder / "4", folder / "6.orbax-checkpoint-tmp")
    checkpoints = opened(folder)
    assert restored(checkpoints)[1].step == 4
    checkpoints.save(make_state(6), progress(6))  # waits until the unfinished save is removed
    checkpoints.finish()
    assert steps_in(folder) == {"2", "4", "6"}
    checkpoints.close()


def test_a_checkpoint_of_another_version_is_refused_and_kept(folder: Path, checkpoints: Checkpoints) -> None:
    for step in ("2", "4"):
        path = progress_path(folder / step)
        text = json.dumps(json.loads(json.loads(path.read_text())["record"]) | {"format": 1})
        path.write_text(json.dumps({"record": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    before = digest_of(folder)
    other = "was written by another version of this program; use that version, or"
    with pytest.raises(InputError, match=f"^--resume: {re.escape(f'{folder}/4 {other}')} start a run with another"):
        checkpoints.restore(of_this_run)
    with pytest.raises(InputError, match=f"^--checkpoint: {re.escape(f'{folder}/2 {other}')} choose another"):
        PolicyCheckpoint.open(folder / "2")
    assert digest_of(folder) == before


def test_closing_logs_the_error_of_a_failed_save_and_raises_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = opened(tmp_path)
    with limited_file_size(3000):
        checkpoints.save(make_state(1), progress(1))
        checkpoints.close()
    assert "the last checkpoint is not saved: " in caplog.text and "File too large" in caplog.text
