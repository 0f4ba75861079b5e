"""A Ray actor: a process that runs slots on its own devices.

It needs no settings, files or other workers. It gets the specification of its slots once, and weights and rows with the
calls that need them. It returns the tokens of every segment, so that at most one segment is lost if it fails.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import ray

from app.mesh import device_mesh
from app.mesh.program_cache import use_program_cache
from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition
from app.model.kv_cache import num_cache_shards
from app.model.lora import LoRAConfig
from app.records.versions import program_versions, sampling_packages
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.protocol import RunSegment, WorkerKind
from app.rollout.sequence import SuspendedSequence
from app.rollout.slots.shape_buckets import SlotShapes
from app.rollout.slots.slot_engine import SlotEngine
from app.rollout.stop_strings import DecodeText
from app.rollout.workers.remote_worker import RemoteSegment, ServedRows
from app.rollout.workers.worker import Admission, RolloutWorker
from settings.errors import InputError
from settings.schema.lora import Quantization
from settings.schema.mesh import MeshSettings

BitLeaves = list[np.ndarray]
"""Leaves of a tree as unsigned integers with the same bits, which processes can share whatever the dtype."""


def to_bit_leaves(tree: Any) -> BitLeaves:
    """Copies the leaves of a tree to the host and returns their bits."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [leaf.view(f"u{leaf.itemsize}") for leaf in leaves]


def from_bit_leaves(leaves: BitLeaves, *, like: Any) -> Any:
    """Returns the tree with these bits and the structure and dtypes of `like`, without copying."""
    shapes, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, [bits.view(one.dtype) for bits, one in zip(leaves, shapes, strict=True)])


@dataclass(frozen=True)
class ActorSpec:
    """Specification of an actor's slots, as plain data."""

    architecture: Architecture
    shapes: SlotShapes
    kind: WorkerKind
    eos_ids: tuple[int, ...]
    dtype: str
    exact: bool
    tp: int
    """Number of devices over which the weights are split."""
    platforms: str
    """JAX platforms that the actor uses."""
    matmul_precision: str | None
    """JAX's matmul precision in the training process."""
    lora: LoRAConfig | None = None
    """Adapters that stay separate from the kernels during decoding."""
    quantization: Quantization | None = None
    """Quantization of the adapted kernels."""
    decode_text: DecodeText | None = None
    """Converts token ids to text, if there are stop strings. It takes a tokenizer to the actor."""


class ActorInfo(NamedTuple):
    """Location of an actor, and its software versions."""

    pid: int
    host: str
    devices: str
    versions: dict[str, str]
    """Versions that must be the same in all processes of a rollout."""


class RolloutActor:
    """Slots on all devices of this process. After an error it refuses every call until it is opened again.

    Args:
        cache_timeout_s: maximum wait for a suspended row's cache, after which the actor recomputes it.

    Raises:
        InputError: JAX finds no devices, or the slots cannot be split over them.
    """

    def __init__(self, spec: ActorSpec, cache_timeout_s: float):
        jax.config.update("jax_platforms", spec.platforms)
        jax.config.update("jax_default_matmul_precision", spec.matmul_precision)
        if spec.platforms == "cpu":
            jax.config.update("jax_num_cpu_devices", spec.tp)
        use_program_cache()
        try:
            jax.devices()
        except (RuntimeError, AssertionError) as error:
            raise InputError(
                f"rollout.ray.{spec.kind}: JAX finds no {spec.platforms} devices on {socket.gethostname()}, where Ray "
                "started an actor; request them with num_gpus or resources"
            ) from error
        mesh = device_mesh.make_mesh(MeshSettings(shape=f"1,-1,{spec.tp}"))
        check_slots_divide(spec, num_cache_shards(mesh, spec.architecture.num_kv_heads))
        self._spec, self._cache_timeout_s = spec, cache_timeout_s
        self._engine = SlotEngine(
            DecoderDefinition.create(spec.architecture, lora=spec.lora, quantization=spec.quantization),
            mesh,
            spec.shapes,
            eos_ids=spec.eos_ids,
            dtype=np.dtype(spec.dtype),
            exact=spec.exact,
            decode_text=spec.decode_text,
        )
        self._worker = RolloutWorker("", spec.kind, self._engine)
        self._served = ServedRows(self._worker)
        self._has_failed = False

    def get_info(self) -> ActorInfo:
        devices = jax.local_devices()
        versions = program_versions(sampling_packages(self._spec.quantization))
        return ActorInfo(os.getpid(), socket.gethostname(), f"{len(devices)} x {devices[0].device_kind}", versions)

    def compile(self, rules: SamplingRules, *, suspends: bool) -> None:
        self._engine.compile(rules, suspends=suspends)

    def open(self, weights: BitLeaves, request: GenerationRequest, *, suspends: bool) -> None:
        """Starts a rollout with empty slots; see `RolloutWorker.open`."""
        self._served, self._has_failed = ServedRows(self._worker), False
        with self._refuse_after_failure():
            tree = from_bit_leaves(weights, like=self._engine.programs.abstract_weights)
            self._worker.open(tree, request, suspends=suspends)

    def run_segment(
        self,
        command: RunSegment,
        admissions: Sequence[Admission],
        cache_refs: Mapping[str, Any],
        new_weights: BitLeaves | None,
        policy_version: int,
    ) -> RemoteSegment:
        """Admits rows and decodes a segment.

        Args:
            cache_refs: Ray references to the caches of admitted rows, by uid, as returned by `suspend`.
            new_weights: weights to use from now on, of version `policy_version`; None = keep the present ones.
        """
        with self._refuse_after_failure():
            if new_weights is not None:
                weights = from_bit_leaves(new_weights, like=self._engine.programs.abstract_weights)
                self._worker.queue_weights(weights, policy_version=policy_version)
                del weights, new_weights
            self._served.admit(admissions)
            self._worker.start_segment(
                command, deque(one._replace(suspended=self._fetch_cache(one, cache_refs)) for one in admissions)
            )
            return self._served.segment_result(self._worker.finish_segment())

    def _fetch_cache(self, one: Admission, cache_refs: Mapping[str, Any]) -> Future[SuspendedSequence] | None:
        if one.uid not in cache_refs:
            return None
        fetched: Future[SuspendedSequence] = Future()
        try:
            leaves, length = ray.get(cache_refs[one.uid], timeout=self._cache_timeout_s)
            cache = from_bit_leaves(leaves, like=self._engine.programs.abstract_row) if leaves else None
            fetched.set_result(SuspendedSequence(one.row, cache, length))
        except Exception as error:
            # The actor that suspended the row may have died together with the cache, or before storing it.
            fetched.set_exception(error)
        return fetched

    def suspend(self, uid: str) -> tuple[BitLeaves, int]:
        """Takes a row out of its slot; returns its cache and `SuspendedSequence.length`."""
        with self._refuse_after_failure():
            suspended = self._worker.suspend(self._served.take(uid))
            return to_bit_leaves(suspended.cache), suspended.length

    def close(self) -> None:
        """Frees the devices."""
        self._served = ServedRows(self._worker)
        self._worker.close()

    @contextmanager
    def _refuse_after_failure(self) -> Iterator[None]:
        if self._has_failed:
            raise RuntimeError("the worker has failed and must be opened again before other calls")
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise


def check_slots_divide(spec: ActorSpec, row_shards: int) -> None:
    """Raises InputError if a batch size of the slots cannot be split over the devices that hold rows."""
    buckets = spec.shapes.batch_buckets
    if any(rows % row_shards for rows in buckets):
        raise InputError(
            f"rollout.workers.{spec.kind}.slots: batches of {', '.join(map(str, buckets))} rows cannot all be split "
            f"over the {row_shards} devices of a Ray actor that hold rows; set it to a multiple of {4 * row_shards}"
        )
