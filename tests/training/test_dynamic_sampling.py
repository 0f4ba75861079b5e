"""Tests of dynamic sampling: the groups that a step uses, the number of rounds, and fillers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from app.records.sample import Sample
from app.reward.reward_functions import OverlongPenalty
from app.training.dynamic_sampling import (
    StepGroups,
    keeps_all,
    rewards_differ,
)
from tests.tiny import make_sample

Group = Sequence[float | None]
"""Rewards of a group's samples."""
SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


def samples_of(groups: Sequence[Group], *, first: int) -> list[Sample]:
    return [
        make_sample([3, 4], group_id=first + i, sample_index=j, reward=reward)
        for i, group in enumerate(groups)
        for j, reward in enumerate(group)
    ]


class Filled(NamedTuple):
    """A step's samples, and the metrics of its groups."""

    samples: list[Sample]
    metrics: dict[str, float]

    @property
    def counts(self) -> tuple[float, float, float]:
        """Numbers of rounds, of groups that exceed the step, and of fillers."""
        names = ("num_rounds", "surplus_group_count", "filler_group_count")
        rounds, surplus, fillers = (self.metrics[f"rollout/{name}"] for name in names)
        return rounds, surplus, fillers


def fill(rounds: Sequence[Sequence[Sample]], *, num_groups: int, max_rounds: int = 10, keep=rewards_differ) -> Filled:
    """Adds rounds until the step is complete."""
    groups, remaining = StepGroups(group_filter=keep, num_groups=num_groups, max_rounds=max_rounds), iter(rounds)
    while not groups.are_complete:
        groups.add_round(next(remaining))
    return Filled(*groups.fill())


def run(rounds: Sequence[Sequence[Group]], *, max_rounds: int = 10, keep=rewards_differ) -> Filled:
    """Samples rounds with as many groups as a step has, numbered consecutively."""
    size = len(rounds[0])
    sampled = [samples_of(groups, first=number * size) for number, groups in enumerate(rounds)]
    return fill(sampled, num_groups=size, max_rounds=max_rounds, keep=keep)


def groups_of(refilled: Filled) -> list[int]:
    return list(dict.fromkeys(s.group_id for s in refilled.samples))


def in_loss(refilled: Filled) -> list[int]:
    return list(dict.fromkeys(s.group_id for s in refilled.samples if s.mask.any()))


def test_without_a_filter_one_round_is_the_step_whatever_its_rewards():
    refilled = run([(SAME, MIXED, SAME)], keep=keeps_all)
    assert groups_of(refilled) == in_loss(refilled) == [0, 1, 2]
    assert refilled.counts == (1, 0, 0) and refilled.metrics["reward/filtered_group_fraction"] == 0


def test_rounds_are_asked_until_enough_groups_differ_and_the_surplus_is_the_last_of_them():
    refilled = run([(MIXED, SAME, SAME), (SAME, MIXED, SAME), (MIXED, MIXED, MIXED)])
    assert groups_of(refilled) == in_loss(refilled) == [0, 4, 6]
    assert refilled.counts == (3, 2, 0) and refilled.metrics["reward/filtered_group_fraction"] == 4 / 9


def test_when_rounds_run_out_the_first_dropped_groups_fill_up_out_of_the_loss():
    refilled = run([(SAME, MIXED, SAME), (SAME, SAME, MIXED)], max_rounds=2)
    assert groups_of(refilled) == [0, 1, 5]
    assert in_loss(refilled) == [1, 5]
    assert refilled.counts == (2, 0, 1) and refilled.metrics["reward/filtered_group_fraction"] == 4 / 6


def test_a_step_without_any_difference_keeps_its_shape_and_has_no_loss():
    refilled = run([(SAME, SAME)] * 3, max_rounds=3)
    assert groups_of(refilled) == [0, 1]
    assert in_loss(refilled) == []
    assert len(refilled.samples) == 4


def test_fillers_stand_among_the_others_rather_than_in_one_mini_batch():
    refilled = run([(SAME, MIXED, SAME, MIXED), (MIXED, SAME, SAME, SAME)], max_rounds=2)
    assert groups_of(refilled) == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("rewards", "differ"),
    [((0.0, 1.0), True), ((1.0, 1.0), False), ((1.0, None), False), ((None, None), False), ((0.5, None, 1.0), True)],
)
def test_only_rewards_that_there_are_can_differ(rewards, differ):
    assert rewards_differ(samples_of([rewards], first=0)) == differ


def test_what_length_costs_is_no_difference():
    penalty = OverlongPenalty(max_length=4, buffer=3, max_penalty=0.1)

    def penalised(*rewards: float) -> list[Sample]:
        alike = samples_of([rewards], first=0)
        return [penalty.apply(replace(s, completion_ids=np.zeros(i + 2, np.int32))) for i, s in enumerate(alike)]

    assert len({s.reward for s in penalised(0.3, 0.3, 0.3)}) == 3
    assert not rewards_differ(penalised(0.3, 0.3, 0.3))
    # Here it makes equal what is not: one is right.
    right = penalised(0.3, 0.3 + 0.1 / 3, 0.3)
    assert right[0].reward == pytest.approx(right[1].reward)
    assert rewards_differ(right)


def test_a_prompt_that_an_earlier_round_has_asked_is_no_new_group():
    # Prompts are named by the group's number: the second round meets those of the first again.
    again = [samples_of((MIXED, SAME), first=0)] * 2
    refilled = fill([*again, samples_of((MIXED, MIXED), first=10)], num_groups=2)
    assert groups_of(refilled) == [0, 10]
    assert refilled.counts == (3, 1, 0)


def test_a_prompt_that_comes_twice_in_a_round_is_one_group():
    once = samples_of((MIXED,), first=0)
    twice = [*once, *(replace(s, group_id=1) for s in once)]
    assert groups_of(fill([twice, samples_of((MIXED, MIXED), first=10)], num_groups=2)) == [0, 10]


def test_metrics_count_every_round_and_the_mean_is_of_all_that_was_sampled():
    assert run([(MIXED, SAME, SAME), (MIXED, MIXED, MIXED)]).metrics == {
        "rollout/num_rounds": 2,
        "rollout/surplus_group_count": 1,
        "rollout/filler_group_count": 0,
        "reward/filtered_group_fraction": pytest.approx(2 / 6),
        "reward/sampled_mean": pytest.approx(8 / 12),
    }
    unrewarded = run([((None, None),)], keep=keeps_all, max_rounds=1)
    assert np.isnan(unrewarded.metrics["reward/sampled_mean"])
