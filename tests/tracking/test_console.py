from __future__ import annotations

from app.tracking.console import evaluation_line, step_line

METRICS = {
    "eval/accuracy": 0.75,
    "eval/format_rate": 0.5,
    "eval/truncated_fraction": 0.25,
    "eval/mean_length": 3.0,
    "eval/error_count": 0.0,
    "eval/accuracy/difficulty_1": 1.0,
}


def test_right_answers_are_told_in_percent() -> None:
    assert evaluation_line(5, METRICS) == (
        "evaluation at step 5: accuracy 75.0 %  difficulty_1 100.0 %  format 50.0 %  truncated 25.0 %  length 3.0"
    )


def test_the_mean_of_a_plug_in_is_told_as_a_plain_number() -> None:
    metrics = METRICS | {"eval/accuracy": 3.2, "eval/format_rate": None, "eval/accuracy/difficulty_1": -120.5}
    assert evaluation_line(5, metrics) == (
        "evaluation at step 5: accuracy 3.200  difficulty_1 -120.500  truncated 25.0 %  length 3.0"
    )


def test_a_rounded_zero_has_no_sign() -> None:
    metrics = METRICS | {"eval/accuracy": -0.0, "eval/format_rate": None, "eval/accuracy/difficulty_1": 1}
    assert evaluation_line(5, metrics).startswith("evaluation at step 5: accuracy 0.000  difficulty_1 1.000  ")
    step = {"reward/mean": -1e-9, "completions/mean_length": 3.0, "policy/entropy": 0.5, "loss": -1e-9}
    line = step_line(5, step | {"time/step_s": 1.0, "perf/tokens_per_s": 9.0})
    assert line == "step     5  reward 0.000  length 3.0  entropy 0.500  loss +0.0000  1.00 s (9 tokens/s)"


def test_an_evaluation_without_a_value_says_so() -> None:
    metrics = METRICS | {"eval/accuracy": float("nan"), "eval/format_rate": None}
    assert evaluation_line(5, metrics).startswith("evaluation at step 5: accuracy –  ")
