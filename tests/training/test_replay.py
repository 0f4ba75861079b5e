"""Tests of training on saved samples: of a run, under other settings, and at the end of a chain of files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.program import (
    digest_of,
    here,
    metrics_of,
    progress_of,
    records_of,
    reproducible,
    saved_state,
    settings,
    train_here,
)
from tests.replays import assert_refused, replay, replayed, rewrite, step_file, train_on
from tests.run_fixtures import NO_REPORT, write_config
from tests.training.test_async_training import SCHEDULED, UNJUDGED
from tests.training.test_ppo import PPO

DAPO = ("algorithm.name=dapo", "algorithm.max_rounds=3", "reward.overlong_buffer=2", "run.steps=2", *UNJUDGED)
OF_THE_LEFT_OUT = {
    *("rollout/num_rounds", "rollout/surplus_group_count"),
    *("reward/filtered_group_fraction", "reward/sampled_mean"),
    *("data/num_tokens", "data/total_tokens"),
}
"""Metrics that count groups which a filter left out, which are in no file."""


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Returns the metrics that a replay reproduces; it does not know the size of the data set."""
    return [{k: v for k, v in line.items() if k != "data/epoch"} for line in reproducible(metrics_of(run))]


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in lines_of(run)}


def assert_same_state(run: Path, other: Path, *, step: int) -> None:
    """Asserts equal weights, moments and counters, bit for bit."""
    state, expected = (saved_state(one, step) for one in (run, other))
    assert state.keys() == expected.keys() and len(state) > 30
    for name in expected:
        np.testing.assert_array_equal(state[name], expected[name], err_msg=name)


def assert_same_steps(run: Path, other: Path, *, steps: Sequence[int]) -> None:
    """Asserts an equal final state, position and penalty, and equal metrics and files of all steps, bit for bit."""
    assert_same_state(run, other, step=steps[-1])
    # A replay from a checkpoint begins without an evaluation.
    unlike = {"fingerprints": None, "initial_evaluation": None}
    place, wanted = ({**progress_of(one, steps[-1]), **unlike} for one in (run, other))
    assert place == wanted
    for step in steps:
        assert steps_of(run)[step] == steps_of(other)[step], step
        assert step_file(run, step).read_bytes() == step_file(other, step).read_bytes(), step


def test_a_run_is_reproduced_bit_for_bit_under_its_own_settings_and_a_name_of_its_own(
    finished: Path, tmp_path: Path
) -> None:
    result = replay(finished, tmp_path)
    assert result.exit_code == 0, result.stderr
    again = tmp_path / "tiny-replay"
    assert_same_steps(again, finished, steps=range(1, 5))
    assert lines_of(again) == lines_of(finished)
    assert not any("data/epoch" in line for line in metrics_of(again))
    assert f"--from-rollouts: steps 1 to 4 on the samples of {finished}; nothing is generated" in result.stderr
    assert "\nrewards: those of the samples\nadvantages: computed again\n" in result.stderr
    assert all(line["perf/rollout/segments"] == 0 for line in metrics_of(again)[1:])
    (session,) = records_of(again / "sessions.jsonl")
    assert (session["from_rollouts"], session["after_step"]) == (str(finished), 0)
    assert "checkpoint" not in session


def test_a_run_ends_completions_at_stop_strings_and_is_reproduced(config: Path, tmp_path: Path) -> None:
    stop, engine = ("1", "+3"), ("rollout.slots=8", "rollout.mode=exact", "rollout.segment.min=1")
    result = train_here(config, 'rollout.stop=["1", "+3"]', "run.steps=2", "eval.every_steps=2", *engine)
    assert result.exit_code == 0, result.stderr
    run = config.parent / "runs" / "tiny"
    assert_same_steps(replayed(run, tmp_path / "again"), run, steps=(1, 2))
    for path in (step_file(run, 1), run / "eval" / "step_000002.jsonl"):
        records = records_of(path)
        stopped = [one for one in records if any(string in one["completion"] for string in stop)]
        assert 2 <= len(stopped) < len(records)
        for one in stopped:
            assert one["finish_reason"] == "stop" and one["completion"].endswith(stop)
            assert not any(string in one["completion"][:-1] for string in stop)
    cut = [one["finish_reason"] == "length" for one in records_of(step_file(run, 1))]
    assert steps_of(run)[1]["completions/truncated_fraction"] == pytest.approx(np.mean(cut))


def test_a_run_whose_settings_changed_midway_is_replayed_in_parts_only(config: Path, tmp_path: Path) -> None:
    run = config.parent / "runs" / "tiny"
    assert train_here(config, "run.steps=2").exit_code == 0
    changed = ("algorithm.name=dr_grpo", "optimizer.learning_rate=0.01")
    result = train_here(config, *changed, resume="must", allow_changed=["algorithm", "optimizer.learning_rate"])
    assert result.exit_code == 0, result.stderr
    whole = replay(run, tmp_path / "whole")
    message = r"from step 3 on, the settings of .*tiny were others \(algorithm\.name was 'grpo' and is now 'dr_grpo'\)"
    assert_refused(whole, message, tmp_path / "whole")
    start = ["--checkpoint", run / "checkpoints" / "2"]
    assert_same_steps(replayed(run, tmp_path / "rest", options=start), run, steps=(3, 4))
    first = ("eval.every_steps=0", "checkpoint.best_metric=null")
    assert steps_of(replayed(step_file(run, 1), tmp_path / "first", *first))[1] == steps_of(run)[1]


def test_a_penalty_several_epochs_and_mini_batches_go_on_from_a_checkpoint_bit_for_bit(
    uninterrupted: Path, tmp_path: Path
) -> None:
    start = uninterrupted / "checkpoints" / "6"
    run = replayed(uninterrupted / "rollouts", tmp_path, "run.steps=9", options=["--checkpoint", start])
    assert [line["step"] for line in metrics_of(run)] == [7, 8, 9]
    assert_same_steps(run, uninterrupted, steps=range(7, 10))
    (session,) = records_of(run / "sessions.jsonl")
    assert (session["after_step"], session["checkpoint"]) == (6, str(start))


def test_a_step_is_learned_again_under_another_algorithm(uninterrupted: Path, tmp_path: Path) -> None:
    options = ["--checkpoint", uninterrupted / "checkpoints" / "6"]
    other = ("algorithm.name=dr_grpo", "eval.every_steps=0")
    run = replayed(step_file(uninterrupted, 7), tmp_path, *other, options=options)
    (line,) = metrics_of(run)
    expected = steps_of(uninterrupted)[7]
    assert line["step"] == 7
    assert line["reward/mean"] == expected["reward/mean"] and line["policy/entropy"] is not None
    assert line["advantage/std"] != pytest.approx(expected["advantage/std"], rel=0.01)
    for record, before in zip(records_of(step_file(run, 7)), records_of(step_file(uninterrupted, 7)), strict=True):
        # Before its updates the policy is the one that the run had.
        assert record["policy_logprobs"] == before["policy_logprobs"]
    siblings = [r for r in records_of(step_file(run, 7)) if r["group_id"] == 0]
    rewards = np.array([r["reward"] for r in siblings])
    np.testing.assert_allclose([r["advantages"][0] for r in siblings], rewards - rewards.mean(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [DAPO, (*SCHEDULED, *UNJUDGED, "rollout.max_staleness=1", "run.steps=2")], ids=["filtered", "ahead"]
)
def test_what_was_filtered_or_drawn_ahead_leads_to_the_same_weights(config: Path, overrides: tuple[str, ...]) -> None:
    assert train_here(config, *overrides).exit_code == 0
    run = config.parent / "runs" / "tiny"
    again = replayed(run, config.parent / "again")
    last = max(steps_of(run))
    assert_same_state(again, run, step=last)
    for step, line in steps_of(run).items():
        assert line.keys() == steps_of(again)[step].keys()
        assert {name for name in line if steps_of(again)[step][name] != line[name]} <= OF_THE_LEFT_OUT
    if overrides == DAPO:
        assert max(line["rollout/num_rounds"] for line in steps_of(run).values()) > 1


def test_rewards_are_judged_anew_where_the_run_had_other_functions(finished: Path, tmp_path: Path) -> None:
    only_format = "reward.functions=[arithmetic_format]"
    result = replay(finished, tmp_path, only_format, "run.steps=1", *UNJUDGED)
    assert "rewards: computed again, reward.* differs from that of the samples' run" in result.stderr
    (line,) = metrics_of(tmp_path / "tiny-replay")
    was = steps_of(finished)[1]
    assert line["reward/mean"] == line["reward/arithmetic_format/mean"] == was["reward/arithmetic_format/mean"]
    assert line["reward/mean"] != was["reward/mean"]


def test_of_a_file_that_is_no_run_s_everything_that_all_samples_have_is_taken(
    loose: Path, config: Path, finished: Path
) -> None:
    def by_hand(record: dict[str, Any]) -> None:
        record["reward"] = float(record["sample_index"])
        record["advantages"] = [0.25] * len(record["completion_token_ids"])

    result = train_on(rewrite(loose, by_hand), config)
    assert result.exit_code == 0, result.stderr
    assert "advantages and returns: those of the samples" in result.stderr
    run = config.parent / "runs" / "tiny"
    (line,) = metrics_of(run)
    assert (line["reward/mean"], line["advantage/mean"], line["advantage/std"]) == (1.5, 0.25, 0.0)
    assert {tuple(r["advantages"]) for r in records_of(step_file(run, 1))} <= {(0.25,) * n for n in range(1, 5)}


def test_what_a_sample_lacks_is_found_as_training_does(loose: Path, config: Path, finished: Path) -> None:
    def drawn_only(record: dict[str, Any]) -> None:
        for name in ("reward", "rewards", "advantages", "policy_logprobs"):
            record.pop(name, None)

    result = train_on(rewrite(loose, drawn_only), config, "run.steps=1")
    assert result.exit_code == 0, result.stderr
    assert "rewards: computed again, not every sample has one\nadvantages: computed again\n" in result.stderr
    run = config.parent / "runs" / "tiny"
    line, expected = (
        {name: value for name, value in steps_of(one)[1].items() if not name.startswith("eval/")}
        for one in (run, finished)
    )
    assert line == expected
    assert step_file(run, 1).read_bytes() == step_file(finished, 1).read_bytes()


CHAINED = ("data.shuffle=false", "critic.warmup_steps=0", "run.steps=1")
"""Settings with which the first step has the first prompts, and updates its policy."""


@pytest.mark.slow
def test_rollout_score_gae_and_train_chained_by_files_are_one_step_of_train(tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(tmp_path, PPO + NO_REPORT, tiny_model)
    assert train_here(config, *CHAINED).exit_code == 0
    whole, chosen = tmp_path / "runs" / "ppo", ["--config", config, *settings(*CHAINED)]
    files: Iterator[Path] = (tmp_path / f"{number}.jsonl" for number in range(10))

    def run(command: str, *options: str | Path) -> Path:
        out = next(files)
        result = here(command, *options, *chosen, "--out", out)
        assert result.exit_code == 0, result.stderr
        return out

    path = run("rollout", "--limit", "8")
    for role in ("reward", "policy", "reference", "critic"):
        path = run("score", "--role", role, "--input", path)
    path = run("gae", "--input", path)
    result = here("train", "--from-rollouts", path, *chosen, *settings("run.name=chained"))
    assert result.exit_code == 0, result.stderr
    assert "rewards: those of the samples\nadvantages and returns: those of the samples" in result.stderr
    chained = whole.with_name("chained")
    state, expected = saved_state(chained, 1), saved_state(whole, 1)
    # Scoring a file has other shapes than scoring a step, which round otherwise in the last bits.
    for name in expected:
        np.testing.assert_allclose(state[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    line, wanted = steps_of(chained)[1], steps_of(whole)[1]
    assert line.keys() == wanted.keys()
    # The file's are whitened already.
    for name in wanted.keys() - {"advantage/mean", "advantage/std"}:
        assert line[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name


def test_a_replay_goes_on_after_it_was_stopped_and_only_on_the_same_samples(
    finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Path(shutil.copytree(finished, tmp_path / "source"))
    run = replayed(source, tmp_path / "runs")
    shutil.rmtree(run / "checkpoints" / "4")
    must = ["--resume", "must"]
    result = replay(source, tmp_path / "runs", options=must)
    assert result.exit_code == 0, result.stderr
    assert "continuing after step 2 of 4" in result.stderr
    assert_same_steps(run, finished, steps=range(1, 5))
    before = digest_of(run)
    for options, overrides in ((must, ("run.steps=3",)), ([*must, "--config", run / "settings.yaml"], ())):
        where = source if overrides else step_file(source, 1)
        result = replay(where, tmp_path / "runs", *overrides, options=options)
        assert result.exit_code == 2
        assert "the samples of --from-rollouts changed since this run was started" in result.stderr
    assert digest_of(run) == before
