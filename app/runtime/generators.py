"""Opens the generators of samples: decode slots on a mesh, or scheduled workers."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from app.distributed.collectives import gather_over_hosts
from app.mesh.device_mesh import assign_worker_devices, make_submesh, num_hosts
from app.model.decode_weights import DecodeConversion
from app.model.decoder import DecoderDefinition
from app.model.kv_cache import num_cache_shards
from app.prompts.tokenizer import Tokenizer
from app.rollout.engine.continuous_batching import ContinuousBatchGenerator
from app.rollout.engine.engine import SlotEngine
from app.rollout.engine.programs import SlotPrograms
from app.rollout.engine.shapes import SlotShapes, make_slot_shapes
from app.rollout.scheduling.protocol import WorkerKind
from app.rollout.workers.worker import RolloutWorker
from app.rollout.workers.worker_pool import RolloutWorkerPool, ScheduleConfig
from app.runtime.slot_choice import TINY_PARAMETERS, blocks_in_memory, slots_in_blocks
from settings import Settings
from settings.errors import InputError
from settings.schema.rollout import MAX_BLOCKS

KINDS: tuple[WorkerKind, ...] = ("fast", "heavy")


def open_continuous_batching(
    settings: Settings, tokenizer: Tokenizer, conversion: DecodeConversion, *, held_bytes: int, truncates: bool
) -> ContinuousBatchGenerator:
    """Opens `rollout.slots` decode slots on a mesh of this host, or of all hosts, which must then call it together.

    Compiles programs only if memory is scarce, to measure how many KV blocks fit.

    Args:
        conversion: provides the decoder and its mesh.
        held_bytes: bytes per device of other arrays that stay there during generation.
        truncates: whether the sampling rules can exclude tokens.

    Raises:
        InputError: the slots cannot be split over the devices.
    """
    # Workers, if there are any besides these slots, do not affect their sizes.
    rollout = settings.rollout.model_copy(update={"scheduler": None})
    settings = settings.model_copy(update={"rollout": rollout})
    mesh, definition = conversion.mesh, conversion.definition
    hosts, num_shards = num_hosts(mesh), num_cache_shards(mesh, definition.architecture.num_kv_heads)

    def make_engine(num_slots: int, num_blocks: int | None = None) -> SlotEngine:
        is_tiny = definition.num_parameters < TINY_PARAMETERS
        sizes = {"num_blocks": num_blocks, "is_tiny": is_tiny, "setting": "rollout.slots"}
        shapes = slot_shapes(settings, num_slots, row_shards=num_shards, **sizes)
        return _make_slot_engine(settings, definition, tokenizer, mesh, shapes)

    is_auto, num_slots, num_blocks = rollout.slots == "auto", rollout.num_rows * hosts, None
    if is_auto:
        num_slots = math.ceil(num_slots / num_shards) * num_shards
    engine = make_engine(num_slots)
    if rollout.kv_blocks == "auto":
        num_blocks = blocks_in_memory(engine, held_bytes=held_bytes, truncates=truncates)
        if hosts > 1:
            least = int(gather_over_hosts(num_blocks or MAX_BLOCKS).min())
            num_blocks = None if least == MAX_BLOCKS else least
        engine = engine if num_blocks is None else make_engine(num_slots, num_blocks)
    if is_auto and engine.programs.preempts:
        engine = make_engine(slots_in_blocks(engine.programs), num_blocks)
    texts = {"decode_text": tokenizer.decode, "stop_text": tokenizer.stop_text}
    return ContinuousBatchGenerator(engine, segment_rule=settings.rollout.segment, **texts)


def open_workers(
    settings: Settings, tokenizer: Tokenizer, conversion: DecodeConversion, *, devices: Sequence[int]
) -> RolloutWorkerPool | None:
    """Opens the workers of `rollout.workers`; returns None if the settings use no workers. Compiles nothing.

    Each host has its own workers and scheduler.

    Args:
        conversion: provides the decoder and the tp of each worker.
        devices: indices of this host's devices that generate.

    Raises:
        InputError: there are too few devices, or the slots cannot be split over them.
    """
    rollout = settings.rollout
    if rollout.scheduler is None or not rollout.has_workers:
        return None
    opens = _open_ray_workers if rollout.uses_ray else partial(_open_local_workers, devices=devices)
    workers = opens(settings, conversion.definition, tokenizer, conversion.mesh_of_all_hosts)
    # Workers that share a device take turns on it.
    in_order = rollout.mode == "exact" or any(worker.device is not None for worker in workers)
    schedule = ScheduleConfig(rollout.scheduler, rollout.pdsr, rollout.segment, in_order)
    return RolloutWorkerPool(workers, schedule, decode_text=tokenizer.decode, stop_text=tokenizer.stop_text)


def _open_local_workers(
    settings: Settings, definition: DecoderDefinition, tokenizer: Tokenizer, mesh: Mesh, *, devices: Sequence[int]
) -> list[RolloutWorker]:
    host = f"host{jax.process_index()}/" if jax.process_count() > 1 else ""
    names = _worker_names(settings)
    device_groups = assign_worker_devices(len(names), devices)
    are_shared = len(device_groups) > 1 and len(devices) == 1
    compiled: dict[SlotShapes, SlotPrograms] = {}
    workers = []
    for (kind, name), of_worker in zip(names, device_groups, strict=True):
        submesh = make_submesh(of_worker, template=mesh)
        row_shards = num_cache_shards(submesh, definition.architecture.num_kv_heads)
        shapes = _worker_shapes(settings, kind, row_shards=row_shards)
        programs = compiled.get(shapes) if are_shared else None
        engine = _make_slot_engine(settings, definition, tokenizer, submesh, shapes, programs=programs)
        compiled[shapes] = engine.programs
        workers.append(RolloutWorker(f"{host}{name}", kind, engine, "0" if are_shared else None))
    return workers


def _open_ray_workers(
    settings: Settings, definition: DecoderDefinition, tokenizer: Tokenizer, mesh: Mesh
) -> list[RolloutWorker]:
    """Returns workers that run in Ray actors; the actors start when they are first needed.

    Raises:
        InputError: Ray is not installed, or training runs on several hosts.
    """
    if importlib.util.find_spec("ray") is None:
        way_out = "run pip install -e '.[ray]', or set rollout.ray.address to null"
        raise InputError(f"rollout.ray.address: Ray is not installed; {way_out}")
    from app.rollout.workers.ray_actor import ActorSpec
    from app.rollout.workers.ray_worker import RayCluster, RayWorker

    if jax.process_count() > 1:
        raise InputError(
            f"rollout.ray.address: Ray needs a single training host, but there are {jax.process_count()}; set it to "
            "null to have workers on every host's own devices, or train on one host next to the cluster"
        )
    ray, platform = settings.rollout.ray, str(mesh.devices.flat[0].platform)
    names, resources = _worker_names(settings), {"fast": ray.fast_resources, "heavy": ray.heavy_resources}
    assert ray.address is not None
    cluster = RayCluster(ray.address, [resources[kind] for kind, _ in names])
    engines: dict[WorkerKind, SlotEngine] = {
        kind: _make_slot_engine(settings, definition, tokenizer, mesh, _worker_shapes(settings, kind)) for kind in KINDS
    }
    specs: dict[WorkerKind, ActorSpec] = {
        kind: ActorSpec(
            definition=definition,
            shapes=engine.shapes,
            kind=kind,
            eos_ids=tuple(tokenizer.eos_ids),
            dtype=settings.model.dtype,
            exact=engine.exact,
            tp=mesh.shape["tp"],
            # JAX reports GPUs as platform `gpu`, but its setting `jax_platforms` expects `cuda`.
            platforms="cuda" if platform == "gpu" else platform,
            matmul_precision="highest" if settings.model.dtype == "float32" else None,
            stop_text=tokenizer.stop_text if settings.rollout.stop else None,
        )
        for kind, engine in engines.items()
    }
    return [
        RayWorker(
            name=name, kind=kind, engine=engines[kind], spec=specs[kind], cluster=cluster, resources=resources[kind]
        )
        for kind, name in names
    ]


def _worker_names(settings: Settings) -> list[tuple[WorkerKind, str]]:
    return [(kind, f"{kind}-{i}") for kind in KINDS for i in range(getattr(settings.rollout.workers, kind).count)]


def _worker_shapes(settings: Settings, kind: WorkerKind, *, row_shards: int = 1) -> SlotShapes:
    return slot_shapes(
        settings,
        getattr(settings.rollout.workers, kind).slots,
        row_shards=row_shards,
        row_limit=settings.rollout.workers.fast.max_length if kind == "fast" else None,
        setting=f"rollout.workers.{kind}.slots",
    )


def check_async_workers(workers: RolloutWorkerPool) -> None:
    """Raises InputError if a worker on the devices that train has several devices, which could deadlock with training.

    A device runs programs in the order in which they were dispatched. A program on a single device waits for no other
    device, so it ends, and the training program after it starts. Training programs wait only for each other, and the
    main threads of all hosts dispatch them in the same order.
    """
    for worker in workers.workers:
        if worker.num_devices > 1:
            raise InputError(
                f"rollout.max_staleness: the worker {worker.name} has {worker.num_devices} devices, whose programs "
                "could deadlock with those of training on the same devices. Set rollout.devices: 0.5, which gives "
                "workers their own devices, or start one worker per device (rollout.workers.fast.count and "
                "rollout.workers.heavy.count), or set rollout.max_staleness: 0"
            )


def slot_shapes(
    settings: Settings,
    num_slots: int,
    *,
    setting: str,
    row_shards: int = 1,
    num_blocks: int | None = None,
    row_limit: int | None = None,
    is_tiny: bool = False,
) -> SlotShapes:
    """Returns the array sizes of `num_slots` decode slots; see `make_slot_shapes`.

    Args:
        setting: the setting that gives `num_slots`, for error messages.
        row_shards: number of devices over which the slots are split.
        num_blocks: number of KV blocks if `rollout.kv_blocks` is `auto`.
        row_limit: maximum number of tokens in a row of these slots; None for no limit.
        is_tiny: whether programs take longer to compile than to run, so that each is compiled for only one size.
    """
    rollout = settings.rollout
    shapes = make_slot_shapes(
        num_slots,
        max_prompt_length=settings.data.max_prompt_length,
        max_new_tokens=rollout.max_new_tokens,
        prefill_length_min=rollout.prefill_length_min,
        segment_max=rollout.segment.max,
        exact=rollout.mode == "exact",
        num_blocks=num_blocks if rollout.kv_blocks == "auto" else rollout.kv_blocks,
        has_turns=settings.env.is_used,
        is_tiny=is_tiny,
        row_shards=row_shards,
        setting=setting,
    )
    together, records_routes = rollout.rows_together, rollout.routing_replay
    return shapes._replace(
        kv_cache=rollout.kv_cache, row_limit=row_limit, rows_together=together, records_routes=records_routes
    )


def _make_slot_engine(
    settings: Settings,
    definition: DecoderDefinition,
    tokenizer: Tokenizer,
    mesh: Mesh,
    shapes: SlotShapes,
    *,
    programs: SlotPrograms | None = None,
) -> SlotEngine:
    return SlotEngine(
        definition,
        mesh,
        shapes,
        eos_ids=tokenizer.eos_ids,
        dtype=jnp.dtype(settings.model.dtype),
        exact=settings.rollout.mode == "exact",
        stop_text=tokenizer.stop_text,
        programs=programs,
    )
