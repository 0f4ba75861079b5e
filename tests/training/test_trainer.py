"""Tests `grpo train`: its files, metrics, output and data, and the ways in which a run ends."""

import itertools
import json
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import Result

from app.records.jsonl import read_jsonl
from app.report import metrics_history
from app.rollout.sampling.token_sampling import FINISH_NON_FINITE
from app.training.train import train
from settings import load
from tests.program import (
    UNJUDGED,
    assert_same_run,
    assert_same_state,
    copy_until,
    digest_of,
    here,
    metrics_of,
    records_of,
    reproducible,
    run_of,
    succeeded,
    train_here,
)
from tests.replays import samples_of, step_file
from tests.run_fixtures import NO_REPORT, TINY, write_config
from tests.tiny_directory import CHARACTERS, CONFIG, CONTROL_TOKENS, random_tensors, write_model

OF_A_STEP = {
    *("step", "loss", "reward/mean", "reward/std", "reward/arithmetic/mean", "reward/arithmetic_format/mean"),
    *("reward/zero_variance_fraction", "completions/mean_length", "completions/min_length", "completions/max_length"),
    *("completions/truncated_fraction", "policy/entropy", "policy/kl", "policy/grad_norm", "policy/clip_fraction_low"),
    *("policy/clip_fraction_high", "policy/ratio_max", "policy/learning_rate", "advantage/mean", "advantage/std"),
    *("rollout/sampler_scorer_logprob_diff_mean", "rollout/sampler_scorer_logprob_diff_max", "batching/fill"),
    *("time/rollout_s", "time/reward_s", "time/score_s", "time/advantage_s", "time/update_s", "time/step_s"),
    *("perf/tokens_per_s", "perf/mfu", "perf/peak_memory_bytes", "perf/compilations", "data/epoch"),
}
OF_AN_EVALUATION = {
    *("eval/accuracy", "eval/accuracy/difficulty_1", "eval/accuracy/difficulty_2", "eval/format_rate"),
    *("eval/truncated_fraction", "eval/mean_length", "eval/num_prompts", "eval/error_count", "time/eval_s"),
}


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, Result]:
    """Returns a second run with the settings of `finished` and its output; tests must not change the run."""
    config = write_config(tmp_path_factory.mktemp("repeated"), TINY + NO_REPORT, tiny_model)
    return run_of(config), succeeded(train_here(config, "logging.completions_every_steps=2"))


def test_a_run_directory_has_the_documented_files(finished: Path) -> None:
    def names(folder: str) -> set[str]:
        return {path.name for path in (finished / folder).iterdir()}

    assert names("") == {
        *(".lock", "settings.yaml", "metrics.jsonl", "sessions.jsonl", "rollouts", "checkpoints", "eval"),
        *("report.html", "rollouts.html", "plots"),
    }
    assert names("rollouts") == {f"step_00000{step}.jsonl" for step in (1, 2, 3, 4)}
    assert names("eval") == {f"step_00000{step}.jsonl" for step in (0, 2, 4)}
    assert names("checkpoints") == {"2", "4", "best"}
    text, config = (finished / "settings.yaml").read_text(), finished.parents[1] / "config.yaml"
    assert f"  learning_rate: 0.001  # yaml:{config}:6" in text.splitlines()
    assert "  eval_split: test  # derived" in text.splitlines()
    assert load(str(finished / "settings.yaml"), [], {}).settings == load(str(config), [], {}).settings
    (session,) = (record for _, record in read_jsonl(finished / "sessions.jsonl"))
    assert session["after_step"] == 0 and session["processes"] == 1 and session["devices"] == "8 × cpu"


def test_every_step_writes_a_line_with_every_metric(finished: Path, uninterrupted: Path) -> None:
    start, *lines = metrics_of(finished)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert start.keys() == {"step", "time/unix_s"} | OF_AN_EVALUATION
    assert lines[0].keys() >= OF_A_STEP and not lines[0].keys() & OF_AN_EVALUATION
    for line in lines:
        assert line.keys() == lines[0].keys() | (OF_AN_EVALUATION if line["step"] in (2, 4) else set())
        assert [name for name, value in line.items() if value is None] == ["policy/kl", "perf/mfu"]
    with_penalty = metrics_of(uninterrupted)[1:]
    scores = {f"time/score_{role}_s" for role in ("policy", "reference")}
    assert all(line.keys() > lines[0].keys() | scores for line in with_penalty) and with_penalty[-1]["policy/kl"] > 0


def test_epochs_and_tokens_are_counted_from_the_first_step_of_a_run(finished: Path) -> None:
    total = 0
    for line in metrics_of(finished)[1:]:
        samples = samples_of(finished, line["step"])
        total += sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
        assert line["data/total_tokens"] == total
        assert line["data/epoch"] == 4 * line["step"] / 40
    times = [line["time/unix_s"] for line in metrics_of(finished)]
    assert times == sorted(times)
    assert finished.stat().st_mtime - 3600 < times[0] < time.time()


def test_grpo_samples_one_round_and_its_single_update_has_ratio_one(finished: Path) -> None:
    assert load(str(finished / "settings.yaml"), [], {}).algorithm_changes is None
    for line in metrics_of(finished)[1:]:
        assert line["policy/ratio_max"] == 1
        assert line["policy/clip_fraction_low"] == line["policy/clip_fraction_high"] == 0
        assert (line["rollout/num_rounds"], line["reward/filtered_group_fraction"]) == (1, 0)
        assert line["reward/sampled_mean"] == pytest.approx(line["reward/mean"])


def test_logprobs_of_sampler_and_trainer_agree_in_every_step(finished: Path, uninterrupted: Path) -> None:
    for line in metrics_of(finished)[1:] + metrics_of(uninterrupted)[1:]:
        assert 0 <= line["rollout/sampler_scorer_logprob_diff_max"] < 1e-4
    assert not any("kept_mass_logs" in record for record in records_of(step_file(finished, 1)))
    kept = np.array([x for record in records_of(step_file(uninterrupted, 1)) for x in record["kept_mass_logs"]])
    assert kept.min() < -1e-3 and np.log(0.9 - 1e-6) < kept.min() and kept.max() <= 1e-6


def test_saved_samples_match_the_metrics_of_their_step(finished: Path) -> None:
    for line in metrics_of(finished)[1:]:
        samples = samples_of(finished, line["step"])
        assert len({sample.uid for sample in samples}) == len(samples) == 16
        assert [sample.group_id for sample in samples] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
        assert {sample.policy_version for sample in samples} == {line["step"] - 1}
        assert np.mean([sample.reward or 0.0 for sample in samples]) == line["reward/mean"]
        assert np.mean([len(sample.completion_ids) for sample in samples]) == line["completions/mean_length"]
        for sample in samples:
            assert sample.advantages is not None and len(sample.advantages) == len(sample.completion_ids)


def test_samples_have_the_logprobs_that_their_algorithm_needs(finished: Path, uninterrupted: Path) -> None:
    for sample in samples_of(finished, 1):
        assert sample.policy_logprobs is None and sample.reference_logprobs is None
    for sample in samples_of(uninterrupted, 1):
        assert sample.policy_logprobs is not None and sample.reference_logprobs is not None
        # At the first step policy and reference are the same weights.
        np.testing.assert_array_equal(sample.policy_logprobs, sample.reference_logprobs)
        np.testing.assert_allclose(sample.policy_logprobs, sample.behavior_logprobs, atol=1e-4)


def test_runs_are_reproducible_and_depend_on_the_seed(config, finished, repeated):
    assert_same_run(repeated[0], finished, step=4)
    succeeded(train_here(config, "run.seed=1", "run.steps=1"))
    other = metrics_of(run_of(config))
    # Held-out prompts and the weights before the first step are the same for every seed.
    assert reproducible(other)[0] == reproducible(metrics_of(finished))[0]
    assert other[1]["policy/entropy"] != metrics_of(finished)[1]["policy/entropy"]


def test_the_result_of_a_run_goes_to_stdout_and_its_progress_to_stderr(repeated: tuple[Path, Result]) -> None:
    run, output = repeated
    result, progress = output.stdout.splitlines(), output.stderr.splitlines()
    assert result[0].split() == ["held", "out", "step", "0", "step", "4"]
    assert result[1].startswith("accuracy")
    assert result[-2].startswith("best eval/accuracy ")
    assert result[-1] == f"everything is in {run}"
    assert len(result) == 10
    assert progress[0].startswith("rollout.slots: auto: 16 on each host for all samples of a step, ")
    assert progress[1] == "builtin:arithmetic: 40 rows (prompt from prompt, answer from answer)"
    assert [line.split()[1] for line in progress if line.startswith("step ")] == ["1/4", "2/4", "3/4", "4/4"]
    assert len([line for line in progress if line.startswith("evaluation at step ")]) == 3
    # Progress is reported after the first step and then after every second step.
    shown = [line.split()[-1] for line in progress if line.startswith("completions of step")]
    assert shown == ["1", "2", "4"]
    assert any(line.startswith("    reward ") and "advantage" in line for line in progress)


def test_a_run_compiles_nothing_after_the_first_steps(finished: Path, uninterrupted: Path) -> None:
    for run in (finished, uninterrupted):
        compilations = [line["perf/compilations"] for line in metrics_of(run)[1:]]
        assert compilations[0] > 5
        # The second step's samples may be the first to reach the longest length.
        assert compilations[2:4] == [0, 0]


def test_repeated_nan_updates_end_a_run(config: Path, tmp_path: Path) -> None:
    broken = write_model(tmp_path / "broken")
    tensors = random_tensors(CONFIG)
    # The weights spoil one digit: samples whose prompts contain it are in the same rows as normal samples.
    tensors["model.embed_tokens.weight"][len(CONTROL_TOKENS) + CHARACTERS.index("7")] = np.nan
    save_file(tensors, broken / "model.safetensors")
    result = train_here(config, f"model.path={broken}", *UNJUDGED, "logging.report=true")
    assert result.exit_code == 1
    # Reported only once, although every step is the same, and also in the report of the failed run.
    assert result.stderr.count("alert at step 2: An update was skipped: NaN or infinity\n") == 1
    assert result.stderr.count("An update was skipped") == 1
    assert result.stderr.count("of the policy was skipped: NaN or infinity in the gradient of all parameters") == 3
    report = (run_of(config) / "report.html").read_text()
    assert "step 4 of 4" in report.replace("\n", " ") and "Step 2: An update was skipped" in report
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: RuntimeError: 3 optimizer steps in a row had a NaN or infinite loss or gradient")
    assert "Lower optimizer.learning_rate" in error
    lines = metrics_of(run_of(config))
    assert [line["policy/nonfinite_in_a_row"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["loss"] is not None and lines[-1]["loss"] is None
    for line in lines[1:]:
        dropped = [s for s in samples_of(run_of(config), line["step"]) if s.reward is None]
        assert 0 < len(dropped) == line["reward/dropped_count"] and line["reward/error_count"] == 0
        assert {s.finish_reason for s in dropped} == {FINISH_NON_FINITE}
        assert not any(s.mask.any() or np.any(s.advantages) for s in dropped)


def test_a_run_whose_samples_are_all_non_finite_ends_with_an_error(config: Path) -> None:
    # Without evaluations, held-out data is not needed.
    chosen = ("eval.every_steps=0", "data.eval_source=null", "logging.save_rollouts=false")
    result = train_here(config, "optimizer.learning_rate=1e30", *chosen)
    assert result.exit_code == 1
    assert not (run_of(config) / "eval").exists() and not (run_of(config) / "rollouts").exists()
    error = result.stderr.splitlines()[-1]
    assert (
        "error: RuntimeError: no sample of this step could be generated: the rollout dropped 16 of 16 samples" in error
    )
    assert "lower optimizer.learning_rate" in error
    (first,) = metrics_of(run_of(config))
    assert first["policy/nonfinite_updates"] == 0 and first["loss"] is not None


def test_the_best_evaluation_is_saved_between_intervals_and_stop_strings_end_samples(config: Path) -> None:
    few_slots = ("rollout.slots=8", "rollout.mode=exact", "rollout.segment.min=1", 'rollout.stop=["1", "+3"]')
    saving = ("checkpoint.every_steps=100", "checkpoint.keep=1")
    result = succeeded(train_here(config, "eval.every_steps=1", *saving, *few_slots))
    run = run_of(config)
    for folder in ("rollouts", "eval"):
        records = records_of(run / folder / "step_000001.jsonl")
        stopped = [one for one in records if any(string in one["completion"] for string in ("1", "+3"))]
        assert 2 <= len(stopped) < len(records)
        for one in stopped:
            assert one["finish_reason"] == "stop" and one["completion"].endswith(("1", "+3"))
            assert not any(string in one["completion"][:-1] for string in ("1", "+3"))
    accuracies = {line["step"]: line["eval/accuracy"] for line in metrics_of(run) if line["step"] > 0}
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    assert os.readlink(run / "checkpoints" / "best") == str(best)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {str(best), "4", "best"}
    assert f"best eval/accuracy {100 * accuracies[best]:.1f} % after step {best}: checkpoints/best\n" in result.stdout


def test_a_run_without_improvement_has_no_best_checkpoint(config, monkeypatch):
    # The spoiled model writes only numbers, which would count as an improvement.
    monkeypatch.setattr(metrics_history, "LOWER_IS_BETTER", frozenset({"eval/format_rate"}))
    spoiled = ("optimizer.learning_rate=10.0", "checkpoint.best_metric=eval/format_rate", "eval.every_steps=1")
    result = succeeded(train_here(config, *spoiled, "run.steps=1"))
    run = run_of(config)
    start, end = (line["eval/format_rate"] for line in metrics_of(run) if "eval/format_rate" in line)
    assert start < end
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"1"}
    said = f"training has not improved eval/format_rate over the start (step 0): {100 * start:.1f} %"
    assert f"{said}; there is no checkpoints/best\n" in result.stdout
    result = here("evaluate", "--checkpoint", run / "checkpoints" / "best")
    assert result.exit_code == 2 and "nothing better than its start" in result.stderr
    # A resumed run still compares with the accuracy at its start.
    result = succeeded(train_here(config, *spoiled, "run.steps=2", resume="must"))
    assert said in result.stdout and not (run / "checkpoints" / "best").is_symlink()


def test_timed_checkpoints_do_not_change_metrics(config: Path, finished: Path) -> None:
    overrides = ("checkpoint.every_minutes=1", "checkpoint.every_steps=100", "checkpoint.best_metric=null")
    clock = itertools.count(step=40).__next__
    # The clock is read at the start, at every step and at every checkpoint, so checkpoints are due at steps 2 and 4.
    assert train(load(str(config), [*overrides, "checkpoint.keep=9"], {}), resume="never", clock=clock).is_complete
    run = run_of(config)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"2", "4"}
    assert reproducible(metrics_of(run)) == reproducible(metrics_of(finished))


NEVER_BETTER = ("run.early_stopping.patience=1", "checkpoint.best_metric=eval/error_count")
REASON = "eval/error_count has not improved in 1 evaluations (run.early_stopping.patience); its best value is "


def test_a_run_that_ended_early_is_complete_until_its_settings_change(config: Path, finished: Path) -> None:
    run = run_of(config)
    workers = ("rollout.scheduler=sync", "rollout.workers.fast.slots=16", "rollout.workers.heavy.count=0")
    chosen = (*workers, "eval.every_steps=1", "run.steps=2")
    result = succeeded(train_here(config, *chosen, *NEVER_BETTER, "logging.report=true"))
    assert f"ended early, after step 1 of 2: {REASON}" in result.stderr
    assert f"\nended early: {REASON}" in result.stdout
    report = (run / "report.html").read_text()
    assert f"step 1 of 2, ended early: {REASON}" in report and 'href="timeline.html"' in report
    assert "<h1>tiny, step 1: 1 workers, 16 slots</h1>" in (run / "timeline.html").read_text()
    before = metrics_of(run), digest_of(run / "rollouts")
    again = succeeded(train_here(config, *chosen, *NEVER_BETTER, resume="must"))
    assert f"ended early, after step 1 of 2: {REASON}" in again.stderr
    assert (metrics_of(run), digest_of(run / "rollouts")) == before
    # With that number of steps, the last step would not be an early end.
    last = succeeded(train_here(config, *chosen[:-1], *NEVER_BETTER, "run.steps=1", resume="must"))
    on = succeeded(train_here(config, *chosen, resume="must"))
    assert "ended early" not in last.stdout + last.stderr + on.stdout + on.stderr
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2]
    assert_same_state(run, finished, step=2)


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


def test_a_run_mixes_data_sources_by_weight_and_resumes_at_the_same_rows(tmp_path: Path, tiny_model: Path) -> None:
    config, runs = mixed(tmp_path, TINY, tiny_model), tmp_path / "runs"
    succeeded(train_here(config))
    samples = [one for step in range(1, 5) for one in records_of(step_file(runs / "tiny", step))]
    prompts = {(one["uid"].rpartition("/")[0], one["group_id"]): one["columns"]["data_source"] for one in samples}
    file = str(tmp_path / "sums.jsonl")
    assert Counter(prompts.values()) == {file: 12, "builtin:arithmetic": 4}
    # The run uses twelve prompts of nine rows, so it is in its second epoch.
    assert len({uid for uid, _ in prompts if uid.startswith("0/")}) == 9
    for one in samples:
        assert one["rewards"]["of"] == float(one["columns"]["data_source"] == "builtin:arithmetic")
    judged = records_of(runs / "tiny" / "eval" / "step_000002.jsonl")
    assert {one["columns"]["data_source"] for one in judged} == {"builtin:arithmetic"}
    resumed = ("run.name=resumed",)
    copy_until(runs / "tiny", runs / "resumed", step=2)
    other = train_here(mixed(tmp_path, TINY, tiny_model, weight=2), *resumed, resume="must")
    assert other.exit_code == 2 and "--resume: the weights of the sources in data.source changed" in other.stderr
    succeeded(train_here(mixed(tmp_path, TINY, tiny_model), *resumed, resume="must"))
    assert_same_run(runs / "resumed", runs / "tiny", step=4)


def test_dry_run_and_rollout_read_a_mixture_of_data_sources(tmp_path: Path, tiny_model: Path) -> None:
    config = mixed(tmp_path, TINY, tiny_model)
    foreseen = succeeded(here("train", "--config", config, "--dry-run", "--json"))
    assert json.loads(foreseen.stdout)["epochs_of_data"] == pytest.approx(4 * 4 / 49)
    out = tmp_path / "samples.jsonl"
    succeeded(here("rollout", "--config", config, "--limit", "10", "--out", out))
    assert Counter(one["uid"][0] for one in records_of(out)) == {"0": 9 * 4, "1": 4}
