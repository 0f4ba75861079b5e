"""A Ray actor: a process that runs slots on its own devices.

It needs no settings, files or other workers: it gets the specification of its slots once, and weights and rows with
each call. It returns the tokens of every segment, so that at most one segment is lost if it dies.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from app.mesh import device_mesh
from app.mesh.program_cache import use_program_cache
from app.model.decoder import DecoderDefinition
from app.model.kv_cache import num_cache_shards
from app.rollout.counters import RolloutCounters
from app.rollout.engine.engine import SlotEngine
from app.rollout.engine.shapes import SlotShapes
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.protocol import RunSegment, SegmentEnded, WorkerKind
from app.rollout.sequence import DecodeText, RolloutSequence
from app.rollout.workers.worker import Admission, RolloutWorker
from settings.errors import InputError, join_words
from settings.schema.mesh import MeshSettings

BitLeaves = list[np.ndarray]
"""Leaves of a pytree, viewed as unsigned integers, so that processes can share arrays of any dtype."""


def to_bit_leaves(tree: Any) -> BitLeaves:
    """Copies the leaves of a pytree to the host, and returns them viewed as unsigned integers."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [leaf.view(f"u{leaf.itemsize}") for leaf in leaves]


def from_bit_leaves(leaves: BitLeaves, *, like: Any) -> Any:
    """Returns the pytree with these leaves, and with the structure and dtypes of `like`, without copying."""
    shapes, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, [bits.view(one.dtype) for bits, one in zip(leaves, shapes, strict=True)])


@dataclass(frozen=True)
class ActorSpec:
    """Specification of an actor's slots, which is sent to its process."""

    definition: DecoderDefinition
    shapes: SlotShapes
    kind: WorkerKind
    eos_ids: tuple[int, ...]
    dtype: str
    exact: bool
    tp: int
    """Number of devices over which the weights are split."""
    platforms: str
    """Value of JAX's option `jax_platforms` in the actor."""
    matmul_precision: str | None
    """JAX's matmul precision in the training process."""
    stop_text: DecodeText | None = None
    """Converts token ids to text, to find stop strings; it contains the tokenizer. None = there are no stop strings."""


class ActorInfo(NamedTuple):
    pid: int
    devices: str
    """Number and kind of its devices, as in `4 x TPU v5 lite`."""


class ActorSegment(NamedTuple):
    """Result of a segment in an actor."""

    ended: SegmentEnded
    tokens: dict[str, Int32[np.ndarray, "fields C"]]
    """Uid -> tokens of a row that sampled any or is done; see `RolloutSequence.segment_tokens`."""
    policy_version: int
    """Version of the weights that sampled the tokens."""
    counters: RolloutCounters
    prompt_routes: dict[str, Int32[np.ndarray, "S words"]]
    """Uid -> routes of the prompt of a row that sampled its first tokens, if routes are recorded."""


class RolloutActor:
    """A slot engine on all devices of this process, with copies of the rows in its slots.

    Raises:
        InputError: JAX finds no devices, or the slots cannot be split over them.
    """

    def __init__(self, spec: ActorSpec):
        jax.config.update("jax_platforms", spec.platforms)
        jax.config.update("jax_default_matmul_precision", spec.matmul_precision)
        if spec.platforms == "cpu":
            jax.config.update("jax_num_cpu_devices", spec.tp)
        use_program_cache()
        try:
            jax.devices()
        except (RuntimeError, AssertionError) as error:
            raise InputError(
                f"rollout.ray.{spec.kind}_resources: JAX finds no {spec.platforms} devices on {socket.gethostname()}, "
                "where Ray started an actor; request some, as in {GPU: 1} or {TPU: 4}, and install JAX for them there"
            ) from error
        mesh = device_mesh.make_mesh(MeshSettings(shape=f"1,-1,{spec.tp}"))
        check_slots_divide(spec, num_cache_shards(mesh, spec.definition.architecture.num_kv_heads))
        self._engine = SlotEngine(
            spec.definition,
            mesh,
            spec.shapes,
            eos_ids=spec.eos_ids,
            dtype=np.dtype(spec.dtype),
            exact=spec.exact,
            stop_text=spec.stop_text,
        )
        self._worker = RolloutWorker("", spec.kind, self._engine)
        self._rows: dict[str, RolloutSequence] = {}

    def get_info(self) -> ActorInfo:
        devices = jax.local_devices()
        return ActorInfo(os.getpid(), f"{len(devices)} x {devices[0].device_kind}")

    def compile(self, rules: SamplingRules, *, suspends: bool) -> None:
        self._engine.compile(rules, suspends=suspends)

    def open(self, weights: BitLeaves, request: GenerationRequest, *, suspends: bool) -> None:
        """Starts a rollout with empty slots; see `RolloutWorker.open`."""
        self._rows = {}
        tree = from_bit_leaves(weights, like=self._engine.programs.abstract_weights)
        self._worker.open(tree, request, suspends=suspends)

    def run_segment(
        self,
        command: RunSegment,
        admissions: Sequence[Admission],
        new_weights: BitLeaves | None,
        policy_version: int,
    ) -> ActorSegment:
        """Admits rows and decodes a segment.

        Args:
            new_weights: weights of version `policy_version` to use from now on; None = keep the current ones.
        """
        if new_weights is not None:
            weights = from_bit_leaves(new_weights, like=self._engine.programs.abstract_weights)
            self._worker.queue_weights(weights, policy_version=policy_version)
            del weights, new_weights
        self._rows |= {one.row.name: one.row for one in admissions}
        num_tokens = {uid: row.num_tokens for uid, row in self._rows.items()}
        self._worker.start_segment(command, deque(admissions))
        ended = self._worker.finish_segment()
        tokens, prompt_routes, version = {}, {}, 0
        for report in ended.rows:
            row = self._rows[report.uid]
            if report.finish is not None or row.is_acting:
                del self._rows[report.uid]
            # A row that waited for blocks, or only had forced tokens, sampled nothing.
            if row.num_tokens > num_tokens[report.uid] or report.finish is not None:
                tokens[report.uid], version = row.segment_tokens[-1], row.segment_versions[-1][0]
                if not num_tokens[report.uid] and row.prompt_routes is not None:
                    prompt_routes[report.uid] = row.prompt_routes
        return ActorSegment(ended, tokens, version, self._worker.take_counters(), prompt_routes)

    def suspend(self, uid: str) -> None:
        """Takes a row out of its slot and drops its KV cache."""
        self._worker.suspend(self._rows.pop(uid))

    def close(self) -> None:
        """Frees the device memory of weights and cache."""
        self._rows = {}
        self._worker.close()


def check_slots_divide(spec: ActorSpec, row_shards: int) -> None:
    """Raises InputError if a batch size of the slots cannot be split evenly over the devices that hold rows."""
    buckets = spec.shapes.batch_buckets
    if any(rows % row_shards for rows in buckets):
        raise InputError(
            f"rollout.workers.{spec.kind}.slots: batches of {join_words(buckets, last='and')} rows cannot all be split "
            f"evenly over the {row_shards} devices of a Ray actor that hold rows; set it to a multiple of "
            f"{4 * row_shards}"
        )
