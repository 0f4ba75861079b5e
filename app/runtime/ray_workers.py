"""Opens the workers of `rollout.pool: ray`, as the settings specify them."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from app.model.decoder import DecoderDefinition
from app.prompts.tokenizer import Tokenizer
from app.rollout.engine.engine import SlotEngine
from app.rollout.scheduling.protocol import WorkerKind
from app.rollout.workers.worker import RolloutWorker
from app.runtime.slot_shapes import slot_shapes_from_settings
from settings import Settings
from settings.errors import InputError
from settings.schema.rollout import WorkerPoolSettings


def open_ray_workers(
    settings: Settings, definition: DecoderDefinition, tokenizer: Tokenizer, mesh: Mesh, *, dtype: jnp.dtype
) -> list[RolloutWorker]:
    """Returns workers in Ray actors, which start when they are first needed.

    Raises:
        InputError: Ray is not installed, or training runs on several hosts.
    """
    if importlib.util.find_spec("ray") is None:
        raise InputError("rollout.pool: Ray is not installed; run pip install -e '.[ray]', or set it to local")
    from app.rollout.workers.ray_actor import ActorSpec
    from app.rollout.workers.ray_worker import RayCluster, RayWorker

    if jax.process_count() > 1:
        raise InputError(
            f"rollout.pool: ray needs a single training host, but there are {jax.process_count()}; set it to local, "
            "so that every host has workers on its own devices, or train on one host next to the cluster"
        )
    rollout, platform = settings.rollout, str(mesh.devices.flat[0].platform)
    pools: dict[WorkerKind, tuple[WorkerPoolSettings, dict[str, float]]] = {
        "fast": (rollout.workers.fast, rollout.ray.fast_resources),
        "heavy": (rollout.workers.heavy, rollout.ray.heavy_resources),
    }
    cluster = RayCluster(
        rollout.ray.address, [resources for pool, resources in pools.values() for _ in range(pool.count)]
    )
    workers: list[RolloutWorker] = []
    for kind, (pool, resources) in pools.items():
        setting, longest = f"rollout.workers.{kind}.slots", settings.data.max_prompt_length
        spec = ActorSpec(
            architecture=definition.architecture,
            shapes=slot_shapes_from_settings(
                rollout,
                pool.slots,
                max_prompt_length=longest,
                row_limit=pool.max_length,
                has_turns=settings.env.is_used,
                setting=setting,
            ),
            kind=kind,
            eos_ids=tuple(tokenizer.eos_ids),
            dtype=jnp.dtype(dtype).name,
            exact=rollout.mode == "exact",
            tp=mesh.shape["tp"],
            # JAX reports GPUs as platform `gpu`, but its setting `jax_platforms` expects `cuda`.
            platforms="cuda" if platform == "gpu" else platform,
            matmul_precision="highest" if dtype == jnp.float32 else None,
            lora=definition.lora,
            quantization=definition.quantization,
            decode_text=tokenizer.decode if rollout.stop else None,
        )
        engine = SlotEngine(definition, mesh, spec.shapes, eos_ids=spec.eos_ids, dtype=dtype, exact=spec.exact)
        workers += [
            RayWorker(
                name=f"{kind}-{number}", kind=kind, engine=engine, spec=spec, cluster=cluster, resources=resources
            )
            for number in range(pool.count)
        ]
    return workers
