"""The workers of `rollout.pool: ray`: what the settings ask Ray for."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from app.model.decoder import DecoderDefinition
from app.prompts.tokenizer import Tokenizer
from app.rollout.scheduling.events import WorkerKind
from app.rollout.shape_buckets import slot_shapes_from_settings
from app.rollout.slot_engine import SlotEngine
from app.rollout.worker_pool import ScheduleConfig
from settings import Settings
from settings.errors import InputError
from settings.schema.rollout import RayActorSettings, WorkerPoolSettings

if TYPE_CHECKING:
    from app.rollout.ray_pool import RayWorkerPool

JAX_PLATFORMS = {"gpu": "cuda"}
"""What JAX calls the platform of a device -> what it is asked for by, where these differ."""


def check_ray_installed(settings: Settings) -> None:
    """Raises InputError where Ray is asked for and not installed."""
    if settings.rollout.pool == "ray" and importlib.util.find_spec("ray") is None:
        raise InputError("rollout.pool: ray needs an optional package; pip install -e '.[ray]', or set it to local")


def open_ray_workers(
    settings: Settings, definition: DecoderDefinition, tokenizer: Tokenizer, mesh: Mesh, *, dtype: jnp.dtype
) -> RayWorkerPool:
    """Workers on actors that are started when they are first needed.

    Raises:
        InputError: several hosts.
    """
    from app.rollout.ray_actor import ActorSpec
    from app.rollout.ray_pool import RayWorkerPool
    from app.rollout.ray_worker import RayWorker, WeightBroadcast

    if jax.process_count() > 1:
        raise InputError(
            f"rollout.pool: ray takes its weights from one training host, and {jax.process_count()} have joined; set "
            "it to local, so that every host has workers on its own devices, or train on one host beside the cluster"
        )
    rollout, platform = settings.rollout, str(mesh.devices.flat[0].platform)
    assert rollout.scheduler is not None and rollout.workers.lease_s is not None
    pools: dict[WorkerKind, tuple[WorkerPoolSettings, RayActorSettings]] = {
        "fast": (rollout.workers.fast, rollout.ray.fast),
        "heavy": (rollout.workers.heavy, rollout.ray.heavy),
    }
    broadcast, exact, workers = WeightBroadcast(), rollout.mode == "exact", []
    for kind, (pool, needs) in pools.items():
        setting = f"rollout.workers.{kind}.slots"
        shapes = slot_shapes_from_settings(
            rollout, pool.slots, max_prompt_length=settings.data.max_prompt_length, setting=setting
        )
        plan = ActorSpec(
            architecture=definition.architecture,
            shapes=shapes,
            kind=kind,
            eos_ids=tuple(tokenizer.eos_ids),
            dtype=jnp.dtype(dtype).name,
            exact=exact,
            tp=mesh.shape["tp"],
            platforms=JAX_PLATFORMS.get(platform, platform),
            matmul_precision="highest" if dtype == jnp.float32 else None,
            lora=definition.lora,
            quantization=definition.quantization,
        )
        engine = SlotEngine(definition, mesh, shapes, eos_ids=tokenizer.eos_ids, dtype=dtype, exact=exact)
        workers += [
            RayWorker(
                name=f"{kind}-{number}",
                kind=kind,
                engine=engine,
                cache_timeout_s=rollout.workers.lease_s / 2,
                spec=plan,
                actor_options=_actor_options(needs),
                broadcast=broadcast,
                lease_s=rollout.workers.lease_s,
                start_timeout_s=rollout.ray.start_timeout_s,
            )
            for number in range(pool.count)
        ]
    in_turn = rollout.workers.deterministic or len(workers) == 1
    # Each worker minds its own lease: it can end its actor, which wakes whoever waits for it.
    schedule = ScheduleConfig(rollout.scheduler, rollout.pdsr, rollout.segment, in_turn, lease_s=None)
    return RayWorkerPool(
        workers,
        schedule,
        decode_text=tokenizer.decode,
        address=rollout.ray.address,
        start_timeout_s=rollout.ray.start_timeout_s,
    )


def _actor_options(needs: RayActorSettings) -> dict[str, Any]:
    """Of an actor; see `RemoteWorker.needs`."""
    options: dict[str, Any] = {"num_cpus": needs.num_cpus, "num_gpus": needs.num_gpus, "resources": needs.resources}
    return options if needs.memory_gb is None else options | {"memory": int(needs.memory_gb * 2**30)}
