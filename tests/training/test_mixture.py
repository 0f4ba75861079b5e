"""Tests of training on a weighted mixture of data sources."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.program import assert_same_run, here, records_of, settings, train_here
from tests.replays import step_file
from tests.run_fixtures import NO_REPORT, TINY, write_config

REWARDS = """
def by_source(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source.endswith("sums.jsonl") or data_source == "builtin:arithmetic"
    return float(data_source == "builtin:arithmetic")
"""


def mixed(folder: Path, template: str, model: Path, *, weight: int = 3) -> Path:
    """Writes the configuration of a run on a file and on the generator, whose reward depends on the source."""
    rows = [{"prompt": f"{i} + 1 = ?", "answer": str(i + 1)} for i in range(9)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    source = f"[{{{{source: {folder}/sums.jsonl, weight: {weight}}}}}, {{{{source: 'builtin:arithmetic'}}}}]"
    data = f"data: {{{{source: {source}, eval_source: 'builtin:arithmetic', "
    function = f"{{{{name: of, function: '{folder}/rewards.py:by_source', weight: 0.5}}}}"
    text = template.replace("data: {{", data).replace("functions: [arithmetic", f"functions: [arithmetic, {function}")
    assert text.count("builtin:arithmetic") == 2 and text.count("by_source") == 1
    return write_config(folder, text + NO_REPORT, model)


def test_a_run_takes_each_source_by_its_weight_and_goes_on_where_it_was(tmp_path: Path, tiny_model: Path) -> None:
    config, runs = mixed(tmp_path, TINY, tiny_model), tmp_path / "runs"
    assert train_here(config).exit_code == 0
    samples = [one for step in range(1, 5) for one in records_of(step_file(runs / "tiny", step))]
    prompts = {(one["uid"].rpartition("/")[0], one["group_id"]): one["columns"]["data_source"] for one in samples}
    file = str(tmp_path / "sums.jsonl")
    assert Counter(prompts.values()) == {file: 12, "builtin:arithmetic": 4}
    # Twelve prompts of nine rows: the second epoch has begun.
    assert len({uid for uid, _ in prompts if uid.startswith("0/")}) == 9
    for one in samples:
        assert one["rewards"]["of"] == float(one["columns"]["data_source"] == "builtin:arithmetic")
    moved = ("run.name=resumed",)
    assert train_here(config, *moved, "run.steps=2").exit_code == 0
    other = train_here(mixed(tmp_path, TINY, tiny_model, weight=2), *moved, resume="must")
    assert other.exit_code == 2 and "--resume: the weights of the sources in data.source changed" in other.stderr
    result = train_here(mixed(tmp_path, TINY, tiny_model), *moved, resume="must")
    assert result.exit_code == 0, result.stderr
    assert_same_run(runs / "resumed", runs / "tiny", step=4)


def test_the_other_commands_read_a_mixture(tmp_path: Path, tiny_model: Path) -> None:
    config = mixed(tmp_path, TINY, tiny_model)
    report = here("doctor", "--config", config)
    assert report.exit_code == 0, report.stdout
    assert "sums.jsonl: 9 rows" in report.stdout
    foreseen = here("train", "--config", config, "--dry-run", "--json")
    assert foreseen.exit_code == 0, foreseen.stderr
    assert json.loads(foreseen.stdout)["epochs_of_data"] == pytest.approx(4 * 4 / 49)
    out = tmp_path / "samples.jsonl"
    drawn = here("rollout", "--config", config, "--limit", "10", "--out", out)
    assert drawn.exit_code == 0, drawn.stderr
    assert Counter(one["uid"][0] for one in records_of(out)) == {"0": 9 * 4, "1": 4}
    judged = here("evaluate", "--config", config, *settings("eval.num_prompts=4"), "--out", tmp_path / "judged.jsonl")
    assert judged.exit_code == 0, judged.stderr
    assert {one["columns"]["data_source"] for one in records_of(tmp_path / "judged.jsonl")} == {"builtin:arithmetic"}
