"""Compares compiled attention over long packed rows with its lower bound, without a TPU.

    python scripts/bench/attention_floor.py [--slice v5e-8] [--tokens 16384] [--prompts 512 2048 8192]

The script compiles the forward and backward pass of one attention layer with the heads of Qwen2.5-1.5B in bfloat16,
for rows of eight samples that share a prompt. The lower bound counts only visible pairs of tokens: twelve FLOPs per
pair and head dim, at the peak FLOP/s of the chip. All times are estimates of the compiler, not measurements; libtpu is
needed (`pip install -e '.[tpu]'`).
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array
from shapes import QWEN2_5

from app.batching.micro_batch_plan import MicroBatch, RowShape
from app.batching.token_batch import pack_tokens
from app.mesh.axis_rules import AXES
from app.mesh.chips import parse_slice
from app.mesh.compiler_options import compiler_options
from app.mesh.devices import compile_only_devices
from app.mesh.placement import row_sharding
from app.model.attention.packed import packed_attention
from app.model.io.families import architecture_from_config
from app.model.segment_layout import SegmentLayout
from app.preflight.attention_check import longest_samples
from app.records.text_format import format_percent, format_table
from scripts.bench.kernel_time import kernel_schedules, take_scheduled_bundles
from scripts.bench.program_time import program_time
from scripts.bench.program_work import packed_pass_work

MODEL = "Qwen2.5-1.5B"
SAMPLES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", default="v5e-8", help="TPU slice")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a row")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 8192], help="tokens of the prompt")
    options = parser.parse_args()
    rows = [estimated(options.slice, options.tokens, prompt) for prompt in options.prompts]
    print(format_table(rows, header=("prompt", "completions", "estimated by the compiler", "floor", "of the floor")))


def estimated(slice_name: str, num_tokens: int, prompt: int) -> tuple[str, ...]:
    """Returns a row of the printed table, for prompts of `prompt` tokens."""
    schedules = kernel_schedules()
    place, architecture = parse_slice(slice_name), architecture_from_config(QWEN2_5[MODEL])
    mesh = Mesh(np.array(compile_only_devices(place)).reshape(1, -1, 1), AXES)
    completion = (num_tokens - prompt) // SAMPLES
    samples = longest_samples(SAMPLES, prompt=prompt, completion=completion)
    row = MicroBatch(((tuple(range(SAMPLES)),),) * mesh.size, RowShape(num_tokens, SAMPLES * completion))
    turns = packed_pass_work(
        architecture, mesh, jnp.bfloat16, samples, row, logits_chunk=None, has_gradients=True
    ).turns
    batch = pack_tokens(samples, row)

    def loss(query: Array, keys: Array, values: Array, layout: SegmentLayout) -> Array:
        return jnp.sum(packed_attention(query, keys, values, layout).astype(jnp.float32))

    def on_mesh(shape: tuple[int, ...], dtype: object) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=row_sharding(mesh))

    heads, key_heads, head_dim = architecture.num_query_heads, architecture.num_kv_heads, architecture.head_dim
    query = on_mesh((mesh.size, num_tokens, heads, head_dim), jnp.bfloat16)
    keys = on_mesh((mesh.size, key_heads, num_tokens, head_dim), jnp.bfloat16)
    layout = SegmentLayout(*(on_mesh(x.shape, x.dtype) for x in batch.layout))
    with jax.set_mesh(mesh):
        gradients = jax.jit(
            jax.grad(loss, argnums=(0, 1, 2)), compiler_options=compiler_options(mesh, packed_rows=True)
        )
        text = gradients.lower(query, keys, keys, layout).compile().as_text() or ""
    time = program_time(text, place.chip, bundles=take_scheduled_bundles(schedules), turns=turns)
    visible = prompt * (prompt + 1) // 2 + SAMPLES * (completion * (completion + 1) // 2 + completion * prompt)
    floor = 12 * heads * head_dim * visible / place.chip.flops
    milliseconds = (f"{seconds * 1e3:.2f} ms" for seconds in (time.kernel_s, floor))
    return f"{prompt:,}", f"{SAMPLES} x {completion:,}", *milliseconds, format_percent(floor / time.kernel_s)


if __name__ == "__main__":
    main()
