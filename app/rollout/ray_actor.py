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
from app.model.lora import LoRA
from app.records.versions import drawing, program_facts
from app.rollout.counters import Tally
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.events import Kind, RunSegment
from app.rollout.sequence import Row, Suspended
from app.rollout.shape_buckets import SlotShapes
from app.rollout.slot_engine import SlotEngine
from app.rollout.workers import Admission, Worker
from settings.errors import InputError
from settings.schema.lora import Quantization
from settings.schema.mesh import Mesh as MeshSettings

Leaves = list[np.ndarray]
"""Of a tree, in order, as unsigned integers of the same bits: buffers that every process can map, of any dtype."""


def bits_of(tree: Any) -> Leaves:
    """On the host."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [leaf.view(f"u{leaf.itemsize}") for leaf in leaves]


def tree_of(leaves: Leaves, *, like: Any) -> Any:
    """The tree that had these bits. Copies nothing."""
    shapes, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, [bits.view(one.dtype) for bits, one in zip(leaves, shapes, strict=True)])


@dataclass(frozen=True)
class SlotPlan:
    """What slots are like, as plain data."""

    architecture: Architecture
    shapes: SlotShapes
    kind: Kind
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
    lora: LoRA | None = None
    """Adapters that stay beside the kernels while decoding."""
    quantization: Quantization | None = None
    """Of these kernels."""


class Incoming(NamedTuple):
    """A row that comes into the slots."""

    uid: str
    epoch: int
    row: Row
    kept: tuple[Any, ...]
    """The object with its cache, as `SlotActor.suspend` gives it, if there is one."""


class RanRow(NamedTuple):
    uid: str
    tokens: Int32[np.ndarray, "3 C"]
    """As in `Row.drawn`."""
    finish_reason: str | None


class Ran(NamedTuple):
    """A segment."""

    rows: list[RanRow]
    steps: int
    policy_version: int
    tally: Tally


class Introduction(NamedTuple):
    """Who an actor is."""

    pid: int
    host: str
    devices: str
    facts: dict[str, str]
    """What must be the same in all processes of a rollout."""


class SlotActor:
    """Slots on all devices of this process. After an error they are of no use until they are opened anew.

    Args:
        patience_s: how long it waits for a cache that another has kept; then it computes it.

    Raises:
        InputError: no devices, or devices that the slots cannot be split over.
    """

    def __init__(self, plan: SlotPlan, patience_s: float):
        jax.config.update("jax_platforms", plan.platforms)
        jax.config.update("jax_default_matmul_precision", plan.matmul_precision)
        if plan.platforms == "cpu":
            jax.config.update("jax_num_cpu_devices", plan.tp)
        _check_devices(plan)
        mesh = topology.make_mesh(MeshSettings(shape=f"1,-1,{plan.tp}"))
        _check_rows(plan, num_row_shards(mesh))
        engine = SlotEngine(
            DecoderDefinition.of(plan.architecture, lora=plan.lora, quantization=plan.quantization),
            mesh,
            plan.shapes,
            eos_ids=plan.eos_ids,
            dtype=np.dtype(plan.dtype),
            exact=plan.exact,
        )
        self._worker = Worker("", plan.kind, engine)
        self._patience_s, self._quantization = patience_s, plan.quantization
        self._rows: dict[str, Row] = {}
        self._has_failed = False
        self._num_fed = 0
        engine.when_fed = self._count_fed

    def introduce(self) -> Introduction:
        devices = jax.local_devices()
        found = f"{len(devices)} x {devices[0].device_kind}"
        return Introduction(os.getpid(), socket.gethostname(), found, program_facts(drawing(self._quantization)))

    def compile(self, rules: SamplingRules, *, suspends: bool) -> None:
        """See `SlotEngine.compile`."""
        self._worker.engine.compile(rules, suspends=suspends)

    def open(self, weights: Leaves, *, rules: SamplingRules, seed: int, policy_version: int, suspends: bool) -> None:
        """Empty slots; see `Worker.open`."""
        self._rows, self._has_failed = {}, False
        with self._failing_for_good():
            self._worker.open(
                tree_of(weights, like=self._engine.programs.abstract_weights),
                rules=rules,
                seed=seed,
                policy_version=policy_version,
                suspends=suspends,
            )

    def segment(
        self, command: RunSegment, incoming: Sequence[Incoming], newer: Leaves | None, policy_version: int
    ) -> Ran:
        """Takes rows in and decodes all there are.

        Args:
            newer: weights that draw from now on.
            policy_version: of these.
        """
        with self._failing_for_good():
            if newer is not None:
                weights = tree_of(newer, like=self._engine.programs.abstract_weights)
                self._worker.offer(weights, policy_version=policy_version)
                del weights, newer
            admissions = deque(self._admission(one) for one in incoming)
            self._rows |= {one.uid: one.row for one in incoming}
            self._worker.begin(command, admissions)
            ended = self._worker.end()
            rows, drawn_by = [], 0
            for report in ended.rows:
                row = self._rows[report.uid] if report.finish is None else self._rows.pop(report.uid)
                drawn_by = row.versions[-1][0]
                rows.append(RanRow(report.uid, row.drawn[-1], report.finish))
            return Ran(rows, ended.steps, drawn_by, self._worker.take_tally())

    def _admission(self, one: Incoming) -> Admission:
        if not one.kept:
            return Admission(one.row, one.uid, one.epoch, kept=None)
        kept: Future[Suspended] = Future()
        try:
            leaves = ray.get(one.kept[0], timeout=self._patience_s)
            kept.set_result(Suspended(one.row, tree_of(leaves, like=self._abstract_row)))
        except Exception as error:
            # Whoever kept it may be gone, with the object or before there was one.
            kept.set_exception(error)
        return Admission(one.row, one.uid, one.epoch, kept=kept)

    @cached_property
    def _abstract_row(self) -> Any:
        return self._engine.programs.abstract_cache(1, self._engine.shapes.max_length)

    @property
    def _engine(self) -> SlotEngine:
        return self._worker.engine

    def suspend(self, uid: str) -> Leaves:
        """Takes a row out: its cache."""
        with self._failing_for_good():
            return bits_of(self._worker.suspend(self._rows.pop(uid)).cache)

    def close(self) -> None:
        """Frees the devices."""
        self._rows = {}
        self._worker.close()

    @ray.method(concurrency_group="watch")
    def num_fed(self) -> int:
        """Tokens that were computed again so far. Answers while a segment runs."""
        return self._num_fed

    def _count_fed(self) -> None:
        self._num_fed += 1

    @contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        if self._has_failed:
            raise RuntimeError("the worker has failed before")
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise


def _check_devices(plan: SlotPlan) -> None:
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"rollout.ray.{plan.kind}: JAX finds no {plan.platforms} devices on {socket.gethostname()}, where Ray put "
            "an actor; ask for them with num_gpus or resources"
        ) from error


def _check_rows(plan: SlotPlan, row_shards: int) -> None:
    rungs = plan.shapes.batch_rungs
    if any(rows % row_shards for rows in rungs):
        raise InputError(
            f"rollout.workers.{plan.kind}.slots: batches of {', '.join(map(str, rungs))} rows cannot all be split over "
            f"the {row_shards} devices of a Ray actor that hold rows; set it to a multiple of {4 * row_shards}"
        )
