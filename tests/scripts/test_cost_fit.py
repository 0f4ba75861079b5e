"""Tests of `scripts/simulate/cost_fit.py` with times from known constants."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.simulate.cost_fit import CALL, FREE, OTHER_NAMES, Timed, explained, fit
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
    copy_token_s=4e-8,
    move_s=2e-3,
    move_token_s=1e-6,
)
CALL_S = 1e-4
PROGRAMS = ((16, 64), (16, 128), (16, 256), (8, 256))


def timed(what: str, counts: dict[Any, float]) -> Timed:
    """Returns the times that `KNOWN` gives."""
    seconds = counts.get(CALL, 0.0) * CALL_S + sum(getattr(KNOWN, n) * counts.get(n, 0.0) for n in OTHER_NAMES)
    programs = [program for program in counts if isinstance(program, tuple)]
    seconds += sum(counts[rows, room] * KNOWN.step(rows=rows, cache_length=room) for rows, room in programs)
    return Timed(what, counts, seconds)


def measurements() -> list[Timed]:
    made = [
        timed(f"decode {rows} {room} {steps}", {(rows, room): steps, CALL: 1})
        for rows, room in PROGRAMS
        for steps in (8, 40)
    ]
    made += [timed(f"prefill {n}", {"prefill_s": 1, "prefill_token_s": n}) for n in (32, 64, 256)]
    made += [timed(f"admit {n}", {"admit_s": 1, "admit_row_s": n}) for n in (1, 15)]
    made += [timed(f"copy {n}", {"copy_token_s": n}) for n in (2048, 4096)]
    made += [timed(f"move {n}", {"move_s": 2, "move_token_s": n}) for n in (64, 512)]
    return [*made, timed("segments", {"segment_s": 20, (16, 64): 20, "admit_s": 2, "admit_row_s": 20})]


def constants(cost: CostModel) -> dict[str, float]:
    return {name: value for name, value in cost.to_json().items() if name != "measured_steps"}


def test_known_constants_are_found_again() -> None:
    found = fit(measurements())
    assert constants(found) == pytest.approx(constants(KNOWN), rel=1e-6)
    assert {program[:2] for program in found.measured_steps} == set(PROGRAMS)
    for rows, room, seconds in found.measured_steps:
        assert seconds == pytest.approx(KNOWN.step(rows=rows, cache_length=room))
    assert explained(measurements()[-1], found) == pytest.approx(1)


def test_times_that_are_a_little_off_give_constants_that_are_a_little_off_and_never_below_zero() -> None:
    rng = np.random.default_rng(0)
    noisy = [one._replace(seconds=one.seconds * rng.uniform(0.98, 1.02)) for one in measurements()]
    found = fit(noisy)
    assert min(constants(found).values()) >= 0
    for rows, room, seconds in found.measured_steps:
        assert seconds == pytest.approx(KNOWN.step(rows=rows, cache_length=room), rel=0.05)


def test_what_was_never_paid_costs_nothing() -> None:
    found = fit([timed("decode", {(8, 64): 10}), timed("prefill", {"prefill_s": 1})])
    assert (found.move_s, found.copy_token_s) == (0, 0) and found.prefill_s == pytest.approx(KNOWN.prefill_s)


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
