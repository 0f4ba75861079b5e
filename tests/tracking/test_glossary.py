"""README's glossary names every metric of a run, and nothing else."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from app.evaluation.metrics import estimate_metrics
from tests.evaluation.test_evaluator import asked, table_of
from tests.program import REPOSITORY, metrics_of, train_here
from tests.run_fixtures import NO_REPORT, TINY, write_config
from tests.tiny_directory import write_reward_model
from tests.training.test_async_training import SCHEDULED

PLACEHOLDERS = {"<function>": r"[^/]+", "<name>": r"[^/]+", "<n>": r"\d+", "<k>": r"\d+"}


@pytest.fixture(scope="module")
def judged_by_plug_in(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a step of PPO with a reward model beside a function that gives a further number, sampled by
    scheduled workers that run ahead, and corrected."""
    folder = tmp_path_factory.mktemp("judged")
    config = write_config(folder, TINY + NO_REPORT, tiny_model)
    model = f"reward.model={write_reward_model(folder / 'judge')}"
    (folder / "judge.py").write_text("def judge(completion): return {'score': 1.0, 'length': len(completion)}\n")
    functions = f"reward.functions=['{folder / 'judge.py'}:judge']"
    credit = ("algorithm.name=ppo", "algorithm.beta=0.1", "algorithm.kl_target=0.1", "algorithm.correction=truncate")
    result = train_here(
        config, functions, model, *credit, *SCHEDULED, "rollout.max_staleness=1", "run.steps=1", "eval.every_steps=0"
    )
    assert result.exit_code == 0, result.stderr
    return folder / "runs" / "tiny"


def glossary() -> dict[str, list[str]]:
    """Each name of the table, braces written out -> the other cells of its row."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    section = text[text.index("\n## Metrics\n") :]
    rows = [line.strip("|").split("|") for line in section[: section.index("\n\nEverything outside")].splitlines()]
    entries = {}
    for cells in rows[rows.index(next(row for row in rows if set("".join(row)) == {"-"})) + 1 :]:
        for name in re.findall(r"`([^`]+)`", cells[0]):
            entries |= {key: [cell.strip() for cell in cells[1:]] for key in written_out(name)}
    return entries


def written_out(name: str) -> list[str]:
    """`a/{b,c}_d` as `a/b_d` and `a/c_d`."""
    parts = [part.strip("{}").split(",") if part.startswith("{") else [part] for part in re.split(r"(\{.*?\})", name)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def matches(entry: str, metric: str) -> bool:
    pattern = re.escape(entry)
    for placeholder, meaning in PLACEHOLDERS.items():
        pattern = pattern.replace(re.escape(placeholder), meaning)
    return re.fullmatch(pattern, metric) is not None


def metrics_of_real_runs(*runs: Path) -> set[str]:
    """And of an evaluation by several samples a prompt."""
    several = estimate_metrics(table_of(asked(("2", "3"), ("2", "2")), 2), num_samples=2)
    return {*several, *(name for run in runs for line in metrics_of(run) for name in line)}


def test_every_metric_of_a_run_is_in_the_glossary(finished: Path, uninterrupted: Path, judged_by_plug_in: Path) -> None:
    entries = glossary()
    metrics = metrics_of_real_runs(finished, uninterrupted, judged_by_plug_in)
    assert len(metrics) > 40
    assert [name for name in sorted(metrics) if not any(matches(entry, name) for entry in entries)] == []


def test_the_glossary_names_no_metric_that_no_run_writes(
    finished: Path, uninterrupted: Path, judged_by_plug_in: Path
) -> None:
    metrics = metrics_of_real_runs(finished, uninterrupted, judged_by_plug_in)
    assert [entry for entry in glossary() if not any(matches(entry, name) for name in metrics)] == []


def test_every_entry_says_what_it_means_what_is_healthy_and_what_to_do_else() -> None:
    assert {name: cells for name, cells in glossary().items() if len(cells) != 3 or not all(cells)} == {}


def test_braces_are_written_out() -> None:
    assert written_out("time/{rollout,eval}_s") == ["time/rollout_s", "time/eval_s"]
    assert written_out("loss") == ["loss"]
    assert matches("reward/<function>/mean", "reward/gsm8k/mean") and not matches("reward/mean", "reward/gsm8k/mean")
