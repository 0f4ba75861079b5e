"""What takes any number of samples at once: slots over a host's island, or scheduled workers on parts of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from app.mesh import placement, topology
from app.mesh.submesh import assign_worker_devices, make_submesh
from app.model.decoder import DecoderDefinition
from app.prompts.tokenizer import Tokenizer
from app.rollout.continuous_batching import ContinuousBatchGenerator
from app.rollout.scheduling.events import WorkerKind
from app.rollout.shape_buckets import SlotShapes, slot_shapes_from_settings
from app.rollout.slot_engine import SlotEngine
from app.rollout.slot_programs import SlotPrograms
from app.rollout.worker_pool import RolloutWorkerPool, ScheduleConfig
from app.rollout.workers import RolloutWorker
from app.runtime.ray_workers import open_ray_workers
from settings import Settings
from settings.errors import InputError
from settings.schema.rollout import WorkerPoolSettings


def open_continuous_batching(
    settings: Settings, definition: DecoderDefinition, tokenizer: Tokenizer, mesh: Mesh, *, dtype: jnp.dtype
) -> ContinuousBatchGenerator | None:
    """Those of `rollout.slots` on this host's island, if any. Compiles nothing yet.

    Raises:
        InputError: devices that the slots cannot be split over.
    """
    num_slots = settings.rollout.slots
    if num_slots is None:
        return None
    longest_prompt, shards = settings.data.max_prompt_length, placement.num_row_shards(mesh)
    shapes = slot_shapes_from_settings(
        settings.rollout, num_slots, max_prompt_length=longest_prompt, setting="rollout.slots", row_shards=shards
    )
    engine = _make_slot_engine(settings, definition, tokenizer, mesh, shapes=shapes, dtype=dtype)
    return ContinuousBatchGenerator(engine, decode_text=tokenizer.decode, segment_rule=settings.rollout.segment)


def open_workers(
    settings: Settings, definition: DecoderDefinition, tokenizer: Tokenizer, mesh: Mesh, *, dtype: jnp.dtype
) -> RolloutWorkerPool | None:
    """Those of `rollout.workers` on this host under `rollout.scheduler`, if any. Compiles nothing yet.

    Raises:
        InputError: devices that do not exist or suffice, or that the slots cannot be split over.
    """
    rollout = settings.rollout
    if rollout.scheduler is None or not rollout.has_workers:
        return None
    if rollout.pool == "ray":
        return open_ray_workers(settings, definition, tokenizer, mesh, dtype=dtype)
    pools: dict[WorkerKind, WorkerPoolSettings] = {"fast": rollout.workers.fast, "heavy": rollout.workers.heavy}
    host = f"host{jax.process_index()}/" if jax.process_count() > 1 else ""
    names: list[tuple[WorkerKind, str]] = [
        (kind, f"{host}{kind}-{i}") for kind, pool in pools.items() for i in range(pool.count)
    ]
    dotted = {f"rollout.workers.{kind}": pool for kind, pool in pools.items()}
    num_devices = len(topology.local_devices())
    islands = assign_worker_devices(dotted, num_devices=num_devices)
    sizes = {len(devices) for devices in islands}
    if rollout.mode == "exact" and len(sizes) > 1:
        raise InputError(
            f"rollout.mode: exact samples need workers with as many devices each, got {sorted(sizes)}; set "
            "rollout.workers.fast.devices and rollout.workers.heavy.devices, or rollout.mode: fast"
        )
    are_shared = len(islands) > 1 and num_devices == 1
    compiled: dict[SlotShapes, SlotPrograms] = {}
    workers = []
    for (kind, name), devices in zip(names, islands, strict=True):
        own = make_submesh(devices, template=mesh)
        num_slots = pools[kind].slots
        shards = placement.num_row_shards(own)
        shapes = slot_shapes_from_settings(
            rollout,
            num_slots,
            max_prompt_length=settings.data.max_prompt_length,
            row_shards=shards,
            setting=f"rollout.workers.{kind}.slots",
        )
        programs = compiled.get(shapes) if are_shared else None
        engine = _make_slot_engine(settings, definition, tokenizer, own, shapes=shapes, dtype=dtype, programs=programs)
        compiled[shapes] = engine.programs
        device, patience_s = "0" if are_shared else None, rollout.workers.lease_s and rollout.workers.lease_s / 2
        workers.append(RolloutWorker(name, kind, engine, device, patience_s))
    in_turn = rollout.workers.deterministic or len(workers) == 1 or are_shared
    schedule = ScheduleConfig(rollout.scheduler, rollout.pdsr, rollout.segment, in_turn, rollout.workers.lease_s)
    return RolloutWorkerPool(workers, schedule, decode_text=tokenizer.decode)


def check_async_workers(workers: RolloutWorkerPool) -> None:
    """Raises InputError where workers cannot generate while others train.

    A device runs programs in the order in which they are begun. One of a single device waits for no other, so whatever
    a worker's thread begins ends, and a program of training that waits behind it on that device, for the devices of
    this host and of others, goes on. Those of training alone wait for each other, and the main thread of every host
    begins them in the same order.
    """
    for worker in workers.workers:
        if worker.num_devices > 1:
            raise InputError(
                f"rollout.max_staleness: the worker {worker.name} has {worker.num_devices} devices, which wait for "
                "each other as those of training do; begun in different orders on the same devices, neither would "
                f"end. Give each worker one device (rollout.workers.{worker.kind}.devices and count), or set "
                "rollout.max_staleness: 0"
            )


def _make_slot_engine(
    settings: Settings,
    definition: DecoderDefinition,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    shapes: SlotShapes,
    dtype: jnp.dtype,
    programs: SlotPrograms | None = None,
) -> SlotEngine:
    exact = settings.rollout.mode == "exact"
    eos_ids = tokenizer.eos_ids
    return SlotEngine(
        definition,
        mesh,
        shapes,
        eos_ids=eos_ids,
        dtype=dtype,
        exact=exact,
        programs=programs,
        decode_layout=settings.rollout.decode_layout,
    )
