"""Tests that the notebooks of `sops/recipes` run, each cell as Python, and are stored without outputs.

A notebook is run with other values in the cell tagged `parameters`, as papermill does it: the tiny built-in model and a
few steps on the CPU. The cell tagged `install` is left out.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.program import REPOSITORY, metrics_of

RECIPES = REPOSITORY / "sops" / "recipes"


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def tags(cell: dict[str, Any]) -> list[str]:
    return cell["metadata"].get("tags", [])


def run_notebook(name: str, **parameters: Any) -> dict[str, Any]:
    variables: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(RECIPES / name), start=1):
        if "install" in tags(cell):
            continue
        exec(compile("".join(cell["source"]), f"{name}, code cell {number}", "exec"), variables)
        if "parameters" in tags(cell):
            assert parameters.keys() <= variables.keys()
            variables |= parameters
    return variables


@pytest.fixture(autouse=True)
def without_windows(in_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")


def test_notebooks_are_stored_without_outputs_and_have_one_parameters_cell() -> None:
    for notebook in sorted(RECIPES.glob("*.ipynb")):
        cells = code_cells(notebook)
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
        assert [tags(cell) for cell in cells].count(["parameters"]) == 1
        magic = [cell for cell in cells if any(line.startswith(("%", "!")) for line in cell["source"])]
        assert [tags(cell) for cell in magic] == [["install"]] * len(magic)


@pytest.mark.slow
def test_laptop_notebook_trains_on_its_own_rows_and_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variables = run_notebook(
        "train_on_a_laptop.ipynb", STEPS=2, PROMPTS_PER_STEP=4, SAMPLES_PER_PROMPT=4, NUM_HELD_OUT=8
    )
    run = tmp_path / "runs" / "laptop"
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2]
    assert {"reward/right_sum/mean", "reward/right_digits/mean"} <= metrics_of(run)[-1].keys()
    printed = capsys.readouterr().out
    assert printed.count("of 8 held-out sums are right") == 2
    assert len(variables["judged"].records) == 8
    assert len(variables["figure"].axes[0].lines) == 2


@pytest.mark.slow
def test_kaggle_notebook_runs_on_the_cpu_with_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = {
        **{"model.path": "builtin:tiny", "model.dtype": "float32", "mesh.platform": "cpu", "run.steps": 4},
        **{"data.source": "builtin:arithmetic", "data.system_prompt": None, "data.max_prompt_length": 16},
        **{"rollout.max_new_tokens": 4, "rollout.prompts_per_step": 4, "rollout.prefill_length_min": 16},
        **{"reward.functions": ["arithmetic"], "eval.num_prompts": 8, "eval.every_steps": 2},
    }
    run_notebook("kaggle_v5e_8.ipynb", OVERRIDES=tiny, RUN_DIR="runs", RESULTS_DIR="kept")
    run = tmp_path / "runs" / "gsm8k"
    assert [path.name for path in run.parent.iterdir()] == ["gsm8k"]
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2, 3, 4]
    assert (tmp_path / "kept" / "gsm8k" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert capsys.readouterr().out.count("of the held-out problems are solved") == 3
