"""Dynamic sampling: what a filter leaves out of a step is replaced by groups of the next prompts, within bounds.

Source: Yu et al. 2025 (DAPO), section 3.2.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from app.distributed.collectives import (
    gather_bytes_over_hosts,
    gather_over_hosts,
    sum_over_hosts,
)
from app.distributed.lockstep import decode_gathered_sample
from app.records.sample import Sample
from app.records.sample_json import sample_to_record
from settings.schema.reward import OVERLONG_REWARD

RoundSource = Callable[[int], Sequence[Sample]]
"""Round (0, 1, ...) -> this host's rewarded samples of as many groups as its step has. Every host asks alike."""
GroupFilter = Callable[[Sequence[Sample]], bool]
"""A group's samples -> whether the step learns from them."""
Group = list[Sample]

REWARD_TOLERANCE = 1e-9
"""Rewards that are apart by more differ: a penalty that was added and is taken off again leaves less behind."""


@dataclass(frozen=True)
class DynamicSamplingResult:
    """This host's groups of a step; and over all hosts, how many it took to find theirs."""

    samples: list[Sample]
    """Of exactly so many groups as its step has, in the order they came."""
    num_rounds: int
    num_sampled: int
    """Groups of all rounds; the next three count them, too."""
    num_filtered: int
    """Left out by the filter, those that fill up included."""
    num_surplus: int
    """Kept, but beyond what a step takes."""
    num_fillers: int
    """Left out, and in the step all the same, out of its loss: shapes do not depend on how many were kept."""


def keeps_all(group: Sequence[Sample]) -> bool:
    """No filter."""
    return True


def rewards_differ(group: Sequence[Sample]) -> bool:
    """Whether comparing the group's samples teaches anything but length; one without reward is not compared.

    What overlong samples lose is no difference: the paper filters by right and wrong answers alone (eq. 11).
    """
    rewards = [s.reward - (s.rewards or {}).get(OVERLONG_REWARD, 0.0) for s in group if s.reward is not None]
    return len(rewards) > 1 and max(rewards) - min(rewards) > REWARD_TOLERANCE


def sample_until_filled(
    source: RoundSource, *, group_filter: GroupFilter, num_groups: int, max_rounds: int
) -> DynamicSamplingResult:
    """Rounds until all hosts together have kept `num_groups` groups for each of them, at most `max_rounds` rounds.

    A step's groups, and their order, are the same on any number of hosts: hosts count what all of them have kept,
    choose alike, and hand each other what each lacks of its equal part.

    A prompt that was asked before in the step brings the same samples again, as noise follows prompt and step: such a
    group is left out. That happens where a step meets the end of the data. Where rounds are generated ahead of steps,
    noise follows prompt and round: the same prompt brings other samples, and is left out all the same.
    """
    num_wanted = num_groups * jax.process_count()
    own: list[Group] = []
    kept: list[bool] = []
    asked: set[int] = set()
    num_rounds = 0
    while num_rounds < max_rounds and sum(kept) < num_wanted:
        new = group_samples(source(num_rounds))
        assert len(new) == num_groups
        # Host after host, as the prompts of a round are dealt: rows are groups by their number in the step.
        told = gather_over_hosts(np.asarray([(group_filter(group), _uid_hash(group[0].prompt.uid)) for group in new]))
        verdicts = told.reshape(-1, 2).tolist()
        for is_kept, prompt in verdicts:
            kept.append(bool(is_kept) and prompt not in asked)
            asked.add(prompt)
        own += new
        num_rounds += 1
    chosen = choose_groups(kept, num_wanted)
    groups = _exchange_groups(own, chosen.numbers, num_groups)
    return DynamicSamplingResult(
        samples=[_mask_out_of_loss(s) if number in chosen.fillers else s for number, group in groups for s in group],
        num_rounds=num_rounds,
        num_sampled=len(kept),
        num_filtered=len(kept) - sum(kept),
        num_surplus=max(sum(kept) - num_wanted, 0),
        num_fillers=len(chosen.fillers),
    )


class ChosenGroups(NamedTuple):
    """A step's groups by their numbers: the first kept ones, as many as it takes, filled up with the first others."""

    numbers: list[int]
    """Ascending: fillers stay where they came, together they would be a mini-batch without a loss."""
    fillers: frozenset[int]


def choose_groups(kept: Sequence[bool], num_wanted: int) -> ChosenGroups:
    """Of groups in the order they came, at least `num_wanted`."""
    taken = [number for number, is_kept in enumerate(kept) if is_kept][:num_wanted]
    others = (number for number, is_kept in enumerate(kept) if not is_kept)
    fillers = list(itertools.islice(others, num_wanted - len(taken)))
    return ChosenGroups(sorted(taken + fillers), frozenset(fillers))


class GroupLocation(NamedTuple):
    host: int
    index: int
    """Among all groups that the host has sampled in the step."""


def locate_group(number: int, *, num_groups: int, num_hosts: int) -> GroupLocation:
    """Where the group of a number was sampled: in each round every host has `num_groups`, one host behind the other."""
    round_number, in_round = divmod(number, num_groups * num_hosts)
    host, slot = divmod(in_round, num_groups)
    return GroupLocation(host, round_number * num_groups + slot)


def _exchange_groups(local_groups: Sequence[Group], numbers: Sequence[int], num_groups: int) -> list[tuple[int, Group]]:
    """This host's equal run of the chosen groups with their numbers. Every host calls it.

    Args:
        own: all that this host has sampled.
    """
    this_host, num_hosts = jax.process_index(), jax.process_count()
    places = {number: locate_group(number, num_groups=num_groups, num_hosts=num_hosts) for number in numbers}
    goes_to = {number: position // num_groups for position, number in enumerate(numbers)}
    moving = [number for number in numbers if places[number].host != goes_to[number]]
    at_hand = {number: local_groups[place.index] for number, place in places.items() if place.host == this_host}
    if moving:
        leaving = {number: list(map(sample_to_record, at_hand[number])) for number in moving if number in at_hand}
        for sent in map(json.loads, gather_bytes_over_hosts(json.dumps(leaving).encode())):
            at_hand |= {int(number): list(map(decode_gathered_sample, records)) for number, records in sent.items()}
    return [(number, at_hand[number]) for number in numbers if goes_to[number] == this_host]


def _uid_hash(uid: str) -> int:
    """A prompt's name as what hosts can gather."""
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=8).digest(), "little", signed=True)


def group_samples(samples: Sequence[Sample]) -> list[Group]:
    """In the order of their first samples."""
    groups: dict[int, Group] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


def _mask_out_of_loss(sample: Sample) -> Sample:
    return replace(sample, loss_mask=np.zeros(len(sample.completion_ids), bool))


def dynamic_sampling_metrics(result: DynamicSamplingResult, sampled: Sequence[Sample]) -> dict[str, float]:
    """What a filter made of a step's rollouts, over all hosts.

    Args:
        sampled: of all rounds, whatever became of them.
    """
    rewards = [s.reward for s in sampled if s.reward is not None]
    total, count = sum_over_hosts(np.asarray([sum(rewards), len(rewards)], np.float64)).tolist()
    return {
        "rollout/num_rounds": result.num_rounds,
        "rollout/surplus_group_count": result.num_surplus,
        "rollout/filler_group_count": result.num_fillers,
        "reward/filtered_group_fraction": result.num_filtered / result.num_sampled,
        "reward/sampled_mean": total / count if count else float("nan"),
    }
