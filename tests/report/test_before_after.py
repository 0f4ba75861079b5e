from __future__ import annotations

import pytest

from app.checkpoint.retention import BestCheckpoint
from app.report.before_after import best_evaluation, summary_text


def step(number: int, reward: float, **evaluation: float) -> dict[str, float]:
    metrics = {f"eval/{name}": value for name, value in evaluation.items()}
    return {"step": number, "reward/mean": reward, "time/step_s": float(number), **metrics}


def test_before_and_after_stand_side_by_side() -> None:
    before = {"step": 0, "eval/accuracy": 0.125, "eval/mean_length": 3.25}
    text = summary_text(
        [before, step(1, 0.0), step(2, 0.5), step(3, 1.0), step(4, 0.5, accuracy=0.9, mean_length=2.0)],
        path="runs/a",
    )
    assert text.splitlines() == [
        f"{'held out':<28}{'step 0':>12}{'step 4':>12}",
        f"{'accuracy':<28}{'12.5 %':>12}{'90.0 %':>12}",
        f"{'mean_length':<28}{'3.2':>12}{'2.0':>12}",
        f"{'reward, mean of 2 steps':<28}{'0.250':>12}{'0.750':>12}",
        "4 steps, median 2.50 s a step, 10 s in all",
        "everything is in runs/a",
    ]


def test_the_best_checkpoint_is_named() -> None:
    lines = summary_text([step(1, 0.25)], path="runs/a", best=BestCheckpoint(80, "eval/accuracy", 0.949)).splitlines()
    assert lines[-2:] == ["best eval/accuracy 94.9 % after step 80: checkpoints/best", "everything is in runs/a"]
    lines = summary_text([], path="runs/a", best=BestCheckpoint(2, "eval/mean_length", 7.25)).splitlines()
    assert lines[0] == "best eval/mean_length 7.2 after step 2: checkpoints/best"


def test_a_run_that_is_never_better_than_its_start_says_so() -> None:
    start, best = {"step": 0, "eval/accuracy": 0.5}, BestCheckpoint(0, "eval/accuracy", 0.5)
    lines = summary_text([start, step(1, 0.25, accuracy=0.25)], path="runs/a", best=best).splitlines()
    assert lines[-2] == (
        "training has not improved eval/accuracy on the start (step 0): 50.0 %; there is no checkpoints/best"
    )
    # Nothing was evaluated since the start.
    assert "not improved" not in summary_text([start, step(1, 0.25)], path="runs/a", best=best)


def test_tokens_and_epochs_of_the_run_are_counted() -> None:
    last = step(2, 0.5) | {"data/total_tokens": 1234567, "data/epoch": 0.0625}
    lines = summary_text([step(1, 0.5), last], path="runs/a").splitlines()
    assert "2 steps, median 1.50 s a step, 3 s in all; 1,234,567 tokens, 0.0625 epochs of the data" in lines
    lines = summary_text([{**last, "data/epoch": None}], path="runs/a").splitlines()
    assert "1 step, median 2.00 s a step, 2 s in all; 1,234,567 tokens" in lines


def test_the_mean_of_a_plug_in_is_no_percentage() -> None:
    before = {"step": 0, "eval/accuracy": 3.2, "eval/format_rate": None, "eval/truncated_fraction": 0.5}
    history = [before, {**before, "step": 1, "eval/accuracy": -0.00125, "reward/mean": 0.5}]
    lines = summary_text(history, path="runs/a", best=BestCheckpoint(1, "eval/accuracy", 3.2)).splitlines()
    assert lines[1:3] == [
        f"{'accuracy':<28}{'3.200':>12}{'-0.001':>12}",
        f"{'truncated_fraction':<28}{'50.0 %':>12}{'50.0 %':>12}",
    ]
    assert "best eval/accuracy 3.200 after step 1: checkpoints/best" in lines


def test_without_evaluation_only_the_reward_is_compared() -> None:
    text = summary_text([step(1, 0.25)], path="runs/a")
    assert text.splitlines() == [
        f"{'reward, mean of 1 step':<28}{'0.250':>12}{'0.250':>12}",
        "1 step, median 1.00 s a step, 1 s in all",
        "everything is in runs/a",
    ]


def test_a_run_that_did_nothing_still_says_where_it_is() -> None:
    assert summary_text([], path="runs/a") == "everything is in runs/a"


@pytest.mark.parametrize(
    ("accuracies", "sentence"),
    [
        ([0.5, 0.25, 0.4], "Training has not improved eval/accuracy on the start (step 0): 50.0 %."),
        ([0.5, 0.25, 0.5], "Best eval/accuracy 50.0 % after step 2."),
        ([0.5, 0.75, 0.75], "Best eval/accuracy 75.0 % after step 1."),
        ([0.5, None, None], ""),
    ],
)
def test_the_best_evaluation_is_named_or_that_there_is_none(accuracies: list[float | None], sentence: str) -> None:
    history = [{"step": step, "eval/accuracy": value} for step, value in enumerate(accuracies)]
    assert best_evaluation(history, "eval/accuracy") == sentence
