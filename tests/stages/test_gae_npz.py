"""`grpo gae` on matrices: no more rows at a time than a window has tokens for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.runtime import advantages
from app.stages.gae import make_whitener
from app.stages.gae_npz import GaeMatrixFile
from settings import load


def test_no_more_rows_are_held_than_a_window_has_tokens_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "in.npz", rewards=np.ones((50, 16)), values=np.ones((50, 16)))
    shapes = []
    solve = advantages.generalized_advantages

    def watched(rewards: Any, *rest: Any, **rule: Any) -> Any:
        shapes.append(rewards.shape)
        return solve(rewards, *rest, **rule)

    monkeypatch.setattr(advantages, "generalized_advantages", watched)
    file = GaeMatrixFile(tmp_path / "in.npz", load(None, [], {}).settings, window_tokens=100)
    file.write(tmp_path / "out.npz", make_whitener(None))
    assert shapes == [(6, 16)] * 8 + [(2, 16)]


def test_matrices_that_are_stored_by_columns_are_read_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal((2, 9, 4), np.float32)
    outputs = []
    for store in (np.ascontiguousarray, np.asfortranarray):
        np.savez(tmp_path / "in.npz", rewards=store(rewards), values=values)
        file = GaeMatrixFile(tmp_path / "in.npz", load(None, [], {}).settings, window_tokens=12)
        file.check()
        file.write(tmp_path / "out.npz", make_whitener(None))
        outputs.append((tmp_path / "out.npz").read_bytes())
    assert outputs[0] == outputs[1]
