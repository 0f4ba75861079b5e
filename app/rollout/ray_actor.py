"""What runs in the process of a Ray actor: a worker's slots on the devices that are there.

It knows nothing of settings, files or other workers. What its slots are like it is told once, weights and rows as they
are needed; it hands back what was drawn at the edge of every segment, so that no more than one is ever lost with it.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
import ray
from jaxtyping import Int32

from app.mesh import topology
from app.mesh.placement import num_row_shards
from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition
from app.model.lora import LoRAConfig
from app.records.versions import program_versions, sampling_packages
from app.rollout.counters import RolloutCounters
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.events import RunSegment, WorkerKind
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.shape_buckets import SlotShapes
from app.rollout.slot_engine import SlotEngine
from app.rollout.workers import Admission, RolloutWorker
from settings.errors import InputError
from settings.schema.lora import Quantization
from settings.schema.mesh import MeshSettings as MeshSettings

BitLeaves = list[np.ndarray]
"""Of a tree, in order, as unsigned integers of the same bits: buffers that every process can map, of any dtype."""


def to_bit_leaves(tree: Any) -> BitLeaves:
    """On the host."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [leaf.view(f"u{leaf.itemsize}") for leaf in leaves]


def from_bit_leaves(leaves: BitLeaves, *, like: Any) -> Any:
    """The tree that had these bits. Copies nothing."""
    shapes, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, [bits.view(one.dtype) for bits, one in zip(leaves, shapes, strict=True)])


@dataclass(frozen=True)
class ActorSpec:
    """What slots are like, as plain data."""

    architecture: Architecture
    shapes: SlotShapes
    kind: WorkerKind
    """Of the worker, in the settings of which errors speak."""
    eos_ids: tuple[int, ...]
    dtype: str
    exact: bool
    tp: int
    """Devices that weights are split over."""
    platforms: str
    """Of JAX: whose devices are used, and no others."""
    matmul_precision: str | None
    """Of JAX, as in the process that trains."""
    lora: LoRAConfig | None = None
    """Adapters that stay beside the kernels while decoding."""
    quantization: Quantization | None = None
    """Of these kernels."""


class ActorAdmission(NamedTuple):
    """A row that comes into the slots."""

    uid: str
    epoch: int
    row: RolloutSequence
    cache_ref: tuple[Any, ...]
    """The object with its cache, as `SlotActor.suspend` gives it, if there is one."""


class ActorRowResult(NamedTuple):
    uid: str
    tokens: Int32[np.ndarray, "3 C"]
    """As in `RolloutSequence.segment_tokens`."""
    finish_reason: str | None


class ActorSegmentResult(NamedTuple):
    """A segment."""

    rows: list[ActorRowResult]
    steps: int
    policy_version: int
    counters: RolloutCounters


class ActorInfo(NamedTuple):
    """Who an actor is."""

    pid: int
    host: str
    devices: str
    facts: dict[str, str]
    """What must be the same in all processes of a rollout."""


class RolloutActor:
    """Slots on all devices of this process. After an error they are of no use until they are opened anew.

    Args:
        patience_s: how long it waits for a cache that another has kept; then it computes it.

    Raises:
        InputError: no devices, or devices that the slots cannot be split over.
    """

    def __init__(self, spec: ActorSpec, cache_timeout_s: float):
        jax.config.update("jax_platforms", spec.platforms)
        jax.config.update("jax_default_matmul_precision", spec.matmul_precision)
        if spec.platforms == "cpu":
            jax.config.update("jax_num_cpu_devices", spec.tp)
        _check_devices(spec)
        mesh = topology.make_mesh(MeshSettings(shape=f"1,-1,{spec.tp}"))
        _check_rows(spec, num_row_shards(mesh))
        engine = SlotEngine(
            DecoderDefinition.create(spec.architecture, lora=spec.lora, quantization=spec.quantization),
            mesh,
            spec.shapes,
            eos_ids=spec.eos_ids,
            dtype=np.dtype(spec.dtype),
            exact=spec.exact,
        )
        self._worker = RolloutWorker("", spec.kind, engine)
        self._cache_timeout_s, self._quantization = cache_timeout_s, spec.quantization
        self._rows: dict[str, RolloutSequence] = {}
        self._has_failed = False
        self._num_replayed = 0
        engine.on_token_replayed = self._count_replayed

    def get_info(self) -> ActorInfo:
        devices = jax.local_devices()
        found = f"{len(devices)} x {devices[0].device_kind}"
        return ActorInfo(
            os.getpid(), socket.gethostname(), found, program_versions(sampling_packages(self._quantization))
        )

    def compile(self, rules: SamplingRules, *, suspends: bool) -> None:
        """See `SlotEngine.compile`."""
        self._worker.engine.compile(rules, suspends=suspends)

    def open(self, weights: BitLeaves, *, rules: SamplingRules, seed: int, policy_version: int, suspends: bool) -> None:
        """Empty slots; see `Worker.open`."""
        self._rows, self._has_failed = {}, False
        with self._refuse_after_failure():
            self._worker.open(
                from_bit_leaves(weights, like=self._engine.programs.abstract_weights),
                rules=rules,
                seed=seed,
                policy_version=policy_version,
                suspends=suspends,
            )

    def run_segment(
        self,
        command: RunSegment,
        incoming: Sequence[ActorAdmission],
        new_weights: BitLeaves | None,
        policy_version: int,
    ) -> ActorSegmentResult:
        """Takes rows in and decodes all there are.

        Args:
            newer: weights that draw from now on.
            policy_version: of these.
        """
        with self._refuse_after_failure():
            if new_weights is not None:
                weights = from_bit_leaves(new_weights, like=self._engine.programs.abstract_weights)
                self._worker.queue_weights(weights, policy_version=policy_version)
                del weights, new_weights
            admissions = deque(self._admission(one) for one in incoming)
            self._rows |= {one.uid: one.row for one in incoming}
            self._worker.start_segment(command, admissions)
            ended = self._worker.finish_segment()
            rows, drawn_by = [], 0
            for report in ended.rows:
                row = self._rows[report.uid] if report.finish is None else self._rows.pop(report.uid)
                drawn_by = row.segment_versions[-1][0]
                rows.append(ActorRowResult(report.uid, row.segment_tokens[-1], report.finish))
            return ActorSegmentResult(rows, ended.steps, drawn_by, self._worker.take_counters())

    def _admission(self, one: ActorAdmission) -> Admission:
        if not one.cache_ref:
            return Admission(one.row, one.uid, one.epoch, suspended=None)
        kept: Future[SuspendedSequence] = Future()
        try:
            leaves = ray.get(one.cache_ref[0], timeout=self._cache_timeout_s)
            kept.set_result(SuspendedSequence(one.row, from_bit_leaves(leaves, like=self._abstract_row)))
        except Exception as error:
            # Whoever kept it may be gone, with the object or before there was one.
            kept.set_exception(error)
        return Admission(one.row, one.uid, one.epoch, suspended=kept)

    @cached_property
    def _abstract_row(self) -> Any:
        return self._engine.programs.abstract_cache(1, self._engine.shapes.max_length)

    @property
    def _engine(self) -> SlotEngine:
        return self._worker.engine

    def suspend(self, uid: str) -> BitLeaves:
        """Takes a row out: its cache."""
        with self._refuse_after_failure():
            return to_bit_leaves(self._worker.suspend(self._rows.pop(uid)).cache)

    def close(self) -> None:
        """Frees the devices."""
        self._rows = {}
        self._worker.close()

    @ray.method(concurrency_group="watch")
    def num_replayed(self) -> int:
        """Tokens that were computed again so far. Answers while a segment runs."""
        return self._num_replayed

    def _count_replayed(self) -> None:
        self._num_replayed += 1

    @contextmanager
    def _refuse_after_failure(self) -> Iterator[None]:
        if self._has_failed:
            raise RuntimeError("the worker has failed before")
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise


def _check_devices(spec: ActorSpec) -> None:
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"rollout.ray.{spec.kind}: JAX finds no {spec.platforms} devices on {socket.gethostname()}, where Ray put "
            "an actor; ask for them with num_gpus or resources"
        ) from error


def _check_rows(spec: ActorSpec, row_shards: int) -> None:
    rungs = spec.shapes.batch_buckets
    if any(rows % row_shards for rows in rungs):
        raise InputError(
            f"rollout.workers.{spec.kind}.slots: batches of {', '.join(map(str, rungs))} rows cannot all be split over "
            f"the {row_shards} devices of a Ray actor that hold rows; set it to a multiple of {4 * row_shards}"
        )
