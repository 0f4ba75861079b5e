"""`grpo gae --bench`: what is measured, checked, told and drawn; seconds are not asked about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.training.gae_bench import Measured, Shape, conclusion, interleaved, oracle, parse_shapes
from settings.errors import InputError
from settings.schema import Algorithm
from tests.training.program import here


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
        assert case["gb_per_s"] == pytest.approx(16 * 3 * 70 / case["median_s"] / 1e9)
    for decay in ("scalar", "masked"):
        assert sum(case["is_auto"] for case in report["cases"] if case["decay"] == decay) == 1
    lines = result.stdout.splitlines()
    assert "% of copy" in lines[2]
    assert lines[-1].startswith("3x70 with a mask: chunk-scan ")
    assert "auto takes" in lines[-1]


@pytest.mark.parametrize("mode", ["skip", "through", "zero"])
def test_the_oracle_follows_the_mask_mode(mode: str) -> None:
    rewards, values, mask = np.ones((1, 3)), np.ones((1, 3)), np.array([[True, False, True]])
    algorithm = Algorithm(gamma=0.5, lam=0.5, mask_mode=mode)  # pyright: ignore[reportArgumentType]
    advantages, returns = oracle(rewards, values, mask, algorithm)
    first = {"skip": 1 + 0.5 - 1, "through": 0.5 + 0.25 * 0.5, "zero": 0.0 + 0.25 * 0.5}[mode]
    np.testing.assert_allclose(advantages, [[first, 0, 0]])
    np.testing.assert_allclose(returns, [[first + 1, 0, 1]])


@pytest.mark.parametrize("text", ["", "16", "0x4", "4x-1", "4x4;5x5", "4x4,", "99999x99999"])
def test_shapes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--shapes: "):
        parse_shapes(text)


def test_shapes_are_rows_and_tokens_each_once() -> None:
    assert parse_shapes("16x8192, 2x3,16x8192") == [Shape(16, 8192), Shape(2, 3)]


def test_cases_are_timed_in_turn() -> None:
    told: list[str] = []
    times = interleaved([lambda: told.append("a"), lambda: told.append("b")], 3)
    assert [len(of_one) for of_one in times] == [3, 3]
    blocks = "".join(told[2:]).replace("aa", "a").replace("bb", "b")
    while "aa" in blocks or "bb" in blocks:
        blocks = blocks.replace("aa", "a").replace("bb", "b")
    assert blocks == "ababab"


def test_the_last_sentence_says_whether_chunks_pay() -> None:
    serial = Measured("1x9", "scalar", "serial", None, False, 0.1, 3.0, 3.0, 20, 1.0, 1.0, 0.0)
    chunked = replace(serial, backend="chunked", chunk_size=64, is_auto=True, median_s=0.5)
    slower = replace(chunked, chunk_size=128, is_auto=False, median_s=4.0)
    assert conclusion([serial, chunked, slower]) == (
        "1x9 with one decay: chunk-scan pays, 6.0 x as fast as serial at its best chunk size, 64; "
        "auto takes chunked in chunks of 64 (500 ms)."
    )
    assert "chunk-scan does not pay, 0.8 x" in conclusion([serial, slower])
    assert "serial takes over 2 s" in conclusion([replace(serial, median_s=None), chunked])


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bench").write_text("")
    result = here("gae", "--bench", "--out", tmp_path / "bench")
    assert result.exit_code == 2
    assert "no folder for bench.json and bench.png" in result.stderr
