"""Tests of scheduled workers in runs, and of `rollout.max_staleness`: samples of earlier policies."""

import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.records.sample import Prompt, Sample
from app.runtime.scoring import open_mesh
from app.runtime.session import Session
from app.training.rollout_source import AsyncRolloutSource, RoundPrompts, SyncRolloutSource
from app.training.train import train
from settings import load
from tests.program import UNJUDGED, assert_same_run, metrics_of, progress_of, records_of, run_of, succeeded, train_here
from tests.tiny import make_prompt, make_sample

SCHEDULED = (
    *("rollout.scheduler=adaptive", "rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4"),
    *("rollout.workers.fast.count=4", "rollout.workers.heavy.count=4"),
)


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(run) if "loss" in line]


def samples_of(run: Path, step: int) -> list[dict[str, Any]]:
    return records_of(run / "rollouts" / f"step_{step:06d}.jsonl")


def oldest_of(steps: list[dict[str, Any]]) -> list[int]:
    assert all(0 <= step["perf/rollout/staleness_mean"] <= step["perf/rollout/staleness_max"] for step in steps)
    return [step["perf/rollout/staleness_max"] for step in steps]


def test_no_token_of_workers_on_their_own_devices_is_older_than_max_staleness(config: Path) -> None:
    k = 2
    workers = ("rollout.workers.fast.count=2", "rollout.workers.heavy.count=0", "rollout.mesh=tp=2")
    halves = ("rollout.devices=0.5", "mesh.shape=1,4,1")
    chosen = ("rollout.scheduler=adaptive", f"rollout.max_staleness={k}", *halves, *workers)
    result = succeeded(train_here(config, *chosen, "logging.save_rollouts=true"))
    assert "rollout.devices: of the 8 devices of each host, 4-7 generate and the others train" in result.stderr
    steps = steps_of(run_of(config))
    ages = oldest_of(steps)
    # What step 2 learns from was asked for before step 1.
    assert ages[:2] == [0, 1] and max(ages) <= k and len(ages) == 4
    for number, step in enumerate(steps, start=1):
        for record in samples_of(run_of(config), number):
            versions = record.get("policy_versions", [record["policy_version"]])
            assert min(versions) == record["policy_version"] >= number - 1 - step["perf/rollout/staleness_max"]
            assert max(versions) <= number - 1
    # The weights that drew the first samples are those that score them, however they were split.
    assert steps[0]["rollout/sampler_scorer_logprob_diff_max"] < 1e-4
    assert steps[-1]["perf/compilations"] == 0 and steps[-1]["perf/rollout/tail_fraction"] is None
    assert all(
        0 <= step["perf/training_bubble"] < 1 and 0 <= step["perf/rollout/rounds_ready"] <= k + 1 for step in steps
    )
    assert "eval/accuracy" in metrics_of(run_of(config))[-1]
    assert progress_of(run_of(config), 4)["position"] == 16
    assert not [thread for thread in threading.enumerate() if thread.name in ("generation", "fast-0", "heavy-0")]
    # A rollout alone uses all devices, for which that shape is none.
    assert open_mesh(load(str(config), chosen, {}).settings).size == 8


@pytest.mark.slow
def test_ctrl_c_ends_generation_ahead_and_the_run_goes_on_later(config: Path) -> None:
    """PPO corrects with V-trace what an older policy drew."""
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
def test_resumed_run_schedules_by_the_lengths_it_knew(config: Path) -> None:
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
FEW = "rollout.slots=8"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((AHEAD,), "rollout.max_staleness = 1 (from --set): only workers with a scheduler generate during training; "
         "set rollout.scheduler: adaptive"),
        ((AHEAD, "rollout.scheduler=sync", "rollout.placement=global"), "set rollout.placement: island, or"),
        ((AHEAD, *SCHEDULED[:3]), "rollout.max_staleness: the worker fast-0 has 4 devices, which wait for"),
        ((AHEAD, SCHEDULED[0], "rollout.devices=0.3"), "rollout.devices: 0.3 of the 8 devices of a host is not a"),
        ((AHEAD, *SCHEDULED, "rollout.devices=[2,3]"), "8 workers need a device each, but there are only 2"),
        ((AHEAD, SCHEDULED[0], "rollout.devices=0.75", "mesh.shape=1,8,1"), "needs 8 devices, but there are 2"),
        ((AHEAD, SCHEDULED[0], "rollout.devices=0.75", "mesh.shape=1,2,1", "rollout.mesh=tp=4"),
         "rollout.mesh: 'tp=4' does not divide the 2 devices"),
        (("rollout.slots=6",), "rollout.slots: 6 cannot be split over the 8 devices"),
        (("rollout.mode=exact",), "rollout.mode = 'exact' (from --set): samples are bitwise reproducible only with"),
        ((FEW, "rollout.mode=exact", "model.dtype=bfloat16"), "model.dtype = 'bfloat16' (from --set) rounding"),
        ((FEW, "rollout.segment.min=9", "rollout.segment.max=8"), "rollout.segment.min = 9 (from --set) exceeds"),
        (("rollout.scheduler=sync", "rollout.workers.fast.slots=6"), "fast.slots: 6 cannot be split over the 4"),
        ((*SCHEDULED[:3], "rollout.workers.fast.count=8"), "9 workers need a device each, but there are only 8"),
    ],
)  # fmt: skip
def test_generation_that_does_not_fit_is_refused(config: Path, overrides: tuple[str, ...], message: str) -> None:
    result = train_here(config, *overrides)
    assert result.exit_code == 2 and message in result.stderr
    assert not (config.parent / "runs").exists()


MAX_ROUNDS = 3
NUM_STEPS = 8
PROMPTS = [make_prompt(f"row-{i}", (1,)) for i in range(5)]


class EagerGeneration:
    """A generator that draws every token of a round when it is submitted, the earliest time possible."""

    def __init__(self) -> None:
        self.newest = 0
        self.waiting: deque[Sample] = deque()
        self.noise_steps: list[int] = []

    def submit(self, prompts: Sequence[Prompt], *, noise_step: int) -> None:
        self.waiting.append(replace(make_sample([0]), policy_version=self.newest))
        self.noise_steps.append(noise_step)

    def publish(self, weights: Any, *, policy_version: int) -> None:
        assert policy_version == self.newest + 1
        self.newest = policy_version

    @property
    def num_ready(self) -> int:
        return len(self.waiting)

    def collect_round(self, *, first_group_id: int) -> list[Sample]:
        return [self.waiting.popleft()]


class Walk:
    """Steps that take rounds."""

    def __init__(self, *, k: int, num_steps: int):
        chosen = [f"run.steps={num_steps}", f"rollout.max_staleness={k}", "rollout.prompts_per_step=2"]
        settings = load(None, chosen, {}).settings
        self.generation, self.prompts = EagerGeneration(), RoundPrompts(settings, PROMPTS)
        session = SimpleNamespace(
            settings=settings,
            to_decode_weights=lambda params: params,
            open_async_generation=lambda *_, **__: self.generation,
        )
        self.source = AsyncRolloutSource(cast(Session, session), self.prompts, max_rounds=MAX_ROUNDS)
        self.ages: list[int] = []
        """Age in steps of each round when it was taken."""

    def step(self, step: int, *, num_rounds: int) -> tuple[int, list[int], int]:
        """Returns the numbers of pending rounds before the first is taken, after each, and after the step."""
        position = len(self.ages) * self.prompts.global_prompts_per_round
        before, after = len(self.generation.waiting), []
        for number in range(num_rounds):
            (sample,) = self.source.take({}, step=step, position=position, number=number)
            self.ages.append(step - 1 - sample.policy_version)
            after.append(len(self.generation.waiting))
        self.source.publish({}, step=step)
        return before, after, len(self.generation.waiting)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rounds_of_steps", [(1,) * NUM_STEPS, (1, 3, 2, 1, 1, 3, 3, 1), (MAX_ROUNDS,) * NUM_STEPS])
def test_pending_rounds_are_as_many_as_staleness_allows(k: int, rounds_of_steps: tuple[int, ...]) -> None:
    walk = Walk(k=k, num_steps=100)
    for step, num_rounds in enumerate(rounds_of_steps, start=1):
        # The first take of all asks for those that wait with it.
        before = k + 1 if step > 1 else 0
        assert walk.step(step, num_rounds=num_rounds) == (before, [k] * num_rounds, k + 1)
    # Where every step takes a single round, the last that was asked for is as old as may be.
    assert max(walk.ages) == k if set(rounds_of_steps) == {1} else 1 <= max(walk.ages) <= k
    assert walk.generation.noise_steps == list(range(sum(rounds_of_steps) + k + 1))
    # Near the end, no round is submitted that no step takes.
    walk = Walk(k=k, num_steps=2)
    for step in (1, 2):
        walk.step(step, num_rounds=MAX_ROUNDS)
    assert not walk.generation.waiting and walk.generation.noise_steps == list(range(2 * MAX_ROUNDS))


class Weights:
    """Weights for generation, of which a test sees when they are freed."""


def test_weights_are_converted_once_a_step_and_freed_by_release() -> None:
    settings = load(None, ["rollout.prompts_per_step=2"], {}).settings
    converted: list[weakref.ref[Weights]] = []

    def to_decode_weights(_: Any) -> Weights:
        weights = Weights()
        converted.append(weakref.ref(weights))
        return weights

    session = SimpleNamespace(
        settings=settings,
        to_decode_weights=to_decode_weights,
        rollout_request=lambda **_: None,
        generator=SimpleNamespace(generate=lambda *_: []),
    )
    source = SyncRolloutSource(cast(Session, session), RoundPrompts(settings, PROMPTS), max_rounds=3)
    for step in (1, 2):
        for number in (0, 1):
            source.take({}, step=step, position=0, number=number)
        assert len(converted) == step and converted[-1]() is not None
        source.release_weights()
        assert converted[-1]() is None
