"""Tests of `rollout.max_staleness`: training on samples of earlier policies while the next are generated."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from app.training.train import train
from settings import load
from tests.program import here, metrics_of, of_tiny, progress_of, records_of, settings, train_here

SCHEDULED = (
    *("rollout.scheduler=adaptive", "rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4"),
    *("rollout.workers.fast.count=4", "rollout.workers.heavy.count=4"),
)
UNJUDGED = ("eval.every_steps=0", "checkpoint.best_metric=null")


def run_of(config: Path) -> Path:
    return config.parent / "runs" / "tiny"


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(run) if "loss" in line]


def samples_of(run: Path, step: int) -> list[dict[str, Any]]:
    return records_of(run / "rollouts" / f"step_{step:06d}.jsonl")


def oldest_of(steps: list[dict[str, Any]]) -> list[int]:
    assert all(0 <= step["perf/rollout/staleness_mean"] <= step["perf/rollout/staleness_max"] for step in steps)
    return [step["perf/rollout/staleness_max"] for step in steps]


def test_no_token_is_older_than_allowed(config: Path) -> None:
    k = 2
    result = train_here(config, *SCHEDULED, f"rollout.max_staleness={k}", "logging.save_rollouts=true")
    assert result.exit_code == 0, result.stderr
    steps = steps_of(run_of(config))
    ages = oldest_of(steps)
    # What step 2 learns from was asked for before step 1.
    assert ages[:2] == [0, 1] and max(ages) <= k and len(ages) == 4
    for number, step in enumerate(steps, start=1):
        for record in samples_of(run_of(config), number):
            versions = record.get("policy_versions", [record["policy_version"]])
            assert min(versions) == record["policy_version"] >= number - 1 - step["perf/rollout/staleness_max"]
            assert max(versions) <= number - 1
    assert steps[-1]["perf/compilations"] == 0 and steps[-1]["perf/rollout/tail_fraction"] is None
    assert "eval/accuracy" in metrics_of(run_of(config))[-1]
    assert progress_of(run_of(config), 4)["position"] == 16
    assert not [thread for thread in threading.enumerate() if thread.name in ("generation", "fast-0", "heavy-0")]


APART = ("rollout.scheduler=adaptive", "rollout.max_staleness=1", "rollout.devices=0.75", "mesh.shape=1,2,1")
"""Two devices that train, and six that generate."""


def test_with_devices_of_their_own_workers_generate_while_the_others_train(config: Path) -> None:
    chosen = (*APART, "rollout.workers.fast.count=3", "rollout.workers.heavy.count=0", "rollout.mesh=tp=2")
    result = train_here(config, *chosen, "logging.save_rollouts=true")
    assert result.exit_code == 0, result.stderr
    assert "rollout.devices: of the 8 devices of each host, 2-7 generate and the others train" in result.stderr
    steps = steps_of(run_of(config))
    assert oldest_of(steps)[:2] == [0, 1] and max(oldest_of(steps)) == 1
    # The weights that drew the first samples are those that score them, however they were split.
    assert steps[0]["rollout/sampler_scorer_logprob_diff_max"] < 1e-4
    assert steps[-1]["perf/compilations"] == 0
    assert all(0 <= step["perf/training_bubble"] < 1 and 0 <= step["perf/rollout/rounds_ready"] <= 2 for step in steps)
    # Commands that do not train use all devices, for which that shape is none.
    for command in (("evaluate", "--checkpoint", run_of(config)), ("rollout", "--config", config, *settings(*chosen))):
        of_command = here(*command, "--out", config.parent / f"{command[0]}.jsonl")
        assert of_command.exit_code == 0, of_command.stderr


@pytest.mark.slow
def test_where_nothing_is_learned_samples_are_those_of_a_run_that_waits(config: Path) -> None:
    standing_still = ("optimizer.learning_rate=1e-30", "rollout.mode=exact", "logging.save_rollouts=true", *UNJUDGED)
    for k in (0, 2):
        result = train_here(config, *SCHEDULED, *standing_still, f"rollout.max_staleness={k}", f"run.name=k{k}")
        assert result.exit_code == 0, result.stderr
    for step in range(1, 5):
        waited, ahead = (samples_of(config.parent / "runs" / name, step) for name in ("k0", "k2"))
        for name in ("uid", "group_id", "completion_token_ids", "behavior_logprobs", "finish_reason", "reward"):
            assert [record[name] for record in ahead] == [record[name] for record in waited], name


@pytest.mark.slow
def test_ppo_corrects_with_vtrace_what_an_older_policy_drew(config: Path) -> None:
    ppo = ("algorithm.name=ppo", "algorithm.estimator=vtrace", "critic.warmup_steps=1")
    result = train_here(config, *SCHEDULED, *ppo, *UNJUDGED, "rollout.max_staleness=1")
    assert result.exit_code == 0, result.stderr
    steps = steps_of(run_of(config))
    assert max(oldest_of(steps)) == 1
    assert all(0 < step["policy/correction_ess"] <= 1 + 1e-5 for step in steps[1:])


@pytest.mark.slow
def test_ctrl_c_stops_the_generation_and_the_run_goes_on_later(config: Path) -> None:
    chosen = [*SCHEDULED, *UNJUDGED, "rollout.max_staleness=1", "checkpoint.every_minutes=60"]
    num_looks = 0

    def interrupting_clock() -> float:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return 0.0

    assert (
        train(load(str(config), [*chosen, "run.steps=40"], {}), resume="never", clock=interrupting_clock).exit_code
        == 130
    )
    assert "generation" not in {thread.name for thread in threading.enumerate()}
    done = metrics_of(run_of(config))[-1]["step"]
    assert done < 40
    assert progress_of(run_of(config), done)["position"] == 4 * done
    result = train_here(config, *chosen, f"run.steps={done + 2}", resume="must")
    assert result.exit_code == 0, result.stderr
    ages = oldest_of([step for step in steps_of(run_of(config)) if step["step"] > done])
    assert ages[0] == 0 and len(ages) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "rollout.max_staleness = 1 (from --set): only workers with a scheduler generate during training; set "
         "rollout.scheduler: adaptive"),
        (("rollout.scheduler=sync", "rollout.placement=global"), "set rollout.placement: island, or"),
        (SCHEDULED[:3], "rollout.max_staleness: the worker fast-0 has 4 devices, which wait for"),
        ((SCHEDULED[0], "rollout.devices=0.3"), "rollout.devices: 0.3 of the 8 devices of a host is not a whole"),
        ((*SCHEDULED, "rollout.devices=[2,3]"), "8 workers need a device each, but there are only 2"),
        ((SCHEDULED[0], "rollout.devices=0.75", "mesh.shape=1,8,1"), "needs 8 devices, but there are 2"),
        ((*APART[:1], *APART[2:], "rollout.mesh=tp=4"), "rollout.mesh: 'tp=4' does not divide the 2 devices"),
    ],
)  # fmt: skip
def test_what_cannot_run_ahead_is_refused(config: Path, overrides: tuple[str, ...], message: str) -> None:
    result = train_here(config, *overrides, "rollout.max_staleness=1")
    assert result.exit_code == 2 and message in result.stderr
    assert not (config.parent / "runs").exists()


def test_a_rollout_alone_has_nothing_to_run_ahead_of(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    chosen = settings("rollout.max_staleness=1")
    result = here("rollout", *of_tiny(tiny_model), *chosen, "--limit", "6", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert [r["completion"] for r in records_of(out)] == [r["completion"] for r in records_of(sampled)]
