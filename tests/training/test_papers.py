"""Presets that are named after papers, from end to end; and dynamic sampling in a run that stops and goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.jsonl import read_jsonl
from app.sample_records import sample_from_record
from settings import load
from tests.training.program import assert_same_run, here, metrics_of, progress_of, settings, train_here

PRESETS = ("dr_grpo", "rloo", "gspo", "dapo", "cispo")
TINY_STEP = settings(
    *("run.name=tiny", "run.steps=1", "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=4"),
    *("algorithm.mini_batch_prompts=2", "eval.every_steps=0", "checkpoint.best_metric=null", "logging.report=false"),
    *("data.num_problems=40", "algorithm.beta=0", "logging.completions_every_steps=0"),
)
FILTERED = ("algorithm.name=dapo", "algorithm.max_rounds=3", "reward.overlong_buffer=2", "eval.every_steps=0")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_a_tiny_step_and_says_what_it_changes(preset: str, tmp_path: Path) -> None:
    result = here("train", "--config", preset, "--set", f"run.dir={tmp_path}", *TINY_STEP)
    assert result.exit_code == 0, result.stderr
    changes = load(preset, ["algorithm.beta=0"], {}).algorithm_changes
    assert changes is not None and changes.startswith(preset)
    assert changes in result.stderr
    (line,) = metrics_of(tmp_path / "tiny")
    assert np.isfinite(line["loss"])
    assert line["policy/nonfinite_updates"] == 0


def test_grpo_changes_nothing_and_says_nothing(finished: Path) -> None:
    assert load(str(finished / "settings.yaml"), [], {}).algorithm_changes is None
    for line in metrics_of(finished)[1:]:
        assert (line["rollout/num_rounds"], line["reward/filtered_group_fraction"]) == (1, 0)
        assert line["reward/sampled_mean"] == pytest.approx(line["reward/mean"])


def test_a_filtered_run_that_was_stopped_asks_the_same_prompts_as_one_in_one_go(config: Path) -> None:
    straight, stopped = (config.parent / "runs" / name for name in ("straight", "tiny"))
    assert train_here(config, *FILTERED, "run.name=straight").exit_code == 0
    assert train_here(config, *FILTERED, "run.steps=2").exit_code == 0
    result = train_here(config, *FILTERED, resume="must")
    assert result.exit_code == 0, result.stderr
    assert_same_run(stopped, straight, step=4)
    lines = metrics_of(straight)
    rounds = [line["rollout/num_rounds"] for line in lines]
    assert max(rounds) > 1
    assert progress_of(straight, 4)["position"] == 4 * sum(rounds)
    for step, line in enumerate(lines, start=1):
        samples = samples_of(straight, step)
        by_group = {s.group_id: [t for t in samples if t.group_id == s.group_id] for s in samples}
        assert len(by_group) == 4
        fillers = [group for group in by_group.values() if not any(s.mask.any() for s in group)]
        assert len(fillers) == line["rollout/filler_group_count"]
        for group in by_group.values():
            graded = set()
            for sample in group:
                beyond = max(len(sample.completion_ids) - 2, 0)
                assert sample.rewards is not None and sample.rewards["overlong"] == -beyond / 2
                graded.add(sample.rewards["arithmetic"] + 0.5 * sample.rewards["arithmetic_format"])
            # Whatever length cost.
            assert (len(graded) == 1) == (group in fillers)


def samples_of(run: Path, step: int):
    path = run / "rollouts" / f"step_{step:06d}.jsonl"
    return [sample_from_record(record, where=f"{path}:{line}") for line, record in read_jsonl(path)]
