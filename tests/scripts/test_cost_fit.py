"""Tests of `scripts/simulate/cost_fit.py` with times from known constants."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scripts.simulate.cost_fit import CALL, FREE, NAMES, Timed, explained, fit, step_counts
from scripts.simulate.cost_model import CostModel

SCRIPTS = Path(__file__).parents[2] / "scripts"
KNOWN = replace(
    FREE,
    step_s=2e-3,
    step_row_s=1e-4,
    step_cached_token_s=3e-7,
    segment_s=5e-4,
    prefill_s=1e-3,
    prefill_token_s=2e-5,
    admit_s=3e-4,
    admit_row_s=1e-5,
    move_s=2e-3,
    move_token_s=1e-6,
)
CALL_S = 1e-4
SEGMENTS = ((16, 64), (16, 128), (16, 256), (8, 256))
"""(rows, cache length)"""


def timed(what: str, counts: dict[str, float]) -> Timed:
    """Returns the times that `KNOWN` gives."""
    seconds = counts.get(CALL, 0.0) * CALL_S + sum(getattr(KNOWN, name) * counts.get(name, 0.0) for name in NAMES)
    return Timed(what, counts, seconds)


def measurements() -> list[Timed]:
    made = [
        timed(f"decode {rows} {length} {steps}", {**step_counts(steps, rows=rows, cache_length=length), CALL: 1})
        for rows, length in SEGMENTS
        for steps in (8, 40)
    ]
    made += [timed(f"prefill {n}", {"prefill_s": 1, "prefill_token_s": n}) for n in (32, 64, 256)]
    made += [timed(f"admit {n}", {"admit_s": 1, "admit_row_s": n}) for n in (1, 15)]
    made += [timed(f"move {n}", {"move_s": 2, "move_token_s": n}) for n in (64, 512)]
    steps = step_counts(20, rows=16, cache_length=64)
    return [*made, timed("segments", {"segment_s": 20, **steps, "admit_s": 2, "admit_row_s": 20})]


def test_known_constants_are_found_again() -> None:
    found = fit(measurements())
    assert found.to_json() == pytest.approx(KNOWN.to_json(), rel=1e-6)
    assert explained(measurements()[-1], found) == pytest.approx(1)


def test_times_that_are_a_little_off_give_constants_that_are_a_little_off_and_never_below_zero() -> None:
    rng = np.random.default_rng(0)
    noisy = [one._replace(seconds=one.seconds * rng.uniform(0.98, 1.02)) for one in measurements()]
    found = fit(noisy)
    assert min(found.to_json().values()) >= 0
    for rows, length in SEGMENTS:
        known = KNOWN.step(rows=rows, cache_length=length)
        assert found.step(rows=rows, cache_length=length) == pytest.approx(known, rel=0.05)


def test_what_was_never_paid_costs_nothing() -> None:
    steps = step_counts(10, rows=8, cache_length=64)
    found = fit([timed("decode", steps), timed("prefill", {"prefill_s": 1})])
    assert (found.move_s, found.admit_s) == (0, 0) and found.prefill_s == pytest.approx(KNOWN.prefill_s)


def test_fitted_costs_are_what_the_simulator_reads() -> None:
    found = fit(measurements())
    assert CostModel.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("simulate/calibrate_rollout.py", ["--out", "x.json", "--slots", "0"], "a whole number above 0, got '0'"),
        ("simulate/calibrate_rollout.py", ["--out", "x.json", "--slots", "1"], "a whole number above 1, got '1'"),
        ("bench/rollout_workers.py", ["--slots", "8", "1"], "a whole number above 1, got '1'"),
        ("simulate/calibrate_rollout.py", [], "--out"),
        ("bench/rollout_workers.py", ["--slots", "8", "many"], "got 'many'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    script: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_the_comparison_with_transformers_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="torch is not installed: this benchmark compares with transformers"):
        runpy.run_path(str(SCRIPTS / "bench" / "rollout_peer.py"), run_name="__main__")
