"""Tests of whole runs with the presets of published algorithms, and of dynamic sampling in a resumed run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.records.jsonl import read_jsonl
from app.records.sample_json import sample_from_record
from settings import load
from settings.loading.algorithm_presets import ALGORITHM_PRESETS
from settings.loading.config_file import preset_names
from tests.program import assert_same_run, here, metrics_of, progress_of, settings, train_here

SHAPES = (
    *("algorithm.mini_batch_prompts=2", "algorithm.rows_per_device=1", "score.rows_per_device=1"),
    "model.remat=none",
)
"""One sample on each of eight devices, which compiles the smallest programs."""
TINY_STEP = (
    *("run.name=tiny", "run.dir=runs", "eval.every_steps=0", "eval.num_prompts=1"),
    *("checkpoint.every_steps=1", "checkpoint.keep=1", "checkpoint.best_metric=null", "logging.report=false"),
    *("logging.completions_every_steps=0", "logging.wandb_project=null", "mesh.shape=auto"),
    *(
        "mesh.coordinator_address=null",
        "mesh.platform=auto",
        "model.path=model",
        "model.dtype=float32",
        "model.logits_chunk=1024",
    ),
    *("data.source=builtin:arithmetic", "data.num_problems=40", "data.difficulty=[1, 2]", "data.system_prompt=null"),
    *('data.operators=["+"]', "env.source=null", "env.tools=[]", "env.max_turns=8", "env.max_turn_tokens=null"),
    "env.max_observation_tokens=1024",
    *("data.max_prompt_length=16", "rollout.prefill_length_min=16", "rollout.max_new_tokens=4"),
    *("rollout.prompts_per_step=4", "rollout.group_size=4", "optimizer.learning_rate=1e-3"),
    *("optimizer.schedule=constant", "optimizer.final_fraction=0", "optimizer.beta2=0.999"),
    *("data.eval_source=null", "rollout.slots=auto", "rollout.kv_blocks=auto"),
    *("reward.functions=[arithmetic, {name: arithmetic_format, weight: 0.5}]", "reward.on_error=raise", *SHAPES),
)
"""The smallest model, data and shapes for all presets, which then differ only in their algorithm."""
TINY_CRITIC = ("critic.rows_per_device=1", "critic.learning_rate=1e-3")
FILTERED = ("algorithm.name=dapo", "algorithm.max_rounds=3", "reward.overlong_buffer=2", "eval.every_steps=0", *SHAPES)


def tiny_step(preset: str) -> tuple[str, ...]:
    """Returns the settings of a run whose last step trains the policy."""
    chosen = load(preset, [], {}).settings
    shorter = ("reward.overlong_buffer=2",) if chosen.reward.overlong_buffer else ()
    if not chosen.has_critic:
        return (*TINY_STEP, *shorter, "run.steps=1")
    # With a step before it, in which the policy is frozen.
    return (*TINY_STEP, *shorter, *TINY_CRITIC, "critic.warmup_steps=1", "run.steps=2")


PRESET_OF_ALGORITHM = {load(preset, [], {}).settings.algorithm.name: preset for preset in preset_names()}
"""A preset of each algorithm; with a tiny model, presets of the same algorithm train alike."""


def test_every_algorithm_has_a_preset() -> None:
    assert PRESET_OF_ALGORITHM.keys() == set(ALGORITHM_PRESETS)


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(PRESET_OF_ALGORITHM.values()))
def test_a_preset_trains_a_tiny_step_and_says_what_it_changes(
    preset: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(tiny_model)
    result = here("train", "--config", preset, *settings(*tiny_step(preset)))
    assert result.exit_code == 0, result.stderr
    chosen = load(preset, [], {})
    assert (chosen.algorithm_changes or "") in result.stderr
    *frozen, line = metrics_of(tmp_path / "runs" / "tiny")
    assert all(one["loss"] is None for one in frozen)
    assert np.isfinite(line["loss"])
    assert line["policy/nonfinite_updates"] == 0
    assert (line["policy/kl"] is not None) == (chosen.settings.algorithm.beta > 0)
    assert ("policy/kl_coef" in line) == chosen.settings.algorithm.kl_in_reward
    assert ("value/loss" in line) == chosen.settings.has_critic


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
            for sample in group:
                beyond = max(len(sample.completion_ids) - 2, 0)
                assert sample.rewards is not None and sample.rewards["overlong"] == -beyond / 2
            # Equal but for what length cost.
            reward_parts = [s.rewards or {} for s in group]
            right = {rewards["arithmetic"] + 0.5 * rewards["arithmetic_format"] for rewards in reward_parts}
            assert (len(right) == 1) == (group in fillers)


def samples_of(run: Path, step: int):
    path = run / "rollouts" / f"step_{step:06d}.jsonl"
    return [sample_from_record(record, where=f"{path}:{line}") for line, record in read_jsonl(path)]
