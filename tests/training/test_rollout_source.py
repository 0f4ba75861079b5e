"""Tests of the number of rounds that are submitted ahead of training."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.records.sample import Prompt, Sample
from app.runtime.session import Session
from app.training.rollout_source import AsyncRolloutSource, RoundPrompts, SyncRolloutSource
from settings import load
from tests.tiny import make_prompt, make_sample

MAX_ROUNDS = 3
NUM_STEPS = 8
PROMPTS = [make_prompt(f"row-{i}", (1,)) for i in range(5)]


class CountingGeneration:
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
    """A sequence of steps that take rounds."""

    def __init__(self, *, k: int, num_steps: int):
        settings = load(
            None, [f"run.steps={num_steps}", f"rollout.max_staleness={k}", "rollout.prompts_per_step=2"], {}
        ).settings
        self.generation = CountingGeneration()
        session = SimpleNamespace(
            settings=settings,
            to_decode_weights=lambda params: params,
            open_async_generation=lambda *_, **__: self.generation,
        )
        self.prompts = RoundPrompts(settings, PROMPTS)
        self.rounds = AsyncRolloutSource(cast(Session, session), self.prompts, max_rounds=MAX_ROUNDS)
        self.ages: list[int] = []
        """Age in steps of each round when it was taken."""
        self._num_taken = 0

    def step(self, step: int, *, num_rounds: int) -> tuple[int, list[int], int]:
        """Returns the numbers of pending rounds before the first is taken, after each, and after the step."""
        position = self._num_taken * self.prompts.global_prompts_per_round
        before, after = len(self.generation.waiting), []
        for number in range(num_rounds):
            (sample,) = self.rounds.take({}, step=step, position=position, number=number)
            self.ages.append(step - 1 - sample.policy_version)
            after.append(len(self.generation.waiting))
        self.rounds.publish({}, step=step)
        self._num_taken += num_rounds
        return before, after, len(self.generation.waiting)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rounds_of_steps", [(1,) * NUM_STEPS, (1, 3, 2, 1, 1, 3, 3, 1), (MAX_ROUNDS,) * NUM_STEPS])
def test_as_many_rounds_wait_as_may_be_learned_from_in_time(k: int, rounds_of_steps: tuple[int, ...]) -> None:
    walk = Walk(k=k, num_steps=100)
    for step, num_rounds in enumerate(rounds_of_steps, start=1):
        # The first take of all asks for those that wait with it.
        before = k + 1 if step > 1 else 0
        assert walk.step(step, num_rounds=num_rounds) == (before, [k] * num_rounds, k + 1)
    # Where every step takes a single round, the last that was asked for is as old as may be.
    assert max(walk.ages) == k if set(rounds_of_steps) == {1} else 1 <= max(walk.ages) <= k
    assert walk.generation.noise_steps == list(range(sum(rounds_of_steps) + k + 1))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_no_round_is_asked_for_that_no_step_could_take(k: int) -> None:
    walk = Walk(k=k, num_steps=2)
    for step in (1, 2):
        walk.step(step, num_rounds=MAX_ROUNDS)
    assert not walk.generation.waiting
    assert walk.generation.noise_steps == list(range(2 * MAX_ROUNDS))


class Weights:
    """Weights for generation, of which a test sees when they are freed."""


def test_weights_are_laid_out_once_a_step_and_freed_when_they_are_released() -> None:
    settings = load(None, ["rollout.prompts_per_step=2"], {}).settings
    laid_out: list[weakref.ref[Weights]] = []

    def to_decode_weights(_: Any) -> Weights:
        weights = Weights()
        laid_out.append(weakref.ref(weights))
        return weights

    session = SimpleNamespace(
        settings=settings,
        to_decode_weights=to_decode_weights,
        rollout_request=lambda **_: None,
        generator=SimpleNamespace(generate=lambda *_: []),
    )
    rounds = SyncRolloutSource(cast(Session, session), RoundPrompts(settings, PROMPTS), max_rounds=3)
    for step in (1, 2):
        for number in (0, 1):
            rounds.take({}, step=step, position=0, number=number)
        assert len(laid_out) == step and laid_out[-1]() is not None
        rounds.release_weights()
        assert laid_out[-1]() is None
