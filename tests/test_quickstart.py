"""Tests that the built-in model is weak at sums, knows the format, and learns sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from app.evaluation.evaluator import evaluate, evaluation_metrics
from app.model.io.model_files import open_model
from app.prompts.arithmetic import make_problems
from app.prompts.tokenizer import load_tokenizer
from app.reward.plugin import StepInfo
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from app.training.inputs import read_training_inputs
from scripts import make_tiny_model
from settings import load

REPOSITORY = Path(__file__).resolve().parent.parent
TINY = REPOSITORY / "app" / "model" / "builtin" / "tiny"
LEVELS = make_tiny_model.LEVEL_SHARES


def test_the_default_settings_need_no_network() -> None:
    settings = load(None, [], {}).settings
    assert settings == load("quickstart", [], {}).settings
    assert settings.model.path == "builtin:tiny"
    assert settings.data.source == "builtin:arithmetic"
    assert (settings.data.eval_source, settings.data.eval_split) == ("builtin:arithmetic", "test")
    assert set(settings.data.difficulty) == set(LEVELS)


def test_the_packaged_config_and_tokenizer_are_what_the_script_writes(tmp_path: Path) -> None:
    files = open_model("builtin:tiny")
    make_tiny_model.write_tokenizer_and_config(tmp_path, make_tiny_model.CONFIG, make_tiny_model.make_tokenizer())
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text()) == json.loads((TINY / path.name).read_text())
    tokenizer = load_tokenizer(files)
    ids = tokenizer.encode("47 + 38 = ?")
    assert len(ids) == 7
    assert tokenizer.decode(ids) == "47+38=?"


def test_starting_weights_are_trained_on_the_training_split_only() -> None:
    tokenizer = load_tokenizer(open_model("builtin:tiny"))
    rows, probabilities = make_tiny_model.training_rows(make_tiny_model.make_tokenizer(), num_problems=400)
    sums = {tokenizer.decode(ids).split("=")[0] for ids in np.asarray(rows.token_ids)}
    held_out = make_problems(difficulty=tuple(LEVELS), operators=("+",), num_problems=10**6, split="test", seed=0)
    assert len(sums) == 400
    assert not sums & {row.uid.removeprefix("arithmetic/") for row in held_out.rows}
    assert probabilities.sum() == pytest.approx(1)


def test_the_starting_model_has_the_format_but_not_the_skill() -> None:
    settings = load(None, ["data.num_problems=64"], {}).settings
    training_input = read_training_inputs(settings)
    session = Session.open(ScoringSession.open(settings, training_input.model))
    weights = session.to_decode_weights(session.scoring.load_params())
    with training_input.make_rewards(settings) as rewards:
        judged = evaluate(session, weights, training_input.eval_prompts, rewards, StepInfo())
    metrics = {name: value or 0.0 for name, value in evaluation_metrics(judged.samples, settings).items()}
    assert 0.1 <= metrics["eval/accuracy"] <= 0.4
    for level in LEVELS:
        assert 0.05 <= metrics[f"eval/accuracy/difficulty_{level}"] <= 0.5
    assert metrics["eval/format_rate"] >= 0.9
    assert metrics["eval/truncated_fraction"] <= 0.05


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tiny_decoder_learns_to_call_the_calculator(tmp_path: Path) -> None:
    chosen = ("--config", "quickstart_tools", "--set", f"run.dir={tmp_path}", "--set", "run.name=tools")
    subprocess.run(
        [sys.executable, "-m", "cli", "train", *chosen],
        cwd=REPOSITORY,
        # As users have it: this is long enough for a compiler that takes its time.
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"},
        check=True,
        capture_output=True,
    )
    lines = list(map(json.loads, (tmp_path / "tools" / "metrics.jsonl").read_text().splitlines()))
    steps = [line for line in lines if "episode/tool_calls_mean" in line]
    assert steps[0]["episode/tool_calls_mean"] < 0.5 and steps[-1]["episode/tool_calls_mean"] > 0.95
    accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert accuracy[0] <= 0.1 and accuracy[-1] >= 0.95
