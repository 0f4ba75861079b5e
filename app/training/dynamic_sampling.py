"""Implements dynamic sampling: groups that a filter drops are replaced by groups of the next prompts.

Source: Yu et al. 2025 (DAPO), section 3.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from app.distributed.collective_files import decode_gathered_sample
from app.distributed.collectives import gather_json_over_hosts, gather_over_hosts, sum_over_hosts
from app.records.sample import Sample, group_samples
from app.records.sample_json import sample_to_record
from app.rollout.sampling.token_sampling import hash_uids
from settings.schema.reward import OVERLONG_REWARD

GroupFilter = Callable[[Sequence[Sample]], bool]
"""(samples of a group) -> whether the step keeps the group for training."""
Group = list[Sample]

REWARD_TOLERANCE = 1e-9
"""Rewards count as equal up to this difference, which exceeds the rounding error of adding and removing a penalty."""


def keeps_all(group: Sequence[Sample]) -> bool:
    return True


def rewards_differ(group: Sequence[Sample], *, parts: Collection[str] = ()) -> bool:
    """Returns whether the rewards of a group's samples differ: one of the `parts`, or the sum if `parts` is empty.

    Samples without a reward are ignored, and so is the overlong penalty in the sum: the paper filters by the
    correctness of answers (eq. 11).
    """
    values = [[s.rewards[name] for s in group if s.rewards and name in s.rewards] for name in parts]
    if not parts:
        values = [[s.reward - (s.rewards or {}).get(OVERLONG_REWARD, 0.0) for s in group if s.reward is not None]]
    return any(len(one) > 1 and max(one) - min(one) > REWARD_TOLERANCE for one in values)


class StepGroups:
    """Collects the groups of a step in rounds, until the filter has kept `num_groups` groups per host.

    A step's groups and their order do not depend on the number of hosts: every host knows which groups all hosts have
    kept, makes the same choice, and exchanges groups so that each host gets an equal part.

    If a prompt occurs twice in a step, at the end of the data, its second group is dropped: random numbers are keyed by
    prompt and step, so the samples would be equal. (The rule also applies to asynchronous rollouts, where they differ.)

    Args:
        num_groups: number of groups per host, both in a round and in a step.
        max_rounds: maximum number of rounds per step.
    """

    def __init__(self, *, group_filter: GroupFilter, num_groups: int, max_rounds: int) -> None:
        self._filter, self._num_groups, self._max_rounds = group_filter, num_groups, max_rounds
        self._num_wanted = num_groups * jax.process_count()
        self._groups: dict[int, Group] = {}
        """Maps indices, which count the groups of all hosts, to this host's groups of all rounds."""
        self._kept: list[bool] = []
        """Whether each group of all hosts is kept, in the order of these indices."""
        self._seen_prompts: set[int] = set()
        self._num_rounds = 0

    @property
    def are_complete(self) -> bool:
        """Whether enough groups are kept, or the maximum number of rounds has been reached."""
        return self._num_rounds == self._max_rounds or sum(self._kept) >= self._num_wanted

    def add_round(self, samples: Sequence[Sample]) -> None:
        """Adds this host's rewarded samples of a round. All hosts must call it together."""
        new = group_samples(samples)
        assert len(new) == self._num_groups
        first = (self._num_rounds * jax.process_count() + jax.process_index()) * self._num_groups
        self._groups |= dict(enumerate(new, first))
        # Rows are ordered by host, like the prompts of a round, so a row's index is the group's index in the step.
        hashes = hash_uids([group[0].prompt.uid for group in new]).view(np.int64)[:, 0]
        gathered = gather_over_hosts(np.stack([[self._filter(group) for group in new], hashes], axis=1))
        for is_kept, prompt in gathered.reshape(-1, 2).tolist():
            self._kept.append(bool(is_kept) and prompt not in self._seen_prompts)
            self._seen_prompts.add(prompt)
        self._num_rounds += 1

    def fill(self) -> tuple[list[Sample], dict[str, float]]:
        """Returns this host's samples for the step, which form exactly `num_groups` groups, and metrics.

        If too few groups were kept, dropped groups fill the step, masked out of the loss, so that shapes stay the same.
        All hosts must call it together.
        """
        num_kept = sum(self._kept)
        taken = [number for number, is_kept in enumerate(self._kept) if is_kept][: self._num_wanted]
        others = (number for number, is_kept in enumerate(self._kept) if not is_kept)
        fillers = {*itertools.islice(others, self._num_wanted - len(taken))}
        # Fillers keep their positions; otherwise a mini-batch could consist of fillers only.
        groups = _exchange_groups(self._groups, sorted({*taken, *fillers}), self._num_groups)
        samples = [_mask_out_of_loss(s) if number in fillers else s for number, group in groups for s in group]
        rewards = [s.reward for group in self._groups.values() for s in group if s.reward is not None]
        total, count = sum_over_hosts(np.asarray([sum(rewards), len(rewards)], np.float64)).tolist()
        return samples, {
            "rollout/num_rounds": self._num_rounds,
            "rollout/surplus_group_count": max(num_kept - self._num_wanted, 0),
            "rollout/filler_group_count": len(fillers),
            "reward/filtered_group_fraction": (len(self._kept) - num_kept) / len(self._kept),
            "reward/sampled_mean": total / count if count else float("nan"),
        }


def _exchange_groups(
    local_groups: Mapping[int, Group], numbers: Sequence[int], num_groups: int
) -> list[tuple[int, Group]]:
    """Returns (index, group) for this host's equal part of the chosen groups. All hosts must call it together.

    Args:
        local_groups: maps indices to the groups that this host has sampled.
        numbers: indices of the chosen groups.
        num_groups: number of groups per host; in each round a host has this many consecutive indices.
    """
    goes_to = {number: position // num_groups for position, number in enumerate(numbers)}
    moving = [number for number in numbers if number // num_groups % jax.process_count() != goes_to[number]]
    groups = dict(local_groups)
    if moving:
        leaving = {number: list(map(sample_to_record, groups[number])) for number in moving if number in groups}
        for sent in gather_json_over_hosts(leaving):
            groups |= {int(number): list(map(decode_gathered_sample, records)) for number, records in sent.items()}
    return [(number, groups[number]) for number in numbers if goes_to[number] == jax.process_index()]


def gather_pass_rates(samples: Sequence[Sample], *, judge: str) -> list[tuple[str, float | None]]:
    """Returns the prompt's uid and the pass rate of every group of all hosts, which must call it together.

    The pass rate is the mean of the rewards of the function `judge`, each clipped to [0, 1]; None if it graded no
    sample of the group.
    """
    local = []
    for group in group_samples(samples):
        grades = [sample.rewards[judge] for sample in group if sample.rewards and judge in sample.rewards]
        local.append((group[0].prompt.uid, float(np.clip(grades, 0, 1).mean()) if grades else None))
    return [(uid, rate) for host in gather_json_over_hosts(local) for uid, rate in host]


def _mask_out_of_loss(sample: Sample) -> Sample:
    return replace(sample, loss_mask=np.zeros(len(sample.completion_ids), bool))
