"""Tests `grpo gae --bench`: cases, checks, report and plot, but not speed."""

import json
from pathlib import Path

import numpy as np
import pytest

from app.stages.gae_benchmark import BenchmarkShape, GaeRule, make_workloads, parse_shapes
from settings.errors import InputError
from tests.program import here, succeeded


def test_gae_benchmark_measures_checks_and_plots_every_backend(tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    result = succeeded(here("gae", "--bench", "--shapes", "3x70", "--gamma", "0.9", "--out", folder))
    report = json.loads((folder / "bench.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.png"]
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert report["settings"] == {"gamma": 0.9, "lam": 0.95, "mask_mode": "skip"}
    assert {case["rows"] for case in report["cases"]} == {"full", "masked", "packed"}
    assert {"loop", "chunked", "numpy"} <= {case["backend"] for case in report["cases"]}
    num_packed = make_workloads(BenchmarkShape(3, 70))[2].row_tokens
    loops = {case["rows"]: case["median_s"] for case in report["cases"] if case["backend"] == "loop"}
    copies = {case["rows"]: case for case in report["cases"] if case["backend"] == "copy"}
    cases = [case for case in report["cases"] if case["backend"] not in ("copy", "loop")]
    for case in cases:
        assert case["max_error"] < 1e-5
        assert 0 < case["median_s"] <= case["p90_s"]
        num_bytes = {"full": 16 * 3 * 70, "masked": 17 * 3 * 70, "packed": 17 * num_packed}[case["rows"]]
        assert case["gb_per_s"] == pytest.approx(num_bytes / case["median_s"] / 1e9)
        assert case["times_loop"] == pytest.approx(loops[case["rows"]] / case["median_s"])
        assert case["memory_bytes"] >= (8 * num_packed if case["rows"] == "packed" else 8 * 3 * 70)
        assert case["percent_of_copy"] == pytest.approx(100 * case["gb_per_s"] / copies[case["rows"]]["gb_per_s"])
    for rows in ("full", "masked", "packed"):
        assert sum(case["is_auto"] for case in cases if case["rows"] == rows) == 1
    assert result.stdout.splitlines()[-1].startswith("3x70, packed samples: ")


def test_gae_benchmark_times_the_samples_and_matrices_of_a_file(tmp_path: Path) -> None:
    samples, matrices = tmp_path / "samples.jsonl", tmp_path / "rows.npz"
    lengths = (5, 70, 1)
    record = {"reward": 1.0, "finish_reason": "length"}
    lines = [{**record, "completion_ids": [7] * n, "loss_mask": [1] * n, "values": [0.5] * (n + 1)} for n in lengths]
    samples.write_text("\n".join(map(json.dumps, lines)))
    np.savez(matrices, rewards=np.ones((2, 9)), values=np.ones((2, 10)), mask=np.eye(2, 9))
    for path, shape, rows in ((samples, "3x70", "packed"), (matrices, "2x9", "masked")):
        result = here("gae", "--bench", "--input", path, "--out", tmp_path / rows)
        assert result.exit_code == 0, result.stderr
        cases = json.loads((tmp_path / rows / "bench.json").read_text())["cases"]
        assert {(case["shape"], case["rows"]) for case in cases} == {(shape, rows)}
        assert max(case["max_error"] or 0 for case in cases) < 1e-5


def test_gae_benchmark_refuses_unusable_input(tmp_path: Path) -> None:
    folder = tmp_path / "a file"
    folder.touch()
    again = here("gae", "--bench", "--out", folder)
    assert again.exit_code == 2 and "--out: cannot create the folder" in again.stderr
    both = here("gae", "--bench", "--input", folder, "--shapes", "2x2", "--out", tmp_path / "bench")
    assert both.exit_code == 2 and "--shapes cannot be combined with --input" in both.stderr


@pytest.mark.parametrize("text", ["", "16", "0x4", "4x-1", "4x4;5x5", "4x4,", "99999x99999"])
def test_gae_benchmark_shapes_are_parsed_as_rows_and_tokens_without_duplicates(text: str) -> None:
    assert parse_shapes("16x8192, 2x3,16x8192") == [BenchmarkShape(16, 8192), BenchmarkShape(2, 3)]
    with pytest.raises(InputError, match="--shapes: "):
        parse_shapes(text)


@pytest.mark.parametrize("mode", ["skip", "through", "zero"])
def test_gae_benchmark_check_finds_an_error_in_any_row(mode: str) -> None:
    rule = GaeRule(0.9, 0.8, mode)
    for work in make_workloads(BenchmarkShape(40, 250)):
        result, error_of = work.estimate(rule, "numpy", None), work.make_check(rule)
        assert error_of(result) < 1e-5
        for row, token in ((0, 0), (-1, 0), (0, -1), (-1, -1)):
            wrong = [part.copy() for part in result]
            wrong[1][row, token if token == 0 else work.row_tokens - 1] += 1.0
            assert error_of(wrong) > 0.01
