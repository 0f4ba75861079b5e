"""Runs whose moments are in host memory, or change their type."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.program import assert_same_run, digest_of, saved_state, train_here

AWAY, HERE = "optimizer.offload=true", "optimizer.offload=false"
ROUNDED = "optimizer.first_moment=bfloat16"


def test_a_run_moves_its_moments_back_and_ends_as_one_that_never_moved_them(finished: Path, config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    assert train_here(config, AWAY, "run.steps=2").exit_code == 0
    resumed = train_here(config, HERE, resume="must")
    assert resumed.exit_code == 0, resumed.stderr
    assert "changed: optimizer.offload was True and is now False\n" in resumed.stderr
    assert_same_run(run, finished, step=4)


def test_moments_change_their_type_if_allowed_and_nothing_is_touched_if_not(finished: Path, config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    shutil.copytree(finished, run)
    before = digest_of(run)
    refused = train_here(config, "run.steps=5", ROUNDED, resume="must")
    assert refused.exit_code == 2
    assert "optimizer.first_moment was 'float32' and is now 'bfloat16'" in refused.stderr
    assert digest_of(run) == before
    for steps, chosen in ((5, (ROUNDED, AWAY)), (6, ())):
        resumed = train_here(
            config, f"run.steps={steps}", *chosen, resume="must", allow_changed=["optimizer.first_moment"]
        )
        assert resumed.exit_code == 0, resumed.stderr
        assert "damaged" not in resumed.stderr
        dtypes = {array.dtype.name for name, array in saved_state(run, steps).items() if "mu" in name}
        assert dtypes == {"bfloat16" if chosen else "float32"}
