"""Tests plug-in rewards in whole runs: samples, counts, messages and errors."""

from pathlib import Path

import numpy as np
import pytest

from app.advantage.group import grpo_advantages
from app.records.jsonl import read_jsonl, write_jsonl
from tests.program import here, metrics_of, progress_of, run_of, settings, succeeded, train_here
from tests.replays import samples_of
from tests.reward.processes import children

PLUG = """\
import os
def length(completions, **kwargs): return [float(len(c)) for c in completions]
def fussy(completion, difficulty):
    assert len(completion) % 4, "four characters"
    return len(completion) / 4
def broken(completion): raise ValueError("always")
def until_third(completions, trainer_state):
    if trainer_state.global_step == 3 and os.path.exists("runs/tiny"): raise ValueError("third")
    return [float(len(c)) for c in completions]
def silent(completions): return [None] * len(completions)
def wants(completion, mood): return 1
def needs(completion, answer): return len(answer)
def judged(completions): return [1.0] + [-1.0] * (len(completions) - 1)
def ample(completions): return [2.0 + len(c) for c in completions]
"""
QUIET = ("eval.every_steps=0", "run.steps=2")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plug.py").write_text(PLUG)
    monkeypatch.chdir(tmp_path)


def test_a_run_trains_on_a_plug_in_reward_next_to_a_built_in_reward(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = "[{function: plug.py:length, weight: 0.5}, arithmetic_format]"
    monkeypatch.setenv("JUDGE_KEY", "CANARY")
    chosen = (f"reward.functions={functions}", "plugins.env_vars=[JUDGE_KEY]")
    result = succeeded(train_here(config, *chosen, "run.steps=1", "eval.num_prompts=8"))
    assert not [path for path in run_of(config).rglob("*") if path.is_file() and b"CANARY" in path.read_bytes()]
    assert "reward length: plug.py:length, called with a batch: completions, prompts" in result.stderr
    assert children() == []
    first, *steps = metrics_of(run_of(config))
    evaluated = [len(r["completion"]) for _, r in read_jsonl(run_of(config) / "eval" / "step_000000.jsonl")]
    # The first function is a plug-in, so it grades the held-out answers; it does not define a format.
    assert first["eval/accuracy"] == np.mean(evaluated)
    assert (first["eval/format_rate"], first["eval/error_count"]) == (None, 0)
    for line in steps:
        samples = samples_of(run_of(config), line["step"])
        assert line["reward/length/mean"] == np.mean([len(s.completion) for s in samples])
        assert line["reward/length/error_count"] == line["reward/error_count"] == line["reward/dropped_count"] == 0
        weighed = 0.5 * line["reward/length/mean"] + line["reward/arithmetic_format/mean"]
        assert line["reward/mean"] == pytest.approx(weighed)
    assert "accuracy" in result.stdout and "format_rate" not in result.stdout


def test_dropped_samples_are_excluded_from_their_groups(config: Path) -> None:
    result = succeeded(
        train_here(config, "reward.functions=[plug.py:fussy]", "reward.on_error=drop", "run.steps=3", QUIET[0])
    )
    lines = metrics_of(run_of(config))
    sizes = set()
    for line in lines:
        samples = samples_of(run_of(config), line["step"])
        kept = [s for s in samples if s.reward is not None]
        dropped = [s for s in samples if s.reward is None]
        assert len(samples) == 16 and 0 < len(dropped) == line["reward/dropped_count"] == line["reward/error_count"]
        for sample in dropped:
            assert len(sample.completion) % 4 == 0 and sample.finish_reason == "dropped:reward"
            assert sample.extra["reward_errors"] == ["fussy: raised: AssertionError: four characters (plug.py:4)"]
            assert sample.extra["finish_reason_before_drop"] in ("stop", "length")
            assert not sample.mask.any() and sample.advantages is not None and not sample.advantages.any()
        rewards, groups = np.array([s.reward for s in kept]), np.array([s.group_id for s in kept])
        sizes |= set(np.unique(groups, return_counts=True)[1].tolist())
        for sample, advantage in zip(kept, grpo_advantages(rewards, groups), strict=True):
            assert sample.advantages is not None and set(sample.advantages) == {np.float32(advantage)}
        assert line["reward/mean"] == line["reward/fussy/mean"] == pytest.approx(rewards.mean())
        assert line["completions/mean_length"] == pytest.approx(np.mean([len(s.completion_ids) for s in kept]))
        spans = [np.ptp(rewards[groups == group]) for group in np.unique(groups) if sum(groups == group) > 1]
        assert line["reward/zero_variance_fraction"] == np.mean(np.array(spans) == 0)
        tokens = np.array([len(s.completion_ids) for s in kept])
        advantages = np.array([s.advantages[0] for s in kept if s.advantages is not None])
        assert line["advantage/mean"] == pytest.approx((tokens * advantages).sum() / tokens.sum(), abs=1e-6)
        # With a ratio of 1 the loss is minus the mean advantage over the tokens of the kept samples.
        assert line["loss"] == pytest.approx(-line["advantage/mean"], abs=1e-5)
    assert len(sizes) > 1, "groups of different sizes"
    assert sum(line["perf/compilations"] for line in lines[2:]) == 0
    assert "reward fussy failed on" in result.stderr and "left out; first" in result.stderr


@pytest.mark.parametrize(
    ("function", "on_error", "message"),
    [
        ("broken", "drop", "no sample of this step has a reward, because all were dropped (reward.on_error, or a fail"),
        ("silent", "raise", "reward.functions: no reward: every reward function abstained (sample "),
    ],
)
def test_a_run_without_rewards_ends_with_advice(config: Path, function: str, on_error: str, message: str) -> None:
    result = train_here(config, f"reward.functions=[plug.py:{function}]", f"reward.on_error={on_error}", *QUIET)
    assert result.exit_code == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith(f"error: RewardError: {message}")
    assert "Fix the" in error and "Traceback" not in result.stderr
    assert metrics_of(run_of(config)) == [] and children() == []


@pytest.mark.parametrize(
    ("normalization", "functions"), [("sum_first", "plug.py:judged"), ("each_first", "plug.py:judged, plug.py:ample")]
)
def test_maxrl_refuses_negative_rewards(config: Path, normalization: str, functions: str) -> None:
    chosen = (f"reward.functions=[{functions}]", f"algorithm.reward_normalization={normalization}")
    result = train_here(config, *chosen, "algorithm.name=maxrl", *QUIET)
    assert result.exit_code == 1
    message = "error: RewardError: a sample has reward -1, but algorithm.estimator: maxrl divides by the mean reward"
    assert result.stderr.splitlines()[-1].startswith(message)
    assert metrics_of(run_of(config)) == []


def test_a_run_whose_reward_function_fails_is_saved_and_resumes(config: Path) -> None:
    functions = ("reward.functions=[plug.py:until_third]", "reward.on_error=raise", "checkpoint.every_steps=100")
    chosen = (*functions, "eval.every_steps=3", "eval.num_prompts=8", "checkpoint.best_metric=null")
    plug = Path("plug.py")
    # The function fails in the evaluation after the step, not in the step.
    plug.write_text(PLUG.replace("runs/tiny", "runs/tiny/rollouts/step_000003.jsonl"))
    result = train_here(config, *chosen)
    assert result.exit_code == 1 and "until_third: raised: ValueError: third" in result.stderr
    assert "stopped after step 3 of 4, which is saved" in result.stderr
    assert {path.name for path in (run_of(config) / "checkpoints").iterdir()} == {"3"}
    plug.write_text(PLUG.replace("runs/tiny", "nowhere"))
    result = train_here(config, *chosen, resume="must")
    assert result.exit_code == 0 and "continuing after step 3 of 4" in result.stderr, result.stderr
    assert [line["step"] for line in metrics_of(run_of(config))] == [0, 1, 2, 3, 4]
    assert "eval/accuracy" in metrics_of(run_of(config))[3] and progress_of(run_of(config), 4)["position"] == 16


def test_a_broken_reward_function_is_refused_before_any_output(config: Path) -> None:
    rows = [{"prompt": f"{i} + 1 = ?", "answer": str(i + 1)} for i in range(4)] + [{"prompt": "5 + 1 = ?"}]
    write_jsonl(config.parent / "rows.jsonl", rows)
    for name, more in (("train", {"difficulty": 1}), ("test", {})):
        write_jsonl(config.parent / f"{name}.jsonl", [{"question": "1+1=?", "answer": "2", **more}] * 8)
    before = sorted(config.parent.rglob("*"))
    for function, data, messages in (
        (
            "broken",
            (),
            ["the trial call before training failed on the answer ", "broken: raised: ValueError: always (plug.py:6)"],
        ),
        ("wants", (), ["cannot be filled: `mood`"]),
        (
            "needs",
            ("data.source=rows.jsonl", "data.eval_source=builtin:arithmetic"),
            ["to rows/4, a row without a reference answer (1 of 5): "],
        ),
        ("fussy", ("data.source=train.jsonl", "data.eval_source=test.jsonl"), ["plug.py:fussy also grades held-out"]),
    ):
        for option in ("--dry-run", "--debug") if function == "broken" else ("--dry-run",):
            chosen = settings(f"reward.functions=[plug.py:{function}]", *data)
            result = here("train", "--config", config, option, *chosen)
            assert (result.exit_code, result.stdout) == (2, "")
            assert all(message in result.stderr for message in messages), result.stderr
    assert sorted(path for path in config.parent.rglob("*") if path.suffix != ".pyc") == before
    assert children() == []


def test_grpo_score_uses_the_reward_functions_of_training(config: Path, loose: Path, tmp_path: Path) -> None:
    arguments = ("score", "--config", config, "--role", "reward", "--input", loose, "--out", tmp_path / "out.jsonl")
    functions = "reward.functions=[plug.py:fussy, plug.py:length, {function: plug.py:silent, name: mute}]"
    result = succeeded(here(*arguments, *settings(functions, "reward.on_error=drop")))
    records = [record for _, record in read_jsonl(tmp_path / "out.jsonl")]
    dropped = [record for record in records if record["finish_reason"] == "dropped:reward"]
    assert 0 < len(dropped) < len(records) == 16
    figures = dict(line.rsplit(maxsplit=1) for line in result.stdout.splitlines())
    assert figures["reward/fussy/error_count"] == figures["reward/dropped_count"] == str(len(dropped))
    assert (figures["reward/abstained_count"], figures["reward/mute/mean"]) == ("16", "None")
    assert "reward fussy: plug.py:fussy, called with one sample: completion, difficulty" in result.stderr
    assert all("reward" not in record and record["reward_errors"] for record in dropped)
    # Scoring again removes the recorded errors; scoring that fails writes no file.
    write_jsonl(tmp_path / "again.jsonl", records)
    again = ("score", "--role", "reward", "--input", tmp_path / "again.jsonl", "--out", tmp_path / "new.jsonl")
    result = here(*again, *settings("reward.functions=[plug.py:fussy]"))
    assert (result.exit_code, result.stdout) == (1, "") and not (tmp_path / "new.jsonl").exists()
    succeeded(here(*again, *settings("reward.functions=[plug.py:length]")))
    before = [record for _, record in read_jsonl(loose)]
    for (_, record), sampled in zip(read_jsonl(tmp_path / "new.jsonl"), before, strict=True):
        assert record.keys() | {"advantages"} == sampled.keys()
        assert record["finish_reason"] == sampled["finish_reason"]
