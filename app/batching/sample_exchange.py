"""Moves samples to the hosts that compute their rows, and per-token values back.

All hosts know from the plan which samples move and how long they are, so messages need no headers. For each sample, in
order of index, a message contains the token ids of prompt and completion, then the fields that the receiver reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, pairwise

import jax
import numpy as np
from jaxtyping import Float32, Int32, Int64

from app.batching.micro_batch_plan import MicroBatchPlan
from app.batching.micro_batcher import GlobalPlan
from app.distributed.collectives import exchange_over_hosts, gather_over_hosts
from app.model.architecture import RouteShape
from app.model.experts import UNRECORDED, unpack_routes
from app.records.sample import Prompt, Sample

READ_BY_SCORING = ("mask",)
"""Fields that a forward pass reads in addition to token ids."""


@dataclass(frozen=True)
class HostRows:
    """The rows of this host's devices, and the samples in them."""

    samples: Sequence[Sample]
    """Samples of other hosts have only token ids and the requested fields."""
    plan: MicroBatchPlan
    """Micro-batches of `samples` for this host's devices."""
    return_to_owners: Callable[[Sequence[Float32[np.ndarray, "C"]]], list[Float32[np.ndarray, "C"]]] = list
    """(an array for each of `samples`, with one value per completion token) -> those of this host's own samples,
    whichever hosts computed them. All hosts must call it together."""


def fetch_rows(
    samples: Sequence[Sample], global_plan: GlobalPlan, fields: Sequence[str], route_shape: RouteShape | None = None
) -> HostRows:
    """Exchanges samples, so that each host has the samples of its rows. All hosts must call it together.

    Args:
        samples: this host's samples, as planned.
        fields: per-token fields that the receiver reads; all samples must have them.
        route_shape: sizes of the routes that the receiver replays; None = no replay.

    Raises:
        RuntimeError: hosts have made different plans, which is a bug.
    """
    if len(global_plan.num_samples_by_host) == 1:
        return HostRows(samples, global_plan.plan)
    _check_equal_plans(global_plan.plan)
    routing = SampleRouting.from_plan(global_plan, route_shape)
    fetched = routing.fetch(samples, fields)
    index_of = {number: i for i, number in enumerate(routing.numbers_of(routing.process_index))}.__getitem__
    local = [
        replace(one, rows=tuple(tuple(tuple(map(index_of, segment)) for segment in row) for row in one.rows))
        for one in global_plan.local_plan.micro_batches
    ]
    return HostRows(fetched, MicroBatchPlan(tuple(local)), routing.return_to_owners)


def _check_equal_plans(plan: MicroBatchPlan) -> None:
    digests = gather_over_hosts(np.frombuffer(sha256(repr(plan).encode()).digest(), np.uint8))
    for host, digest in enumerate(digests):
        if not np.array_equal(digest, digests[0]):
            raise RuntimeError(f"hosts 0 and {host} planned different micro-batches; this is a bug, please report it")


@dataclass(frozen=True)
class SampleRouting:
    """The samples that move between hosts, with their lengths."""

    process_index: int
    numbers: Sequence[Sequence[Int64[np.ndarray, "N"]]]
    """numbers[a][b] are the indices of host a's samples that are in rows of host b, ascending."""
    first_number: int
    """Index of this host's first sample."""
    prompt_lengths: Int64[np.ndarray, "N"]
    completion_lengths: Int64[np.ndarray, "N"]
    route_shape: RouteShape | None
    """Sizes of the routes sent with the samples; None = no routes are sent."""

    @classmethod
    def from_plan(cls, global_plan: GlobalPlan, route_shape: RouteShape | None) -> SampleRouting:
        num_hosts = len(global_plan.num_samples_by_host)
        edges = np.cumsum([0, *global_plan.num_samples_by_host])
        in_rows = [np.sort(_members(global_plan.plan.part(host, num_hosts))) for host in range(num_hosts)]
        numbers = [
            [members[np.searchsorted(members, first) : np.searchsorted(members, last)] for members in in_rows]
            for first, last in pairwise(edges)
        ]
        here, lengths = jax.process_index(), global_plan.lengths
        return cls(here, numbers, int(edges[here]), lengths.prompts, lengths.completions, route_shape)

    def numbers_of(self, host: int) -> list[int]:
        """Returns the indices of the samples in a host's rows, ascending."""
        return list(chain.from_iterable(sent[host].tolist() for sent in self.numbers))

    def fetch(self, samples: Sequence[Sample], fields: Sequence[str]) -> list[Sample]:
        """Returns the samples of this host's rows, in ascending order of index; see `fetch_rows`."""
        own = dict(enumerate(samples, start=self.first_number))

        def columns(number: int) -> list[np.ndarray]:
            sample = own[number]
            values = [_as_int32(field, getattr(sample, field)) for field in fields]
            routes = [] if self.route_shape is None else [_routes_as_int32(sample, self.route_shape)]
            return [sample.prompt.token_ids, sample.completion_ids, *values, *routes]

        sizes = self.prompt_lengths + (1 + len(fields)) * self.completion_lengths
        if self.route_shape is not None:
            sizes += self.route_shape.num_words * (self.prompt_lengths + self.completion_lengths)
        received = self._exchange(self.numbers, sizes, columns)
        return [
            self._to_sample(number, received[number], fields) if number in received else own[number]
            for number in self.numbers_of(self.process_index)
        ]

    def _to_sample(self, number: int, data: Int32[np.ndarray, "numbers"], fields: Sequence[str]) -> Sample:
        length, num_new = int(self.prompt_lengths[number]), int(self.completion_lengths[number])
        prompt = Prompt(str(number), data[:length], "", None)
        end = length + (1 + len(fields)) * num_new
        completion, *values = data[length:end].reshape(1 + len(fields), -1)
        behavior = np.full(len(completion), np.nan, np.float32)
        sample = Sample(prompt, 0, number, completion, "", behavior, "", 0)
        if self.route_shape is not None:
            words = data[end:].reshape(length + num_new, self.route_shape.num_words)
            sample = replace(sample, routes=unpack_routes(words, self.route_shape))
        return replace(sample, **dict(_from_int32(field, value) for field, value in zip(fields, values, strict=True)))

    def return_to_owners(self, values: Sequence[Float32[np.ndarray, "C"]]) -> list[Float32[np.ndarray, "C"]]:
        """Returns the values of this host's samples; see `HostRows.return_to_owners`."""
        found = dict(zip(self.numbers_of(self.process_index), values, strict=True))
        back = list(zip(*self.numbers, strict=True))
        received = self._exchange(back, self.completion_lengths, lambda number: [_bits(found[number])])
        found |= {number: data.view(np.float32) for number, data in received.items()}
        own = chain.from_iterable(moved.tolist() for moved in self.numbers[self.process_index])
        return [found[number] for number in sorted(own)]

    def _exchange(
        self,
        numbers: Sequence[Sequence[Int64[np.ndarray, "N"]]],
        sizes: Int64[np.ndarray, "N"],
        columns: Callable[[int], Iterable[Int32[np.ndarray, "n"]]],
    ) -> dict[int, Int32[np.ndarray, "n"]]:
        """Sends arrays of known sizes to other hosts; returns the received arrays, with sample indices as keys.

        Args:
            numbers: indices of the samples that move, in the format of `self.numbers`.
            sizes: number of 32-bit words sent for each sample.
            columns: index of a sample on this host -> the arrays to send.
        """
        counts = np.asarray([[sizes[moved].sum() for moved in sent] for sent in numbers])
        np.fill_diagonal(counts, 0)
        nothing, index = np.zeros(0, np.int32), self.process_index
        parts = [
            np.concatenate([nothing, *(array for number in moved.tolist() for array in columns(number))])
            for moved in (nothing if host == index else moved for host, moved in enumerate(numbers[index]))
        ]
        found: dict[int, np.ndarray] = {}
        for host, data in enumerate(exchange_over_hosts(parts, counts)):
            if host != index:
                moved = numbers[host][index]
                ends = np.cumsum(sizes[moved])
                found |= zip(moved.tolist(), np.split(data, ends[:-1]), strict=False)
        return found


def _members(plan: MicroBatchPlan) -> Int64[np.ndarray, "N"]:
    segments = (segment for one in plan.micro_batches for row in one.rows for segment in row)
    return np.fromiter(chain.from_iterable(segments), np.int64)


def _bits(values: np.ndarray) -> Int32[np.ndarray, "C"]:
    """Reinterprets float32 numbers as int32, bit by bit."""
    return np.asarray(values, np.float32).view(np.int32)


def _as_int32(field: str, values: np.ndarray) -> Int32[np.ndarray, "C"]:
    return values.astype(np.int32) if field == "mask" else _bits(values)


def _routes_as_int32(sample: Sample, shape: RouteShape) -> Int32[np.ndarray, "words"]:
    """Packs a sample's routes into int32 words; inverse of `unpack_routes`."""
    num_tokens = len(sample.prompt.token_ids) + len(sample.completion_ids)
    packed = np.full((num_tokens, 4 * shape.num_words), UNRECORDED, np.uint8)
    if sample.routes is not None:
        packed[:, : shape.num_layers * shape.experts_per_token] = sample.routes.reshape(num_tokens, -1)
    return packed.view(np.int32).reshape(-1)


def _from_int32(field: str, values: Int32[np.ndarray, "C"]) -> tuple[str, np.ndarray]:
    """Returns the name and the decoded values of a sample's field; inverse of `_as_int32`."""
    if field == "mask":
        return "loss_mask", values.astype(np.bool_)
    return ("values" if field == "token_values" else field), values.view(np.float32)
