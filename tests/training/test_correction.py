"""Tests of a run with the importance correction, although its samples are on-policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.program import metrics_of, train_here


@pytest.mark.slow
def test_on_policy_a_mask_weighs_every_token_as_one_and_trains_as_without(config: Path, finished: Path) -> None:
    result = train_here(config, "algorithm.correction=mask", "run.steps=2", "eval.every_steps=0")
    assert result.exit_code == 0, result.stderr
    lines = metrics_of(config.parent / "runs" / "tiny")
    expected = [line for line in metrics_of(finished) if line["step"] in (1, 2)]
    assert [line["step"] for line in lines] == [1, 2]
    for line, plain in zip(lines, expected, strict=True):
        # The sampler's logprobs are the scorer's within 1e-4.
        assert line["policy/correction_mean"] == pytest.approx(1, abs=1e-4)
        assert line["policy/correction_max"] == pytest.approx(1, abs=1e-3)
        assert line["policy/correction_ess"] == pytest.approx(1, abs=1e-6)
        assert (line["policy/correction_cut_fraction"], line["policy/veto_fraction"]) == (0, 0)
        for name in ("loss", "policy/grad_norm", "reward/mean", "policy/entropy"):
            assert line[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-5)
        assert line["policy/grad_norm"] > 0
        assert not any("correction" in name or "veto" in name for name in plain)
