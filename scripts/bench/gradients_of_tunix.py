"""Compiles the gradients of Tunix's GRPO loss for TPUs that are not there; `tpu_compile.py` runs it in its own Python.

    python scripts/bench/gradients_of_tunix.py '{"topology": {...}, "config": {...}, "rows": 32, ...}' DIRECTORY

Writes program.hlo and figures.json into the directory. Tunix's own model, loss, sharding rules and BLOCK remat, over
fsdp; weights are float32 and computed with in bfloat16, as ours. One thing is set right for it: Tunix drops the
shardings of activations if JAX's first device is a CPU, and here that is where the compiler runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="true")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tunix.models.qwen2 import model as qwen2
from tunix.rl.algo_core import grpo_loss_fn
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample

PAD_ID, EOS_ID = 151_643, 151_645


def shard(x: jax.Array, axes: tuple) -> jax.Array:
    """Constrains an activation's sharding as Tunix does on a TPU."""
    mesh = qwen2.pxla.thread_resources.env.physical_mesh
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


def main() -> None:
    work, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
    devices = topologies.get_topology_desc(platform="tpu", **work["topology"]).devices
    mesh = Mesh(np.array(devices).reshape(-1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    qwen2.shard = shard
    config = work["config"]
    settings = qwen2.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=int(config["rope_theta"]),
        norm_eps=config["rms_norm_eps"],
        use_tied_embedding=config["tie_word_embeddings"],
        remat_config=qwen2.RematConfig.BLOCK,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        use_flash_attention=work["flash"],
    )
    definition, state = nnx.split(nnx.eval_shape(lambda: qwen2.Qwen2(settings, rngs=nnx.Rngs(0))))

    def placed(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state = jax.tree.map(placed, state, nnx.get_named_sharding(state, mesh))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))

    def of_rows(*sizes: int, dtype: type = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((work["rows"], *sizes), dtype, sharding=rows)

    prompts, completions = of_rows(work["prompt"]), of_rows(work["completion"])
    example = TrainExample(
        prompt_ids=prompts,
        prompt_mask=prompts,
        completion_ids=completions,
        completion_mask=completions,
        advantages=of_rows(dtype=jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )
    algorithm = GRPOConfig(num_generations=work["group_size"], beta=0.0)
    algorithm.temperature = 1.0  # Tunix's learner copies it from its rollout settings.

    def gradients(state: nnx.State, example: TrainExample) -> tuple:
        model = nnx.merge(definition, state)
        differentiated = nnx.value_and_grad(grpo_loss_fn, has_aux=True)
        return differentiated(model, example, algorithm, PAD_ID, EOS_ID)

    whole = NamedSharding(mesh, PartitionSpec())
    with mesh:
        weights = jax.tree.map(lambda x: x.sharding, state)
        jitted = jax.jit(gradients, out_shardings=(whole, weights))
        started = time.perf_counter()
        compiled = jitted.lower(state, example).compile(compiler_options=work["compiler_options"] or None)
    memory = compiled.memory_analysis()
    (directory / "program.hlo").write_text(compiled.as_text())
    figures = {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_s": time.perf_counter() - started,
        "versions": {name: version(name) for name in ("google-tunix", "jax", "flax")},
    }
    (directory / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
