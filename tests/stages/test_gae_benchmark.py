"""`grpo gae --bench`: what is measured, checked, told and drawn; seconds are not asked about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from app.advantage.gae.estimate import generalized_advantages
from app.stages import gae_benchmark
from app.stages.gae_benchmark import (
    BenchmarkShape,
    parse_shapes,
    reference_gae,
    time_in_device_loop,
    time_interleaved,
    time_one_by_one,
)
from app.stages.gae_benchmark_report import BackendTiming, conclusion
from settings.errors import InputError
from settings.schema.settings import AlgorithmSettings
from tests.advantage import gae_oracle
from tests.advantage.gae_oracle import random_case
from tests.program import here


def test_a_bench_measures_every_backend_checks_it_and_draws(tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    result = here("gae", "--bench", "--shapes", "3x70", "--gamma", "0.9", "--out", folder)
    assert result.exit_code == 0, result.stderr
    report = json.loads((folder / "bench.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.png"]
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert report["settings"] == {"gamma": 0.9, "lam": 0.95, "mask_mode": "skip"}
    assert {case["decay"] for case in report["cases"]} == {"scalar", "masked"}
    assert {"serial", "chunked"} <= {case["backend"] for case in report["cases"]}
    for case in report["cases"]:
        assert case["num_repeats"] >= 20
        assert case["max_error"] < 1e-5
        assert 0 < case["median_s"] <= case["p90_s"]
        num_bytes = {"scalar": 16, "masked": 17}[case["decay"]]
        assert case["gb_per_s"] == pytest.approx(num_bytes * 3 * 70 / case["median_s"] / 1e9)
        assert case["percent_of_copy"] == pytest.approx(100 * case["gb_per_s"] / report["copies"][0]["gb_per_s"])
    for decay in ("scalar", "masked"):
        assert sum(case["is_auto"] for case in report["cases"] if case["decay"] == decay) == 1
    assert report["method"]["arrays"] == "numpy in and out"
    assert report["method"]["timing"] == "each call until its result is ready"
    lines = result.stdout.splitlines()
    assert "% of copy" in lines[2]
    assert lines[-1].startswith("3x70 with a mask: chunk-scan ")
    assert "auto takes" in lines[-1]


@pytest.mark.parametrize("mode", ["skip", "through", "zero"])
def test_the_oracle_of_the_bench_is_that_of_the_tests(mode: str) -> None:
    case = random_case(np.random.default_rng(0), (3, 20), masked=True, packed=False)._replace(ends=None)
    case = case._replace(values=case.values[:, :20])
    algorithm = AlgorithmSettings(gamma=0.5, lam=0.75, mask_mode=mode)  # pyright: ignore[reportArgumentType]
    found = reference_gae(case.rewards, case.values, case.mask, algorithm)
    np.testing.assert_allclose(found, gae_oracle.oracle(case, gamma=0.5, lam=0.75, mask_mode=mode), atol=1e-12)


@pytest.mark.parametrize("text", ["", "16", "0x4", "4x-1", "4x4;5x5", "4x4,", "99999x99999"])
def test_shapes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--shapes: "):
        parse_shapes(text)


def test_shapes_are_rows_and_tokens_each_once() -> None:
    assert parse_shapes("16x8192, 2x3,16x8192") == [BenchmarkShape(16, 8192), BenchmarkShape(2, 3)]


def test_the_error_is_looked_for_in_rows_from_the_first_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_at_the_end(rewards: np.ndarray, *arrays: Any, **rule: Any) -> Any:
        credit = generalized_advantages(rewards, *arrays, **rule)
        return tuple(np.asarray(part) + (np.arange(len(rewards)) == len(rewards) - 1)[:, None] for part in credit)

    monkeypatch.setattr(gae_benchmark, "generalized_advantages", wrong_at_the_end)
    report = gae_benchmark.measure_backends(AlgorithmSettings(), [BenchmarkShape(40, 8)], num_repeats=1)
    assert all(case.max_error > 0.01 for case in report.cases)


def test_cases_are_timed_in_turn() -> None:
    told: list[str] = []

    def case(name: str) -> Any:
        return lambda count: told.append(name) or 1.0

    assert time_interleaved([case("a"), case("b")], 3) == [[1.0] * 3] * 2
    assert "".join(told) == "ab" + "ababab"


def test_a_call_is_over_before_the_next_one_starts() -> None:
    done: list[bool] = []
    results: list[Any] = []

    def call() -> jax.Array:
        done.append(all(result.is_ready() for result in results))
        results.append(slow(jnp.ones((300, 300))))
        return results[-1]

    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x / 300, x))
    time_one_by_one(call)(5)
    assert done == [True] * 5


def test_a_loop_calls_as_often_as_it_says() -> None:
    called: list[int] = []

    def call(x: jax.Array) -> jax.Array:
        io_callback(lambda: called.append(1), None)
        return x + 1

    time_in_device_loop(call, [jnp.ones(3)])(6)
    jax.effects_barrier()
    assert len(called) == 2 * 8  # once to compile; the next power of two


SERIAL = BackendTiming("1x9", "scalar", "serial", None, False, 0.1, 3.0, 3.0, 20, 1.0, 1.0, 0.0)
CHUNKED = replace(SERIAL, backend="chunked", chunk_size=64, median_s=0.5)
FUSED = replace(SERIAL, backend="fused", median_s=1.0)


def as_auto(case: BackendTiming) -> BackendTiming:
    return replace(case, is_auto=True)


@pytest.mark.parametrize(
    ("cases", "sentence"),
    [
        (
            [SERIAL, as_auto(CHUNKED), replace(CHUNKED, chunk_size=128, median_s=0.7), FUSED],
            "chunk-scan pays, in chunks of 64: 2.0 x as fast as fused; auto takes chunked in chunks of 64 (500 ms).",
        ),
        (
            [SERIAL, as_auto(CHUNKED), replace(FUSED, median_s=0.25)],
            "chunk-scan does not pay, fused is 2.0 x as fast as chunk-scan at its best, in chunks of 64; "
            "auto takes chunked in chunks of 64 (500 ms), 2.0 x slower than the best: take --backend fused.",
        ),
        (
            [as_auto(SERIAL), CHUNKED],
            "chunk-scan pays, in chunks of 64: 6.0 x as fast as serial; "
            "auto takes serial (3e+03 ms), 6.0 x slower than the best: take --backend chunked --chunk-size 64.",
        ),
        (
            [as_auto(replace(SERIAL, median_s=0.505)), CHUNKED],
            "chunk-scan makes no difference, in chunks of 64 it takes as long as serial; auto takes serial (505 ms).",
        ),
        (
            [replace(SERIAL, median_s=None), as_auto(CHUNKED)],
            "chunk-scan pays, in chunks of 64: the others take over 2 s; auto takes chunked in chunks of 64 (500 ms).",
        ),
        (
            [as_auto(replace(SERIAL, median_s=None))],
            "chunk-scan does not pay, it takes over 2 s; auto takes serial, over 2 s.",
        ),
    ],
)
def test_the_last_sentence_says_whether_chunks_pay_and_whether_auto_is_right(
    cases: list[BackendTiming], sentence: str
) -> None:
    assert conclusion(cases) == f"1x9 with one decay: {sentence}"


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bench").write_text("")
    result = here("gae", "--bench", "--out", tmp_path / "bench")
    assert result.exit_code == 2
    assert "no folder for bench.json and bench.png" in result.stderr
