"""Ways to split samples into micro-batches; all hosts make the same plan from all-gathered lengths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import jax
import numpy as np
from jax.sharding import Mesh

from app.batching.micro_batch_plan import (
    MicroBatch,
    MicroBatchPlan,
    RowShape,
    SequenceCost,
    SequenceLengths,
    TokenBudget,
    plan_fixed_rows,
    plan_token_budget,
)
from app.batching.packing_stats import packing_stats
from app.distributed.collectives import gather_rows
from app.mesh.placement import num_row_shards
from app.records.sample import Sample


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """Micro-batches of all devices, for the samples of all hosts, which are numbered host by host."""

    plan: MicroBatchPlan
    lengths: SequenceLengths
    num_samples_by_host: tuple[int, ...]
    num_devices: int
    sequence_cost: SequenceCost

    @property
    def local_plan(self) -> MicroBatchPlan:
        """The part of the plan for this host's devices; `fetch_rows` gets its samples."""
        return self.plan.part(jax.process_index(), len(self.num_samples_by_host))

    def packing_stats(self) -> dict[str, float]:
        """Returns fill, balance and padding of the plan; see `app.batching.packing_stats`."""
        return packing_stats(self.plan, self.lengths, self.sequence_cost, num_devices=self.num_devices)


def token_count_cost(lengths: np.ndarray) -> np.ndarray:
    """Returns the lengths as costs, so that every token costs the same."""
    return lengths.astype(np.float64)


class MicroBatcher(ABC):
    """A way to split samples into micro-batches. Hosts gather all lengths, and each host plans for all hosts."""

    sequence_cost: SequenceCost

    @abstractmethod
    def plan(self, lengths: SequenceLengths, *, num_devices: int) -> MicroBatchPlan:
        """Returns the plan for all devices."""

    def __call__(self, samples: Sequence[Sample], mesh: Mesh) -> GlobalPlan:
        """Plans for the samples of all hosts. All hosts must call it together."""
        (lengths, counts), num_devices = gather_lengths(samples), num_row_shards(mesh)
        plan = self.plan(lengths, num_devices=num_devices)
        return GlobalPlan(plan, lengths, counts, num_devices, self.sequence_cost)


@dataclass(frozen=True)
class FixedRowBatcher(MicroBatcher):
    """Plans micro-batches with a fixed number of rows and one sample per row; see `plan_fixed_rows`."""

    rows_per_device: int | None
    trim_tail: bool
    sequence_cost: SequenceCost = token_count_cost
    shape: RowShape | None = None
    """Shape of all rows; None = the shape that the longest sample needs."""

    def plan(self, lengths: SequenceLengths, *, num_devices: int) -> MicroBatchPlan:
        plan = plan_fixed_rows(
            lengths, rows_per_device=self.rows_per_device, num_devices=num_devices, trim_tail=self.trim_tail
        )
        if self.shape is None:
            return plan
        return MicroBatchPlan(tuple(replace(one, shape=self.shape) for one in plan.micro_batches))


@dataclass(frozen=True)
class PackedRowBatcher(MicroBatcher):
    """Packs samples into rows within a token budget; see `plan_token_budget`."""

    budget: TokenBudget
    sequence_cost: SequenceCost

    def plan(self, lengths: SequenceLengths, *, num_devices: int) -> MicroBatchPlan:
        return plan_token_budget(lengths, self.budget, self.sequence_cost, num_devices=num_devices)


@dataclass(frozen=True)
class EqualShapeBatcher(MicroBatcher):
    """Splits samples like `batcher`, then pads the last micro-batch with empty rows to the shape of the others.

    It is used for all parts of a long file except the last; otherwise, each part could add another shape to compile.
    """

    batcher: FixedRowBatcher | PackedRowBatcher

    @property
    def sequence_cost(self) -> SequenceCost:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.batcher.sequence_cost

    def plan(self, lengths: SequenceLengths, *, num_devices: int) -> MicroBatchPlan:
        plan = self.batcher.plan(lengths, num_devices=num_devices)
        *others, tail = plan.micro_batches
        if not others:
            return plan
        count = len(tail.rows) // num_devices
        empty = ((),) * (len(others[0].rows) // num_devices - count)
        rows = [row for first in range(0, len(tail.rows), count) for row in (*tail.rows[first : first + count], *empty)]
        return MicroBatchPlan((*others, MicroBatch(tuple(rows), others[0].shape)))


def sequence_lengths(samples: Sequence[Sample]) -> SequenceLengths:
    """Returns the lengths of samples; the key of a prompt is a hash of its token ids."""
    keys = b"".join(sha256(s.prompt.token_ids.tobytes()).digest()[:8] for s in samples)
    return SequenceLengths(
        np.asarray([len(s.prompt.token_ids) for s in samples], np.int64),
        np.asarray([len(s.completion_ids) for s in samples], np.int64),
        np.frombuffer(keys, np.int64),
    )


def gather_lengths(samples: Sequence[Sample]) -> tuple[SequenceLengths, tuple[int, ...]]:
    """Returns the lengths of all hosts' samples, host by host, and the number of samples of each host."""
    local = sequence_lengths(samples)
    hosts = gather_rows(np.stack([local.prompts, local.completions, local.prompt_keys], axis=1))
    return SequenceLengths(*np.concatenate(hosts).T), tuple(map(len, hosts))
