"""Compares the speeds of plain sampling, and of top-p sampling with a threshold search or with sorting.

    python scripts/bench/sampling.py [--rows 16] [--vocab 151936] [--slice v5e-8]

The script times the three samplers on the available devices. With `--slice`, it instead prints the TPU compiler's
estimates for `--rows` rows on each chip, runs nothing, and needs libtpu (`pip install -e '.[tpu]'`).
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from app.mesh.axis_rules import AXES
from app.mesh.chips import TpuSlice, parse_slice
from app.mesh.compiler_options import compiler_options
from app.mesh.devices import global_devices, simulate_slice
from app.mesh.placement import row_sharding
from app.records.text_format import format_table
from app.rollout.sampling.token_sampling import (
    SampledTokens,
    SamplingRules,
    gumbel_noise,
    sample_tokens,
    sample_tokens_truncated,
)
from scripts.bench.kernel_time import kernel_schedules, take_scheduled_bundles
from scripts.bench.program_time import program_time
from settings.schema.mesh import MeshSettings

ROUNDS = 5
TOP_P = 0.95


def sample_tokens_sorted(logits: Array, rules: SamplingRules, keys: Array) -> SampledTokens:
    """Samples with top-p by sorting the vocabulary, the usual method."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    probabilities = jnp.exp(ranked - log_normalizer)
    kept = jnp.cumsum(probabilities, axis=-1) - probabilities < rules.top_p
    noise = jnp.take_along_axis(gumbel_noise(keys, rules, logits.shape[-1]), order, axis=-1)
    rank = jnp.argmax(jnp.where(kept, ranked + noise, -jnp.inf), axis=-1)[:, None]
    return SampledTokens(
        jnp.take_along_axis(order, rank, axis=-1)[:, 0],
        (jnp.take_along_axis(ranked, rank, axis=-1) - log_normalizer)[:, 0],
        jnp.log(jnp.sum(jnp.where(kept, probabilities, 0.0), axis=-1)),
    )


SAMPLERS = {"sorted": sample_tokens_sorted, "searched": sample_tokens_truncated, "not truncated": sample_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="rows on each device")
    parser.add_argument("--vocab", type=int, default=151_936, help="tokens of the vocabulary (default: Qwen2.5's)")
    parser.add_argument("--slice", type=parse_slice, help="TPU slice for which to compile")
    options = parser.parse_args()
    seconds = estimated if options.slice else timed
    found = seconds(options.rows, options.vocab, options.slice)
    rows = [(name, f"{one * 1e3:.2f} ms", f"{one / found['sorted']:.2f}x") for name, one in found.items()]
    print(format_table(rows, header=(f"top-p {TOP_P}, {options.rows} rows", "a token", "of sorting")))


def timed(num_rows: int, vocab_size: int, _place: None) -> dict[str, float]:
    """Returns the median seconds of each sampler over rounds in which each sampler runs once."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(num_rows, vocab_size)) * 3, jnp.float32)
    arguments = logits, SamplingRules(1.0, top_p=TOP_P), jax.random.split(jax.random.key(0), num_rows)
    compiled = {name: jax.jit(sampler) for name, sampler in SAMPLERS.items()}
    drawn = {name: np.asarray(run(*arguments).token_ids) for name, run in compiled.items()}
    np.testing.assert_array_equal(drawn["searched"], drawn["sorted"])
    took: dict[str, list[float]] = {name: [] for name in SAMPLERS}
    for _round in range(ROUNDS):
        for name, run in compiled.items():
            started = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            took[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def estimated(num_rows: int, vocab_size: int, place: TpuSlice) -> dict[str, float]:
    """Returns the seconds that the compiler estimates for each sampler on one chip of a slice."""
    schedules = kernel_schedules()
    simulate_slice(place, compiles=True)
    mesh = Mesh(np.array(global_devices(MeshSettings())).reshape(1, -1, 1), AXES)
    sharding, keys = row_sharding(mesh), jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_rows))
    rules = SamplingRules(1.0, top_p=TOP_P)

    def on_chips(*sizes: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sizes[0] * mesh.size, *sizes[1:]), dtype, sharding=sharding)

    found = {}
    for name, sampler in SAMPLERS.items():
        with jax.set_mesh(mesh):
            arguments = (
                on_chips(num_rows, vocab_size, dtype=jnp.float32),
                rules,
                on_chips(*keys.shape, dtype=keys.dtype),
            )
            text = jax.jit(sampler, compiler_options=compiler_options(mesh)).lower(*arguments).compile().as_text()
        found[name] = program_time(
            text or "", place.chip, bundles=take_scheduled_bundles(schedules), turns={}
        ).estimated_s
    return found


if __name__ == "__main__":
    main()
