"""Tests that the built-in models know the format of sums and calls, but seldom the answer, and can learn it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from app.evaluation.evaluator import evaluation_metrics, generate_samples
from app.model.io.model_files import open_model
from app.prompts.arithmetic import make_problems
from app.reward.plugin import StepInfo
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from app.training.inputs import read_training_inputs
from scripts import make_tiny_model, make_tiny_teacher, make_tiny_tools_model
from settings import load
from tests.program import REPOSITORY, metrics_of

LEVELS = make_tiny_model.LEVEL_SHARES
TINY = make_tiny_model.make_tokenizer()
TOOLS = make_tiny_model.make_tokenizer(make_tiny_tools_model.CONTROL_TOKENS, make_tiny_tools_model.CHARACTERS)


def test_default_settings_need_no_network() -> None:
    settings = load(None, [], {}).settings
    assert settings == load("quickstart", [], {}).settings
    assert settings.model.path == "builtin:tiny"
    assert settings.data.source == settings.data.eval_source == "builtin:arithmetic"
    assert settings.data.eval_split == "test" and set(settings.data.difficulty) == set(LEVELS)


@pytest.mark.parametrize(
    ("name", "config", "tokenizer"),
    [
        ("tiny", make_tiny_model.CONFIG, TINY),
        ("tiny_teacher", make_tiny_teacher.TEACHER_CONFIG, TINY),
        ("tiny_tools", make_tiny_tools_model.CONFIG, TOOLS),
    ],
)
def test_packaged_model_files_are_small_and_match_their_script(name, config, tokenizer, tmp_path):
    packaged = open_model(f"builtin:{name}").path
    assert sum(path.stat().st_size for path in packaged.iterdir()) < 1_000_000
    make_tiny_model.write_tokenizer_and_config(tmp_path, config, tokenizer)
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text()) == json.loads((packaged / path.name).read_text())


def test_starting_weights_are_trained_on_the_training_split_only() -> None:
    rows, probabilities = make_tiny_model.training_rows(TINY, num_problems=400)
    sums = {str(TINY.decode(ids)).replace(" ", "").split("=")[0] for ids in np.asarray(rows.token_ids)}
    assert len(sums) == 400 and probabilities.sum() == pytest.approx(1)
    assert not sums & held_out_uids("+", 2)
    rows, _ = make_tiny_tools_model.training_rows(TOOLS, num_conversations=300)
    texts = "".join(str(TOOLS.decode(ids)) for ids in np.asarray(rows.token_ids))
    products = re.findall(r"<\|user\|>(\d+\*\d+)=\?", texts)
    assert len(products) == 210 and texts.count("<|user|>?") == 90
    assert not set(products) & held_out_uids("*", 2)


def held_out_uids(operator: str, difficulty: int) -> set[str]:
    problems = make_problems(difficulty=(difficulty,), operators=(operator,), num_problems=10**6, split="test", seed=0)
    return {row.uid.removeprefix("arithmetic/") for row in problems.rows}


def metrics_at_the_start(*overrides: str) -> dict[str, float]:
    """Returns the metrics of an evaluation of a model before any training, as the quickstart evaluates."""
    settings = load(None, ["data.num_problems=64", *overrides], {}).settings
    training_input = read_training_inputs(settings)
    session = Session.open(ScoringSession.open(settings, training_input.model))
    weights = session.to_decode_weights(session.scoring.load_params())
    with training_input.make_rewards(settings) as rewards:
        samples = [*generate_samples(session, weights, training_input.eval_prompts)]
        judged = rewards.grade_held_out(samples, StepInfo())
    return {name: value or 0.0 for name, value in evaluation_metrics(judged.samples, settings).items()}


def test_builtin_tiny_knows_the_answer_format_but_seldom_the_answer() -> None:
    metrics = metrics_at_the_start()
    assert 0.1 <= metrics["eval/accuracy"] <= 0.4
    for level in LEVELS:
        assert 0.05 <= metrics[f"eval/accuracy/difficulty_{level}"] <= 0.5
    assert metrics["eval/format_rate"] >= 0.9
    assert metrics["eval/truncated_fraction"] <= 0.05


def test_builtin_tiny_teacher_answers_nearly_all_problems() -> None:
    metrics = metrics_at_the_start("model.path=builtin:tiny_teacher")
    assert metrics["eval/accuracy"] >= 0.95


def trained(preset: str, runs: Path) -> Path:
    """Returns the directory of a run of a preset."""
    chosen = ("--config", preset, "--set", f"run.dir={runs}", "--set", "run.name=run")
    subprocess.run(
        [sys.executable, "-m", "cli", "train", *chosen],
        cwd=REPOSITORY,
        # Optimizations are on, as for users, because this run is long enough for them.
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"},
        check=True,
        capture_output=True,
    )
    return runs / "run"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_builtin_tiny_reaches_the_accuracy_of_its_teacher_without_a_reward(tmp_path: Path) -> None:
    lines = metrics_of(trained("quickstart_distill", tmp_path))
    accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert accuracy[0] <= 0.3
    # 0.02 is half the 95 % interval of 512 answers.
    assert accuracy[-1] >= metrics_at_the_start("model.path=builtin:tiny_teacher")["eval/accuracy"] - 0.02
    assert {line["reward/mean"] for line in lines[1:]} == {0.0}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_builtin_tiny_tools_learns_to_call_the_calculator(tmp_path: Path) -> None:
    lines = metrics_of(trained("quickstart_tools", tmp_path))
    calls = [line["episode/tool_calls_mean"] for line in lines if "episode/tool_calls_mean" in line]
    assert calls[0] < 0.5 and calls[-1] > 0.95
    accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert accuracy[0] <= 0.1 and accuracy[-1] >= 0.95
