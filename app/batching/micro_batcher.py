"""How a run cuts samples into micro-batches: every host cuts alike, from all-gathered lengths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh

from app.batching.micro_batch_plan import (
    Lengths,
    MicroBatch,
    Plan,
    RowShape,
    TokenBudget,
    Work,
    plan_fixed,
    plan_token_budget,
)
from app.batching.packing_stats import plan_figures
from app.distributed.collectives import gather_over_hosts
from app.mesh.placement import num_local_row_shards
from app.records.sample import Sample


@dataclass(frozen=True, slots=True)
class Cut:
    """Samples cut into micro-batches, on all hosts."""

    plans: tuple[Plan, ...]
    lengths: tuple[Lengths, ...]
    devices_per_host: int
    work: Work
    max_tokens_per_device: int | None
    """None without a quota."""

    @property
    def own(self) -> Plan:
        """This host's."""
        return self.plans[jax.process_index()]

    def figures(self) -> dict[str, float]:
        """See `plan_figures`."""
        return plan_figures(
            self.plans,
            self.lengths,
            self.work,
            devices_per_host=self.devices_per_host,
            max_tokens_per_device=self.max_tokens_per_device,
        )


def per_token(lengths: np.ndarray) -> np.ndarray:
    """Work where every token costs the same."""
    return lengths.astype(np.float64)


class Cutter(ABC):
    """A way to cut samples. Hosts gather all lengths, and each makes the plans of all."""

    work: Work

    @property
    @abstractmethod
    def max_tokens_per_device(self) -> int | None:
        """None without a quota."""

    @abstractmethod
    def plan(self, hosts: Sequence[Lengths], *, devices_per_host: int) -> tuple[Plan, ...]:
        """The plan of each host."""

    def __call__(self, samples: Sequence[Sample], mesh: Mesh) -> Cut:
        lengths, devices = lengths_over_hosts(samples), num_local_row_shards(mesh)
        plans = self.plan(lengths, devices_per_host=devices)
        return Cut(plans, lengths, devices, self.work, self.max_tokens_per_device)


@dataclass(frozen=True)
class FixedRows(Cutter):
    """One sample a row, a fixed number of rows; see `plan_fixed`."""

    rows_per_device: int | None
    trim_tail: bool
    work: Work = per_token
    shape: RowShape | None = None
    """Of every row, whatever the samples; None: as the longest of them asks."""

    @property
    def max_tokens_per_device(self) -> None:
        return None

    def plan(self, hosts: Sequence[Lengths], *, devices_per_host: int) -> tuple[Plan, ...]:
        plans = plan_fixed(
            hosts, rows_per_device=self.rows_per_device, devices_per_host=devices_per_host, trim_tail=self.trim_tail
        )
        if self.shape is None:
            return plans
        return tuple(Plan(tuple(replace(one, shape=self.shape) for one in plan.micro_batches)) for plan in plans)


@dataclass(frozen=True)
class PackedRows(Cutter):
    """As many samples as a token budget allows, packed into rows; see `plan_token_budget`."""

    budget: TokenBudget
    work: Work

    @property
    def max_tokens_per_device(self) -> int:
        return self.budget.max_tokens_per_device

    def plan(self, hosts: Sequence[Lengths], *, devices_per_host: int) -> tuple[Plan, ...]:
        return plan_token_budget(hosts, self.budget, self.work, devices_per_host=devices_per_host)


@dataclass(frozen=True)
class EqualShapes(Cutter):
    """Cuts as another does, then fills the last micro-batch up to the shape of those before it, with empty rows.

    For all parts of a long file but the last: their tails would each have a shape of their own.
    """

    cut: FixedRows | PackedRows

    @property
    def work(self) -> Work:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.cut.work

    @property
    def max_tokens_per_device(self) -> int | None:
        return self.cut.max_tokens_per_device

    def plan(self, hosts: Sequence[Lengths], *, devices_per_host: int) -> tuple[Plan, ...]:
        plans = self.cut.plan(hosts, devices_per_host=devices_per_host)
        return tuple(_of_equal_shapes(plan, devices_per_host) for plan in plans)


def _of_equal_shapes(plan: Plan, num_devices: int) -> Plan:
    *others, tail = plan.micro_batches
    if not others:
        return plan
    held, wanted = len(tail.rows) // num_devices, len(others[0].rows) // num_devices
    empty = ((),) * (wanted - held)
    rows = [row for first in range(0, len(tail.rows), held) for row in (*tail.rows[first : first + held], *empty)]
    return Plan((*others, MicroBatch(tuple(rows), others[0].shape)))


def lengths_of(samples: Sequence[Sample]) -> Lengths:
    """Prompts are the same where their token ids are."""
    numbers: dict[bytes, int] = {}
    prompt_numbers = [numbers.setdefault(s.prompt.token_ids.tobytes(), len(numbers)) for s in samples]
    return Lengths(
        np.asarray([len(s.prompt.token_ids) for s in samples], np.int64),
        np.asarray([len(s.completion_ids) for s in samples], np.int64),
        np.asarray(prompt_numbers, np.int64),
    )


def lengths_over_hosts(samples: Sequence[Sample]) -> tuple[Lengths, ...]:
    """Every host's, in the order of processes."""
    own = lengths_of(samples)
    counts = gather_over_hosts(np.asarray(len(samples)))
    padded = np.zeros((3, max(1, counts.max())), np.int64)
    padded[:, : len(samples)] = own.prompts, own.completions, own.prompt_numbers
    gathered = gather_over_hosts(padded)
    return tuple(Lengths(*columns[:, :count]) for columns, count in zip(gathered, counts, strict=True))
