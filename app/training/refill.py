"""Dynamic sampling: what a filter leaves out of a step is replaced by groups of the next prompts, within bounds.

Source: Yu et al. 2025 (DAPO), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from app.flow import Sample
from app.mesh.placement import gather_over_hosts

Source = Callable[[int], Sequence[Sample]]
"""Round (0, 1, ...) -> this host's rewarded samples of as many groups as its step has. Every host asks alike."""
Filter = Callable[[Sequence[Sample]], bool]
"""A group's samples -> whether the step learns from them."""


@dataclass(frozen=True)
class Refilled:
    """This host's groups of a step, and how many it took to find them."""

    samples: list[Sample]
    """Of exactly so many groups as a step has, in the order they came."""
    num_rounds: int
    """The same on every host."""
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
    """Whether comparing the group's samples teaches anything; a sample without reward is not compared."""
    return len({s.reward for s in group if s.reward is not None}) > 1


def refill(source: Source, *, keep: Filter, num_groups: int, max_rounds: int) -> Refilled:
    """Rounds until every host has kept `num_groups` groups of its own, at most `max_rounds` of them.

    A prompt that an earlier round has asked brings the same samples again, as noise follows prompt and step: such a
    group is left out. That happens where a step meets the end of the data.
    """
    groups: list[list[Sample]] = []
    kept: list[int] = []
    asked: set[str] = set()
    num_rounds = 0
    is_enough = False
    while num_rounds < max_rounds and not is_enough:
        new = list(enumerate(by_group(source(num_rounds)), start=len(groups)))
        kept += [i for i, group in new if keep(group) and group[0].prompt.uid not in asked]
        groups += [group for _, group in new]
        asked |= {group[0].prompt.uid for _, group in new}
        num_rounds += 1
        is_enough = int(gather_over_hosts(np.asarray(len(kept))).min()) >= num_groups
    taken = kept[:num_groups]
    fillers = sorted(set(range(len(groups))) - set(kept))[: num_groups - len(taken)]
    # Fillers stay where they came: together they would be a mini-batch without a loss.
    chosen = [(groups[i], i in fillers) for i in sorted(taken + fillers)]
    return Refilled(
        samples=[_out_of_loss(s) if is_filler else s for group, is_filler in chosen for s in group],
        num_rounds=num_rounds,
        num_sampled=len(groups),
        num_filtered=len(groups) - len(kept),
        num_surplus=len(kept) - len(taken),
        num_fillers=len(fillers),
    )


def by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    """In the order of their first samples."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


def _out_of_loss(sample: Sample) -> Sample:
    return replace(sample, loss_mask=np.zeros(len(sample.completion_ids), bool))
