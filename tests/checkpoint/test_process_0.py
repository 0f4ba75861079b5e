"""Tests checkpoints in a folder that only process 0 has."""

import subprocess
import sys
from pathlib import Path

import pytest

from app.checkpoint.checkpoints import Checkpoints
from app.checkpoint.retention import LatestAndBestPolicy
from app.mesh.placement import abstract_arrays
from tests.checkpoints import SHAPES, make_state, progress, shardings
from tests.program import DEADLINE_S, REPOSITORY


def save_there(folder: Path) -> None:
    """Saves two checkpoints as process 0 does if no other process has the folder."""
    policy = LatestAndBestPolicy(2, None)
    made = Checkpoints(folder, policy=policy, layout=abstract_arrays(SHAPES, shardings(1)), is_seen_by_all=False)
    try:
        for step in (1, 2):
            made.save(make_state(step), progress(step))
        made.finish()
    finally:
        made.close()


# The arrays of a checkpoint take 60 KiB, and twice as much while they are written.
@pytest.mark.parametrize("size", ["32k", "96k", "240k"])
def test_a_full_disk_raises_an_error_instead_of_a_signal(tmp_path: Path, size: str) -> None:
    mount = f'mount -t tmpfs -o size={size} none {tmp_path} && exec "$@"'
    code = f"from tests.checkpoint.test_process_0 import *; save_there(Path({str(tmp_path)!r}) / 'checkpoints')"
    command = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot mount a small disk")
    ended = subprocess.run(
        [*command, sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == 1, ended
    # Orbax' abandoned tasks may print more after it.
    errors = [line for line in ended.stderr.splitlines() if "DiskFullError: no space is left to write " in line]
    assert len(errors) == 1, ended.stderr
    assert ("checkpoint 1 is complete" if size == "240k" else "there is no checkpoint") in errors[0]
