"""Tests of `rollout.slots` and `rollout.scheduler` in the commands: equal samples, less memory, fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.program import (
    assert_same_run,
    here,
    metrics_of,
    of_tiny,
    progress_of,
    records_of,
    settings,
    train_here,
)

SLOTS = "rollout.slots=8"
WORKERS = ("rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4")
SCHEDULED = ("rollout.scheduler=adaptive", *WORKERS)


def texts(path: Path) -> list[tuple[str, int, str]]:
    return [(r["group_id"], r["sample_index"], r["completion"]) for r in records_of(path)]


def test_rollout_writes_the_same_samples_in_the_same_order(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    result = here("rollout", *of_tiny(tiny_model), *settings(SLOTS), "--limit", "6", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert texts(out) == texts(sampled)


@pytest.mark.slow
def test_scheduled_workers_write_the_same_samples_and_a_picture(
    sampled: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out, picture = tmp_path / "samples.jsonl", tmp_path / "slots.png"
    files = ("--out", out, "--timeline", picture)
    result = here("rollout", *of_tiny(tiny_model), *settings(*SCHEDULED), "--limit", "6", *files)
    assert result.exit_code == 0, result.stderr
    assert texts(out) == texts(sampled)
    assert "makespan" in result.stdout and picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_trains_and_is_evaluated_on_the_same_samples(config: Path, finished: Path) -> None:
    result = train_here(config, SLOTS, "rollout.mode=exact", "run.steps=2", "logging.save_rollouts=true")
    assert result.exit_code == 0, result.stderr
    run = config.parent / "runs" / "tiny"
    for ours, theirs in zip(metrics_of(run), metrics_of(finished), strict=False):
        assert ours.get("eval/mean_length") == theirs.get("eval/mean_length")
        assert ours.get("completions/mean_length") == theirs.get("completions/mean_length")
    step = metrics_of(run)[-1]
    assert step["perf/compilations"] == 0
    assert step["perf/rollout/segments"] >= 2
    # Every device prefills the prompts of its own samples, of which it has one at a time.
    assert metrics_of(finished)[2]["perf/rollout/prefill_tokens_saved"] > step["perf/rollout/prefill_tokens_saved"] == 0
    assert 0 <= step["perf/rollout/bubble"] < 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rollout.slots=6",), "rollout.slots: 6 cannot be split over the 8 devices"),
        (("rollout.mode=exact",), "rollout.mode = 'exact' (from --set): samples are bitwise reproducible only with"),
        ((SLOTS, "rollout.mode=exact", "model.dtype=bfloat16"), "model.dtype = 'bfloat16' (from --set) rounding"),
        (
            (SLOTS, "rollout.segment.min=9", "rollout.segment.max=8"),
            "rollout.segment.min = 9 (from --set) exceeds",
        ),
        (("rollout.slots=0",), "rollout.slots"),
        (
            ("rollout.scheduler=sync", "rollout.workers.fast.slots=6"),
            "rollout.workers.fast.slots: 6 cannot be split over the 4",
        ),
        ((*SCHEDULED, "rollout.workers.fast.count=8"), "9 workers need a device each, but there are only 8"),
    ],
)
def test_slots_that_cannot_be_are_refused(config: Path, overrides: tuple[str, ...], message: str) -> None:
    result = train_here(config, *overrides)
    assert result.exit_code == 2 and message in result.stderr
    assert not (config.parent / "runs").exists()


@pytest.mark.slow
def test_a_resumed_run_schedules_by_the_lengths_that_it_knew(config: Path) -> None:
    """Prompts repeat, and the lengths of their earlier samples determine which rows share a program."""
    alone = ("rollout.workers.fast.slots=16", "rollout.workers.heavy.count=0")
    given = ("rollout.scheduler=adaptive", *alone, "rollout.segment.min=1", "data.num_problems=4", "eval.every_steps=0")
    assert train_here(config, *given, "run.steps=4", "run.name=whole").exit_code == 0
    for steps, resume in ((2, "never"), (4, "must")):
        assert train_here(config, *given, f"run.steps={steps}", "run.name=parts", resume=resume).exit_code == 0
    runs = config.parent / "runs"
    assert_same_run(runs / "parts", runs / "whole", step=4)
    saved = progress_of(runs / "parts", 2)
    assert len(saved["lengths"]) == 4
    samples = [
        record for step in (1, 2) for record in records_of(runs / "parts" / "rollouts" / f"step_{step:06d}.jsonl")
    ]
    lengths = sorted(len(record["completion_token_ids"]) for record in samples)
    assert sorted(tokens for tokens, _ in saved["finished_lengths"]) == lengths
