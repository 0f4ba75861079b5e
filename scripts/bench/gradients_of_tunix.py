"""Compiles the gradients of Tunix's GRPO loss for TPUs without a device; `tpu_compile.py` runs this script.

    python scripts/bench/gradients_of_tunix.py '{"topology": {...}, "config": {...}, "rows": 32, ...}' DIRECTORY

The script needs an environment with Tunix, and writes program.hlo and figures.json into the directory. It uses Tunix's
model, loss, sharding rules and BLOCK remat over fsdp, with float32 weights and bfloat16 computation, as in grpo. Tunix
drops the shardings of activations if JAX's first device is a CPU, as it is here; the script restores them.
"""

# Tunix is not among the packages of this project's environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")

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
SIZES = {
    **{"num_layers": "num_hidden_layers", "embed_dim": "hidden_size", "hidden_dim": "intermediate_size"},
    **{"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "vocab_size": "vocab_size"},
    **{"rope_theta": "rope_theta", "norm_eps": "rms_norm_eps", "use_tied_embedding": "tie_word_embeddings"},
}


def main() -> None:
    work, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
    config = work["config"]
    devices = topologies.get_topology_desc(platform="tpu", **work["topology"]).devices
    mesh = Mesh(np.array(devices).reshape(-1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def over(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    qwen2.shard = lambda x, axes: jax.lax.with_sharding_constraint(x, over(*axes))
    settings = qwen2.ModelConfig(
        **{name: config[field] for name, field in SIZES.items()},
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        remat_config=qwen2.RematConfig.BLOCK,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        use_flash_attention=work["flash"],
    )
    definition, state = nnx.split(nnx.eval_shape(lambda: qwen2.Qwen2(settings, rngs=nnx.Rngs(0))))
    shardings = nnx.get_named_sharding(state, mesh)
    state = jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), state, shardings)

    def of_rows(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((work["rows"], *sizes), dtype, sharding=over("fsdp"))

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
    algorithm.temperature = 1.0  # The learner of Tunix copies this value from its rollout settings.

    def gradients(state: nnx.State, example: TrainExample) -> tuple:
        model = nnx.merge(definition, state)
        return nnx.value_and_grad(grpo_loss_fn, has_aux=True)(model, example, algorithm, PAD_ID, EOS_ID)

    with mesh:
        lowered = jax.jit(gradients, out_shardings=(over(), shardings)).lower(state, example)
        compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    (directory / "program.hlo").write_text(compiled.as_text() or "")
    figures = {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "versions": {name: version(name) for name in ("google-tunix", "libtpu", "jax", "flax")},
    }
    (directory / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
