"""Tests that two processes of four devices train as one process of eight, and resume from each other's checkpoints."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.program import metrics_of, records_of, reproducible, settings, train_here, wait_for_step
from tests.tiny_directory import write_reward_model
from tests.two_hosts import ended, run_on_two_hosts, two_hosts

pytestmark = pytest.mark.two_hosts

PPO = ("algorithm.name=ppo", "algorithm.kl_target=0.1", "algorithm.filter=zero_variance", "algorithm.max_rounds=3")
"""PPO with whitening, an adapted penalty and dynamic sampling, for all of which hosts exchange values."""
# A quota of few shapes to compile; evaluation prompts that two hosts cannot share out evenly.
SHARED = ("algorithm.max_tokens_per_device=512", "eval.every_steps=2", "eval.num_prompts=15")
# A clock that is always due: process 0's, and both save.
TIMED = "checkpoint.every_minutes=1e-9"
HALF = ("rollout.prompts_per_step=2", "algorithm.mini_batch_prompts=1")
"""Half of the sizes per host, so that two hosts have the step of one."""


@pytest.mark.slow
def test_two_hosts_train_ppo_as_one_would_and_what_stops_one_stops_both_with_a_checkpoint(full_config: Path) -> None:
    two, one = (full_config.parent / "runs" / name for name in ("two", "one"))
    both = (*PPO, *SHARED, TIMED)
    assert train_here(full_config, *both, "run.name=one", "run.steps=2").exit_code == 0
    endless = settings(*both, *HALF, "run.name=two", "run.steps=100000", "logging.report=true")
    with two_hosts("train", "--config", full_config, *endless) as hosts:
        wait_for_step(hosts[0], two, 2)
        os.kill(hosts[1].pid, signal.SIGTERM)
        first, second = ended(hosts)
    assert (first.exit_code, second.exit_code) == (75, 75), first.stderr + second.stderr
    # Only the first process speaks; gloo, below JAX, greets on stdout.
    assert "evaluation at step 0" in first.stderr and "step     2  reward" in first.stderr
    assert "reward" not in second.stderr and "report" not in second.stderr
    assert "everything is in" not in second.stdout
    assert_complete(two)
    assert_same_steps(two, one, steps=range(3))
    # Groups were left out, so one host has some that the other has sampled.
    assert all(metrics_of(two)[step]["rollout/num_rounds"] > 1 for step in (1, 2))
    last = metrics_of(two)[-1]["step"]
    # What both have saved, another number of hosts goes on from.
    result = train_here(full_config, *both, "run.name=two", f"run.steps={last + 1}", resume="must")
    assert result.exit_code == 0, result.stderr
    assert f"continuing after step {last} of {last + 1}" in result.stderr
    assert [line["step"] for line in metrics_of(two)] == list(range(last + 2))


@pytest.mark.slow
def test_a_run_goes_from_two_hosts_to_one_and_back_and_is_the_run_of_one_host(full_config: Path) -> None:
    """The run has GRPO with a KL penalty and a reward model, two epochs and two mini-batches per step."""
    moved, stayed = (full_config.parent / "runs" / name for name in ("moved", "stayed"))
    shared = (*SHARED, f"reward.model={write_reward_model(full_config.parent / 'judge')}")
    assert train_here(full_config, *shared, "run.name=stayed", "run.steps=6").exit_code == 0

    def on_two(steps: int, resume: str) -> None:
        chosen = settings(*shared, *HALF, "run.name=moved", f"run.steps={steps}")
        hosts = run_on_two_hosts("train", "--config", full_config, "--resume", resume, *chosen)
        assert [host.exit_code for host in hosts] == [0, 0], hosts

    on_two(2, "never")
    result = train_here(full_config, *shared, "run.name=moved", "run.steps=4", resume="must")
    assert result.exit_code == 0, result.stderr
    on_two(6, "must")
    assert_same_steps(moved, stayed, steps=range(7))
    uids = [record["uid"] for step in range(1, 7) for record in records_of(moved / "rollouts" / name_of(step))]
    # Forty problems: six steps of four do not come to the end of them.
    assert len(set(uids)) == len(uids) == 6 * 4 * 4


def assert_complete(run: Path) -> None:
    last = metrics_of(run)[-1]["step"]
    assert {path.name for path in run.iterdir()} == {
        *(".lock", "settings.yaml", "metrics.jsonl", "sessions.jsonl", "rollouts", "checkpoints", "eval"),
        *("report.html", "rollouts.html", "plots"),
    }
    assert "95 % interval (15 prompts)" in (run / "report.html").read_text()
    saved = {path.name for path in (run / "checkpoints").iterdir()}
    assert saved >= {str(last - 1), str(last), "best"}
    assert os.readlink(run / "checkpoints" / "best") in saved
    assert "process_id: 0  # set" in (run / "settings.yaml").read_text()


def assert_same_steps(run: Path, other: Path, *, steps: range) -> None:
    """Asserts metrics within 1e-5, and the same samples and texts in one order."""
    for step in steps:
        line, expected = (reproducible(metrics_of(one))[step] for one in (run, other))
        assert line.keys() == expected.keys()
        for name in line:
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), (step, name)
        for folder in ("rollouts", "eval"):
            if (other / folder / name_of(step)).exists():
                assert texts(run / folder / name_of(step)) == texts(other / folder / name_of(step)), (step, folder)


def name_of(step: int) -> str:
    return f"step_{step:06d}.jsonl"


def texts(path: Path) -> list[tuple[Any, ...]]:
    return [(r["uid"], r["group_id"], r["completion_token_ids"], r.get("loss_mask")) for r in records_of(path)]
