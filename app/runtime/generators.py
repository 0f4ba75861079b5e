"""Opens the generators for any number of samples: decode slots on a host's part of the mesh, or scheduled workers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from app.distributed.collectives import gather_over_hosts
from app.mesh.device_mesh import num_hosts
from app.mesh.submesh import assign_worker_devices, make_submesh
from app.model.decoder import DecoderDefinition
from app.model.kv_cache import num_cache_shards
from app.prompts.tokenizer import Tokenizer
from app.rollout.engine.continuous_batching import ContinuousBatchGenerator
from app.rollout.engine.engine import SlotEngine
from app.rollout.engine.programs import SlotPrograms
from app.rollout.engine.shapes import SlotShapes
from app.rollout.scheduling.protocol import WorkerKind
from app.rollout.workers.worker import RolloutWorker
from app.rollout.workers.worker_pool import RolloutWorkerPool, ScheduleConfig
from app.runtime.ray_workers import open_ray_workers
from app.runtime.slot_choice import TINY_PARAMETERS, blocks_in_memory, slots_in_blocks
from app.runtime.slot_shapes import slot_shapes_from_settings
from settings import Settings
from settings.errors import InputError
from settings.schema.rollout import MAX_BLOCKS, WorkerPoolSettings


def open_continuous_batching(
    settings: Settings,
    definition: DecoderDefinition,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    dtype: jnp.dtype,
    held_bytes: int,
    truncates: bool,
) -> ContinuousBatchGenerator:
    """Opens the decode slots of `rollout.slots` on a mesh of this host, or of all hosts, which must call it together.

    Compiles nothing unless memory is scarce.

    Args:
        held_bytes: bytes on each device of other arrays, which stay there during generation.
        truncates: whether the sampling rules can exclude tokens.

    Raises:
        InputError: the slots cannot be split over the devices.
    """
    # Workers, if there are any beside these slots, do not matter for their sizes.
    rollout = settings.rollout.model_copy(update={"scheduler": None})
    settings = settings.model_copy(update={"rollout": rollout})
    hosts, num_shards = num_hosts(mesh), num_cache_shards(mesh, definition.architecture.num_kv_heads)

    def make_engine(num_slots: int, num_blocks: int | None = None) -> SlotEngine:
        return _make_slot_engine(
            *(settings, definition, tokenizer, mesh),
            num_slots=num_slots,
            num_blocks=num_blocks,
            is_tiny=definition.num_parameters < TINY_PARAMETERS,
            setting="rollout.slots",
            dtype=dtype,
            compiled={},
        )

    is_auto, num_slots, num_blocks = rollout.slots == "auto", rollout.num_rows * hosts, None
    if is_auto:
        num_slots = math.ceil(num_slots / num_shards) * num_shards
    engine = make_engine(num_slots)
    if rollout.kv_blocks == "auto":
        num_blocks = blocks_in_memory(engine, held_bytes=held_bytes, truncates=truncates)
        if hosts > 1:
            num_blocks = _least_over_hosts(num_blocks)
        engine = engine if num_blocks is None else make_engine(num_slots, num_blocks)
    if is_auto and engine.programs.preempts:
        engine = make_engine(slots_in_blocks(engine.programs), num_blocks)
    return ContinuousBatchGenerator(engine, decode_text=tokenizer.decode, segment_rule=settings.rollout.segment)


def _least_over_hosts(number: int | None) -> int | None:
    """Returns the least number of any host, of which None means no limit."""
    least = int(gather_over_hosts(np.asarray(MAX_BLOCKS if number is None else number)).min())
    return None if least == MAX_BLOCKS else least


def open_workers(
    settings: Settings,
    definition: DecoderDefinition,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    devices: Sequence[int],
    dtype: jnp.dtype,
) -> RolloutWorkerPool | None:
    """Opens the workers of `rollout.workers` under `rollout.scheduler`; returns None without them. Compiles nothing.

    Each host has workers and a scheduler of its own.

    Args:
        mesh: a mesh with the tp of each worker.
        devices: numbers of this host's devices that generate.

    Raises:
        InputError: there are too few devices, or the slots cannot be split over them.
    """
    rollout = settings.rollout
    if rollout.scheduler is None or not rollout.has_workers:
        return None
    if rollout.pool == "ray":
        workers = open_ray_workers(settings, definition, tokenizer, mesh, dtype=dtype)
    else:
        workers = _open_local_workers(settings, definition, tokenizer, mesh, devices=devices, dtype=dtype)
    # Workers that share a device take turns on it.
    in_order = rollout.mode == "exact" or any(worker.device is not None for worker in workers)
    schedule = ScheduleConfig(rollout.scheduler, rollout.pdsr, rollout.segment, in_order)
    return RolloutWorkerPool(workers, schedule, decode_text=tokenizer.decode)


def _open_local_workers(
    settings: Settings,
    definition: DecoderDefinition,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    devices: Sequence[int],
    dtype: jnp.dtype,
) -> list[RolloutWorker]:
    rollout = settings.rollout
    pools: dict[WorkerKind, WorkerPoolSettings] = {"fast": rollout.workers.fast, "heavy": rollout.workers.heavy}
    host = f"host{jax.process_index()}/" if jax.process_count() > 1 else ""
    names: list[tuple[WorkerKind, str]] = [
        (kind, f"{host}{kind}-{i}") for kind, pool in pools.items() for i in range(pool.count)
    ]
    device_groups = assign_worker_devices(len(names), devices)
    are_shared = len(device_groups) > 1 and len(devices) == 1
    compiled: dict[SlotShapes, SlotPrograms] = {}
    workers = []
    for (kind, name), of_worker in zip(names, device_groups, strict=True):
        engine = _make_slot_engine(
            *(settings, definition, tokenizer, make_submesh(of_worker, template=mesh)),
            num_slots=pools[kind].slots,
            row_limit=pools[kind].max_length,
            setting=f"rollout.workers.{kind}.slots",
            dtype=dtype,
            compiled=compiled if are_shared else {},
        )
        workers.append(RolloutWorker(name, kind, engine, "0" if are_shared else None))
    return workers


def check_async_workers(workers: RolloutWorkerPool) -> None:
    """Raises InputError if workers cannot generate during training on the devices that train.

    A device runs programs in the order in which they were dispatched. A program on one device waits for no other, so
    every program of a one-device worker ends, and a training program queued after it continues. Training programs wait
    only for each other, and the main threads of all hosts dispatch them in the same order.
    """
    for worker in workers.workers:
        if worker.num_devices > 1:
            raise InputError(
                f"rollout.max_staleness: the worker {worker.name} has {worker.num_devices} devices, which wait for "
                "each other, as in training; programs dispatched to the same devices in different orders would wait "
                "forever. Set rollout.devices: 0.5, which gives workers devices of their own, or give each worker one "
                "device (rollout.workers.fast.count and heavy.count), or set rollout.max_staleness: 0"
            )


def _make_slot_engine(
    settings: Settings,
    definition: DecoderDefinition,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    num_slots: int,
    setting: str,
    dtype: jnp.dtype,
    compiled: dict[SlotShapes, SlotPrograms],
    num_blocks: int | None = None,
    row_limit: int | None = None,
    is_tiny: bool = False,
) -> SlotEngine:
    """Creates a slot engine, which reuses the programs in `compiled` for the same shapes, if there are any."""
    shapes = slot_shapes_from_settings(
        settings.rollout,
        num_slots,
        max_prompt_length=settings.data.max_prompt_length,
        row_shards=num_cache_shards(mesh, definition.architecture.num_kv_heads),
        setting=setting,
        num_blocks=num_blocks,
        row_limit=row_limit,
        has_turns=settings.env.is_used,
        is_tiny=is_tiny,
    )
    engine = SlotEngine(
        definition,
        mesh,
        shapes,
        eos_ids=tokenizer.eos_ids,
        dtype=dtype,
        exact=settings.rollout.mode == "exact",
        decode_text=tokenizer.decode,
        programs=compiled.get(shapes),
    )
    compiled[shapes] = engine.programs
    return engine
