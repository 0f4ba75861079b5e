"""Tests of `grpo train`: its files, its output and its errors."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from app.records.jsonl import read_jsonl
from app.records.sample import Sample
from app.records.sample_json import sample_from_record
from app.report import metrics_history
from app.training.train import train
from settings import load
from tests.program import (
    DEADLINE_S,
    assert_same_run,
    here,
    metrics_of,
    reproducible,
    saved_state,
    settings,
    started,
    train_here,
    without_progress,
)
from tests.tiny_directory import CHARACTERS, CONFIG, CONTROL_TOKENS, random_tensors, write_model

OF_A_STEP = {
    "step",
    "policy/kl",
    "loss",
    "reward/mean",
    "reward/std",
    "reward/arithmetic/mean",
    "reward/arithmetic_format/mean",
    "reward/arithmetic/error_count",
    "reward/arithmetic_format/error_count",
    "reward/error_count",
    "reward/abstained_count",
    "reward/dropped_count",
    "reward/zero_variance_fraction",
    "reward/filtered_group_fraction",
    "reward/sampled_mean",
    "rollout/num_rounds",
    "rollout/surplus_group_count",
    "rollout/filler_group_count",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/truncated_fraction",
    "policy/entropy",
    "policy/grad_norm",
    "policy/clip_fraction_low",
    "policy/clip_fraction_high",
    "policy/clip_fraction_dual",
    "policy/ratio_max",
    "policy/learning_rate",
    "policy/nonfinite_updates",
    "policy/nonfinite_in_a_row",
    "advantage/mean",
    "advantage/std",
    "rollout/sampler_scorer_kl",
    "rollout/sampler_scorer_logprob_diff_mean",
    "rollout/sampler_scorer_logprob_diff_max",
    "batching/fill",
    "batching/num_micro_batches",
    "batching/dummy_fraction",
    "batching/flops_imbalance",
    "global_seqlen/min",
    "global_seqlen/max",
    "global_seqlen/mean",
    "global_seqlen/minmax_diff",
    "global_seqlen/balanced_min",
    "global_seqlen/balanced_max",
    "time/rollout_s",
    "time/reward_s",
    "time/score_s",
    "time/advantage_s",
    "time/update_s",
    "time/step_s",
    "time/unix_s",
    "data/epoch",
    "data/num_tokens",
    "data/total_tokens",
    "perf/tokens_per_s",
    "perf/flops",
    "perf/mfu",
    "perf/peak_memory_bytes",
    "perf/compilations",
    "perf/rollout/segments",
    "perf/rollout/prefill_tokens_saved",
    "perf/rollout/preemptions",
    "perf/rollout/bubble",
}
OF_SCORING = {
    name
    for role in ("policy", "reference")
    for name in (
        f"score/{role}/fill",
        f"score/{role}/num_micro_batches",
        f"score/{role}/rows_per_device",
        f"time/score_{role}_s",
        f"perf/score_{role}_compilations",
        f"perf/score_{role}_tokens_per_s",
    )
} | {f"mismatch/{name}" for name in ("training_ppl", "rollout_ppl", "log_ppl_diff", "kl", "k3_kl")}
OF_AN_EVALUATION = {
    "eval/accuracy",
    "eval/accuracy/difficulty_1",
    "eval/accuracy/difficulty_2",
    "eval/format_rate",
    "eval/truncated_fraction",
    "eval/mean_length",
    "eval/num_prompts",
    "eval/error_count",
    "time/eval_s",
}


def samples_of(run: Path, step: int) -> list[Sample]:
    path = run / "rollouts" / f"step_{step:06d}.jsonl"
    return [sample_from_record(record, where=f"{path}:{line}") for line, record in read_jsonl(path)]


def test_a_run_directory_holds_what_the_contract_names_and_nothing_else(finished: Path) -> None:
    def names(folder: str) -> set[str]:
        return {path.name for path in (finished / folder).iterdir()}

    assert names("") == {
        *(".lock", "settings.yaml", "metrics.jsonl", "sessions.jsonl", "rollouts", "checkpoints", "eval"),
        *("report.html", "rollouts.html", "plots"),
    }
    assert names("rollouts") == {f"step_00000{step}.jsonl" for step in (1, 2, 3, 4)}
    assert names("eval") == {f"step_00000{step}.jsonl" for step in (0, 2, 4)}
    assert names("checkpoints") == {"2", "4", "best"}


def test_settings_are_the_resolved_ones_with_what_set_each(finished: Path) -> None:
    text = (finished / "settings.yaml").read_text()
    config = finished.parents[1] / "config.yaml"
    assert f"  learning_rate: 0.001  # yaml:{config}:6" in text.splitlines()
    assert "  eval_split: test  # derived" in text.splitlines()
    assert load(str(finished / "settings.yaml"), [], {}).settings == load(str(config), [], {}).settings


def test_every_step_has_a_line_with_every_name(finished: Path) -> None:
    lines = metrics_of(finished)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[0].keys() == {"step", "time/unix_s"} | OF_AN_EVALUATION
    for line in lines[1:]:
        assert line.keys() == OF_A_STEP | (OF_AN_EVALUATION if line["step"] in (2, 4) else set())
        assert [name for name, value in line.items() if value is None] == ["policy/kl", "perf/mfu"]


def test_epochs_and_tokens_are_counted_from_the_first_step(finished: Path) -> None:
    total = 0
    for line in metrics_of(finished)[1:]:
        samples = samples_of(finished, line["step"])
        total += sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
        assert line["data/total_tokens"] == total
        assert line["data/epoch"] == 4 * line["step"] / 40
    times = [line["time/unix_s"] for line in metrics_of(finished)]
    assert times == sorted(times)
    assert finished.stat().st_mtime - 3600 < times[0] < time.time()


def test_a_run_with_a_penalty_says_how_far_it_went(uninterrupted: Path) -> None:
    lines = [line for line in metrics_of(uninterrupted) if line["step"]]
    assert all(line.keys() - OF_AN_EVALUATION == OF_A_STEP | OF_SCORING for line in lines)
    assert lines[-1]["policy/kl"] > 0


def test_with_one_update_the_ratio_is_exactly_one(finished: Path) -> None:
    for line in metrics_of(finished)[1:]:
        assert line["policy/ratio_max"] == 1
        assert line["policy/clip_fraction_low"] == line["policy/clip_fraction_high"] == 0


def test_sampler_and_trainer_agree(finished: Path, uninterrupted: Path) -> None:
    for line in metrics_of(finished)[1:] + metrics_of(uninterrupted)[1:]:
        assert 0 <= line["rollout/sampler_scorer_logprob_diff_max"] < 1e-4


def test_training_moves_the_weights(finished: Path) -> None:
    before = random_tensors(CONFIG)["model.embed_tokens.weight"]
    after = saved_state(finished, 4)["['policy']['params']['embedding']"]
    assert 0 < np.abs(after - before).max() < 0.01  # four steps of at most 1e-3 each
    assert all(line["policy/grad_norm"] > 0 for line in metrics_of(finished)[1:])


def test_the_samples_of_a_step_are_those_its_metrics_speak_of(finished: Path) -> None:
    for line in metrics_of(finished)[1:]:
        samples = samples_of(finished, line["step"])
        assert len({sample.uid for sample in samples}) == len(samples) == 16
        assert [sample.group_id for sample in samples] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
        assert {sample.policy_version for sample in samples} == {line["step"] - 1}
        assert np.mean([sample.reward or 0.0 for sample in samples]) == line["reward/mean"]
        assert np.mean([len(sample.completion_ids) for sample in samples]) == line["completions/mean_length"]
        for sample in samples:
            assert sample.advantages is not None and len(sample.advantages) == len(sample.completion_ids)


def test_samples_carry_the_logprobs_that_their_algorithm_needed(finished: Path, uninterrupted: Path) -> None:
    for sample in samples_of(finished, 1):
        assert sample.policy_logprobs is None and sample.reference_logprobs is None
    for sample in samples_of(uninterrupted, 1):
        assert sample.policy_logprobs is not None and sample.reference_logprobs is not None
        # At the first step policy and reference are the same weights.
        np.testing.assert_array_equal(sample.policy_logprobs, sample.reference_logprobs)
        np.testing.assert_allclose(sample.policy_logprobs, sample.behavior_logprobs, atol=1e-4)


SCORED = ("policy_logprobs", "reference_logprobs")


@pytest.mark.slow
def test_a_penalty_in_the_reward_is_paid_before_siblings_are_compared(config: Path) -> None:
    result = train_here(
        config,
        *("algorithm.name=rloo", "algorithm.beta=0.5", "algorithm.dual_clip=3.0", "algorithm.entropy_coef=0.01"),
        *("optimizer.learning_rate=1e-2", "run.steps=3", "eval.every_steps=0"),
    )
    assert result.exit_code == 0, result.stderr
    run = config.parent / "runs" / "tiny"
    first, *_, last = lines = metrics_of(run)
    # One update a step: its ratio is taken to itself, although the reward had the policy scored.
    assert [line["policy/ratio_max"] for line in lines] == [1.0] * 3
    assert abs(first["policy/kl"]) < 1e-6 < abs(last["policy/kl"])
    for step in (1, 3):
        samples = samples_of(run, step)
        policy, reference = ([np.asarray(getattr(s, name)) for s in samples] for name in SCORED)
        penalties = np.array([0.5 * np.sum(p - r) for p, r in zip(policy, reference, strict=True)])
        assert bool(penalties.any()) == (step == 3)
        by_group = (np.array([s.reward for s in samples]) - penalties).reshape(4, 4)
        expected = (by_group - (by_group.sum(1, keepdims=True) - by_group) / 3).ravel()
        for sample, advantage in zip(samples, expected, strict=True):
            assert sample.advantages is not None
            np.testing.assert_allclose(sample.advantages, advantage, atol=1e-5)


def test_no_prompt_comes_twice_before_all_have_come_once(uninterrupted: Path) -> None:
    uids = [sample.prompt.uid for step in range(1, 11) for sample in samples_of(uninterrupted, step)[::4]]
    assert len(set(uids)) == len(uids) == 40


def test_the_same_settings_give_the_same_run_and_another_seed_another(config: Path, finished: Path) -> None:
    assert train_here(config).exit_code == 0
    assert_same_run(config.parent / "runs" / "tiny", finished, step=4)
    assert train_here(config, "run.name=other", "run.seed=1", "run.steps=1").exit_code == 0
    other = metrics_of(config.parent / "runs" / "other")
    # Held-out prompts are the same for every seed, and so are the weights before the first step.
    assert reproducible(other)[0] == reproducible(metrics_of(finished))[0]
    assert other[1]["policy/entropy"] != metrics_of(finished)[1]["policy/entropy"]


@pytest.fixture
def same_length_data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    rows = [{"question": f"{10 + i} + {20 + i} = ?", "answer": str(30 + 2 * i)} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_nothing_is_compiled_after_the_first_step_and_no_evaluation_needs_no_held_out_data(
    config: Path, same_length_data: Path
) -> None:
    result = train_here(
        config,
        f"data.source={same_length_data}",
        "eval.every_steps=0",
        "algorithm.beta=0.1",
        "algorithm.epochs=2",
        "logging.save_rollouts=false",
        "run.steps=6",
    )
    assert result.exit_code == 0, result.stderr
    run = config.parent / "runs" / "tiny"
    compilations = [line["perf/compilations"] for line in metrics_of(run)]
    assert compilations[0] > 5
    # The second step's samples may be the first to reach the longest length.
    assert compilations[2:] == [0, 0, 0, 0]
    assert not (run / "eval").exists() and not (run / "rollouts").exists()
    assert not any(name.startswith("eval/") for line in metrics_of(run) for name in line)


@pytest.mark.slow
def test_the_result_goes_to_stdout_and_progress_to_stderr(config: Path) -> None:
    with started("train", "--config", config, *settings("logging.completions_every_steps=0")) as process:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr
    result = stdout.splitlines()
    assert result[0].split() == ["held", "out", "step", "0", "step", "4"]
    assert result[1].startswith("accuracy")
    assert result[-1] == f"everything is in {config.parent / 'runs' / 'tiny'}"
    assert result[-2].startswith("best eval/accuracy ")
    assert len(result) == 11
    progress = without_progress(stderr).splitlines()
    assert progress[0].startswith("rollout.slots: auto: 16 on each host for all samples of a step, ")
    assert progress[1] == "builtin:arithmetic: 40 rows (prompt from prompt, answer from answer)"
    assert [line.split()[1] for line in progress if line.startswith("step ")] == ["1", "2", "3", "4"]
    assert len([line for line in progress if line.startswith("evaluation at step ")]) == 3
    assert len(progress) == 10, stderr


@pytest.mark.slow
def test_a_model_with_nan_in_it_is_given_up_after_some_steps(config: Path, tmp_path: Path) -> None:
    broken = write_model(tmp_path / "broken")
    tensors = random_tensors(CONFIG)
    # Of one digit: prompts without it are answered, and those with it are in the same rows.
    tensors["model.embed_tokens.weight"][len(CONTROL_TOKENS) + CHARACTERS.index("7")] = np.nan
    save_file(tensors, broken / "model.safetensors")
    result = train_here(config, f"model.path={broken}", "logging.report=true")
    assert result.exit_code == 1
    # Said once, though each step is like it; and it is in the report that a failed run leaves, too.
    assert result.stderr.count("alert at step 2: An update was skipped: NaN or infinity\n") == 1
    assert result.stderr.count("An update was skipped") == 1
    report = (config.parent / "runs" / "tiny" / "report.html").read_text()
    assert "step 4 of 4" in report.replace("\n", " ") and "Step 2: An update was skipped" in report
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: RuntimeError: 3 optimizer steps in a row had a NaN or infinite loss or gradient")
    assert "Lower optimizer.learning_rate" in error
    lines = metrics_of(config.parent / "runs" / "tiny")[1:]
    assert [line["policy/nonfinite_in_a_row"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["loss"] is not None and lines[-1]["loss"] is None
    assert all(line["reward/dropped_count"] > 0 for line in lines[1:])


def test_a_run_that_blows_up_is_stopped(config: Path) -> None:
    result = train_here(config, "optimizer.learning_rate=1e30")
    assert result.exit_code == 1
    error = result.stderr.splitlines()[-1]
    assert "error: RuntimeError: no sample of this step could be generated: 16 of 16 samples" in error
    assert "lower optimizer.learning_rate" in error
    (first,) = metrics_of(config.parent / "runs" / "tiny")[1:]
    assert first["policy/nonfinite_updates"] == 0 and first["loss"] is not None


def test_a_finished_run_has_a_report_of_all_its_steps(finished: Path) -> None:
    report = (finished / "report.html").read_text()
    assert "step 4 of 4" in report
    assert "<td>accuracy</td>" in report and "95 % interval (20 prompts)" in report
    assert {"reward.png", "accuracy.png", "entropy.png", "times.png"} <= {
        p.name for p in (finished / "plots").iterdir()
    }
    page = (finished / "rollouts.html").read_text()
    assert "124 of the 124 samples in 7 of 7 files" in page.replace("\n", " ")
    (session,) = (record for _, record in read_jsonl(finished / "sessions.jsonl"))
    assert session["after_step"] == 0 and session["processes"] == 1 and session["devices"] == "8 × cpu"
    assert session["devices"] in report and session["jax"] in report


def test_completions_are_shown_after_the_first_step_and_then_in_their_turn(config: Path) -> None:
    result = train_here(config, "run.steps=3", "logging.completions_every_steps=2", "eval.every_steps=0")
    assert result.exit_code == 0, result.stderr
    shown = [line.split()[-1] for line in result.stderr.splitlines() if line.startswith("completions of step")]
    assert shown == ["1", "2"]
    assert any(line.startswith("    reward ") and "advantage" in line for line in result.stderr.splitlines())


@pytest.mark.slow
def test_the_best_evaluation_is_saved_though_no_interval_falls_there(config: Path) -> None:
    result = train_here(config, "run.steps=4", "eval.every_steps=1", "checkpoint.every_steps=100", "checkpoint.keep=1")
    assert result.exit_code == 0, result.stderr
    run = config.parent / "runs" / "tiny"
    accuracies = {line["step"]: line["eval/accuracy"] for line in metrics_of(run) if line["step"] > 0}
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    assert os.readlink(run / "checkpoints" / "best") == str(best)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {str(best), "4", "best"}
    assert f"best eval/accuracy {100 * accuracies[best]:.1f} % after step {best}: checkpoints/best\n" in result.stdout


def test_if_the_start_was_best_there_is_no_best_checkpoint_and_the_run_says_so(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A spoiled model writes only numbers, which would count as better.
    monkeypatch.setattr(metrics_history, "LOWER_IS_BETTER", frozenset({"eval/format_rate"}))
    spoiled = ("optimizer.learning_rate=10.0", "checkpoint.best_metric=eval/format_rate")
    result = train_here(config, *spoiled, "run.steps=2", "logging.report=true")
    assert result.exit_code == 0, result.stderr
    run = config.parent / "runs" / "tiny"
    start, end = (line["eval/format_rate"] for line in metrics_of(run) if "eval/format_rate" in line)
    assert start < end
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"2"}
    said = f"raining has not improved eval/format_rate on the start (step 0): {100 * start:.1f} %"
    assert f"t{said}; there is no checkpoints/best\n" in result.stdout
    assert f"T{said}." in (run / "report.html").read_text()
    result = here("evaluate", "--checkpoint", run / "checkpoints" / "best")
    assert result.exit_code == 2 and "nothing better than its start" in result.stderr
    # A resumed run still knows its start.
    result = train_here(config, *spoiled, "run.steps=3", resume="must")
    assert result.exit_code == 0, result.stderr
    assert f"t{said}" in result.stdout and not (run / "checkpoints" / "best").is_symlink()


def test_a_checkpoint_by_the_clock_comes_between_the_intervals_and_changes_no_metric(
    config: Path, finished: Path
) -> None:
    overrides = ("checkpoint.every_minutes=1", "checkpoint.every_steps=100", "checkpoint.best_metric=null")
    clock = itertools.count(step=40).__next__
    # Read once at the start, at every step and at every checkpoint: due after 80 seconds, at steps 2 and 4.
    assert train(load(str(config), [*overrides, "checkpoint.keep=9"], {}), resume="never", clock=clock).is_complete
    run = config.parent / "runs" / "tiny"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"2", "4"}
    assert reproducible(metrics_of(run)) == reproducible(metrics_of(finished))


@pytest.mark.slow
def test_a_reference_that_waits_in_host_memory_changes_no_number(config: Path) -> None:
    runs = []
    for name, offload in (("here", "false"), ("away", "true")):
        offloaded = (f"run.name={name}", f"score.reference.offload={offload}")
        result = train_here(config, "run.steps=2", "eval.every_steps=0", "algorithm.beta=0.1", *offloaded)
        assert result.exit_code == 0, result.stderr
        runs.append(reproducible(metrics_of(config.parent / "runs" / name)))
    assert runs[0] == runs[1]
