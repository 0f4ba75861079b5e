"""Tests runs with scheduled workers, and with samples of earlier policies (`rollout.max_staleness`)."""

import gc
import os
import signal
import threading
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import pytest

from app.model.decode_weights import DecodeWeights
from app.model.decoder import Params
from app.runtime.model_spec import read_model_spec
from app.runtime.scoring import ScoringSession, open_mesh
from app.runtime.session import Session
from app.training.rollout_source import RoundPrompts, SyncRolloutSource
from app.training.train import train
from settings import load
from tests.program import UNJUDGED, assert_same_run, metrics_of, progress_of, records_of, run_of, succeeded, train_here
from tests.replays import step_file
from tests.run_fixtures import SCHEDULED
from tests.tiny import make_prompt


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(run) if "loss" in line]


def oldest_of(steps: list[dict[str, Any]]) -> list[int]:
    assert all(0 <= step["perf/rollout/staleness_mean"] <= step["perf/rollout/staleness_max"] for step in steps)
    return [step["perf/rollout/staleness_max"] for step in steps]


def test_tokens_generated_on_separate_devices_respect_max_staleness(config, calls_of_generation):
    k = 2
    workers = ("rollout.workers.fast.count=2", "rollout.workers.heavy.count=0", "rollout.mesh=tp=2")
    halves = ("rollout.devices=0.5", "mesh.shape=1,4,1")
    chosen = ("rollout.scheduler=adaptive", f"rollout.max_staleness={k}", *halves, *workers)
    result = succeeded(train_here(config, *chosen, "logging.save_rollouts=true"))
    assert "rollout.devices: of the 8 devices of each host, 4-7 generate and the others train" in result.stderr
    # k + 1 rounds are pending between steps and k during a step; no round is submitted that no step would use.
    calls = "submit submit submit " + "collect publish submit " + "collect publish " * 3
    assert calls_of_generation == calls.split()
    steps = steps_of(run_of(config))
    ages = oldest_of(steps)
    # The samples of step 2 were requested before step 1.
    assert ages[:2] == [0, 1] and max(ages) <= k and len(ages) == 4
    for number, step in enumerate(steps, start=1):
        for record in records_of(step_file(run_of(config), number)):
            versions = record.get("policy_versions", [record["policy_version"]])
            assert min(versions) == record["policy_version"] >= number - 1 - step["perf/rollout/staleness_max"]
            assert max(versions) <= number - 1
    # The first samples are generated and scored with equal weights, although their sharding differs.
    assert steps[0]["rollout/sampler_scorer_logprob_diff_max"] < 1e-4
    assert steps[-1]["perf/compilations"] == 0 and steps[-1]["perf/rollout/tail_fraction"] is None
    assert all(
        0 <= step["perf/training_bubble"] < 1 and 0 <= step["perf/rollout/rounds_ready"] <= k + 1 for step in steps
    )
    assert "eval/accuracy" in metrics_of(run_of(config))[-1]
    assert progress_of(run_of(config), 4)["position"] == 16
    assert not [thread for thread in threading.enumerate() if thread.name in ("generation", "fast-0", "heavy-0")]
    # `grpo rollout` does not train, so it uses all devices, for which the training mesh has the wrong size.
    assert open_mesh(load(str(config), chosen, {}).settings).size == 8


@pytest.mark.slow
def test_ctrl_c_ends_async_generation_and_the_run_can_continue(config: Path) -> None:
    ppo = ("algorithm.name=ppo", "algorithm.estimator=vtrace", "critic.warmup_steps=1")
    chosen = [*SCHEDULED, *UNJUDGED, *ppo, "rollout.max_staleness=1", "checkpoint.every_minutes=60"]
    num_looks = 0

    def interrupting_clock() -> float:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return 0.0

    interrupted = train(load(str(config), [*chosen, "run.steps=40"], {}), resume="never", clock=interrupting_clock)
    assert interrupted.exit_code == 130
    assert "generation" not in {thread.name for thread in threading.enumerate()}
    done = metrics_of(run_of(config))[-1]["step"]
    assert 2 <= done < 40
    assert progress_of(run_of(config), done)["position"] == 4 * done
    assert max(oldest_of(steps_of(run_of(config)))) == 1
    assert all(0 < step["policy/correction_ess"] <= 1 + 1e-5 for step in steps_of(run_of(config))[1:])
    succeeded(train_here(config, *chosen, f"run.steps={done + 2}", resume="must"))
    ages = oldest_of([step for step in steps_of(run_of(config)) if step["step"] > done])
    assert ages[0] == 0 and len(ages) == 2


@pytest.mark.slow
def test_a_resumed_run_schedules_prompts_by_saved_lengths(config: Path) -> None:
    """Prompts repeat, and the lengths of their earlier samples determine which rows share a program."""
    alone = ("rollout.workers.fast.slots=16", "rollout.workers.heavy.count=0")
    given = ("rollout.scheduler=adaptive", *alone, "rollout.segment.min=1", "data.num_problems=4", "eval.every_steps=0")
    succeeded(train_here(config, *given, "run.steps=4", "run.name=whole"))
    for steps, resume in ((2, "never"), (4, "must")):
        succeeded(train_here(config, *given, f"run.steps={steps}", "run.name=parts", resume=resume))
    runs = config.parent / "runs"
    assert_same_run(runs / "parts", runs / "whole", step=4)
    saved = progress_of(runs / "parts", 2)
    assert len(saved["lengths"]) == 4
    samples = [
        record for step in (1, 2) for record in records_of(runs / "parts" / "rollouts" / f"step_{step:06d}.jsonl")
    ]
    lengths = sorted(len(record["completion_token_ids"]) for record in samples)
    assert sorted(tokens for tokens, _ in saved["finished_lengths"]) == lengths


AHEAD = "rollout.max_staleness=1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((AHEAD, *SCHEDULED[:3]), "rollout.max_staleness: the worker fast-0 has 4 devices, whose programs"),
        ((AHEAD, SCHEDULED[0], "rollout.devices=0.3"), "rollout.devices: 0.3 of the 8 devices of a host is not a"),
        ((AHEAD, *SCHEDULED, "rollout.devices=[2,3]"), "8 workers need a device each, but only 2"),
        ((AHEAD, SCHEDULED[0], "rollout.devices=0.75", "mesh.shape=1,8,1"), "needs 8 devices, but there are 2"),
        ((AHEAD, SCHEDULED[0], "rollout.devices=0.75", "mesh.shape=1,2,1", "rollout.mesh=tp=4"),
         "rollout.mesh: 'tp=4' does not divide the 2 devices"),
        (("rollout.slots=6",), "rollout.slots: 6 cannot be split evenly over the 8 devices"),
        (("rollout.scheduler=sync", "rollout.workers.fast.slots=6"), "fast.slots: 6 cannot be split evenly over the 4"),
        ((*SCHEDULED[:3], "rollout.workers.fast.count=8"), "9 workers need a device each, but only 8"),
    ],
)  # fmt: skip
def test_generation_settings_that_do_not_fit_the_devices_are_refused(
    config: Path, overrides: tuple[str, ...], message: str
) -> None:
    result = train_here(config, *overrides)
    assert result.exit_code == 2 and message in result.stderr
    assert not (config.parent / "runs").exists()


def test_decode_weights_are_converted_once_per_step_and_freed_by_release(config: Path) -> None:
    settings = load(str(config), [], {}).settings
    with closing(Session.open(ScoringSession.open(settings, read_model_spec(settings)))) as session:
        convert, converted = session.to_decode_weights, []

        def recorded(params: Params) -> DecodeWeights:
            weights = convert(params)
            converted.append(weakref.ref(jax.tree.leaves(weights)[0]))
            return weights

        object.__setattr__(session, "to_decode_weights", recorded)
        prompts = [make_prompt(f"row-{i}", (1,)) for i in range(5)]
        source = SyncRolloutSource(session, RoundPrompts(settings, prompts), max_rounds=3)
        params = session.scoring.load_params()
        for step in (1, 2):
            for number in (0, 1):
                source.take(params, step=step, position=0, number=number)
            assert len(converted) == step and converted[-1]() is not None
            source.release_weights()
            gc.collect()
            assert converted[-1]() is None
