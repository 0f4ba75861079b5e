"""Prints the memory that XLA reserves to score a micro-batch with a large vocabulary, without running a program.

    python scripts/bench/scoring_memory.py [--vocab 151936] [--quota 4096] [--chunks 256,1024,4096]

The script compares the temporaries of the program with the size of the float32 logits of a whole micro-batch,
[tokens, vocab], which the program never computes at once.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import jax
import jax.numpy as jnp
from throughput import SMALL, one_device

from app.batching.token_batch import TokenBatch
from app.mesh.placement import abstract_arrays
from app.model.decoder import DecoderDefinition
from app.model.segment_layout import SegmentLayout
from app.score.scorer import Scorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--quota", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--chunks", default="256,1024,4096", help="model.logits_chunk, one after another")
    options = parser.parse_args()
    architecture = replace(SMALL, vocab_size=options.vocab)
    whole = 4 * options.quota * options.vocab
    print(f"[tokens, vocab] in float32: {whole / 2**20:,.0f} MiB")
    print(f"{'logits_chunk':>14}{'temporaries, MiB':>18}{'ratio':>8}")
    for chunk in map(int, options.chunks.split(",")):
        used = temporary_bytes(DecoderDefinition.create(architecture), quota=options.quota, logits_chunk=chunk)
        print(f"{chunk:>14,}{used / 2**20:>18,.0f}{used / whole:>7.2f}x")


def temporary_bytes(definition: DecoderDefinition, *, quota: int, logits_chunk: int) -> int:
    """Returns the temporary bytes of the program that scores a row of `quota` tokens."""
    mesh = one_device()
    scorer = Scorer(definition, mesh, dtype=jnp.dtype("float32"), logits_chunk=logits_chunk)
    row = jax.ShapeDtypeStruct((1, quota), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, quota), jnp.bool)
    batch = TokenBatch(row, SegmentLayout(row, row, row), logits_indices=row, targets=row, loss_mask=mask)
    params = abstract_arrays(definition.shapes, definition.shardings(mesh))
    memory = scorer.lower(params, batch).compile().memory_analysis()
    assert memory is not None, "this backend does not report the memory of programs"
    return memory.temp_size_in_bytes


if __name__ == "__main__":
    main()
