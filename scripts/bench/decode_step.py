"""Compares the estimated time of a decode step with the time to read the weights and the filled KV cache once.

    python scripts/bench/decode_step.py [--preset NAME] [--model NAME] [--set NAME=VALUE ...] [--new 512 8192]
        [--filled 1.0 0.5]

The script compiles the decode program of a preset for its TPU slice, for rows of the longest prompt and `--new` new
tokens. The lower bound is the time to read the weights and the fraction `--filled` of the KV cache at the memory
bandwidth. Nothing is run; the compiler estimates the times, so libtpu is needed (`pip install -e '.[tpu]'`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
from compiled_presets import without_weights
from shapes import QWEN2_5

from app.mesh import jax_startup
from app.mesh.chips import find_chip
from app.mesh.placement import bytes_per_device
from app.model.attention.cached import decode_block_size
from app.model.attention.dense import ATTENTION_SCOPE
from app.model.prefill_and_decode import DECODE_SCOPE
from app.preflight.inspect_mesh import read_config_only_spec
from app.records.text_format import format_table
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session, sampling_rules
from scripts.bench.kernel_time import kernel_schedules, take_scheduled_bundles
from scripts.bench.program_time import program_time
from scripts.bench.program_work import generation_work
from settings import Settings, load

HEAD = ("cache", "rows a chip", "filled", "estimated", "attention", "floor", "of the floor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gsm8k_qwen2_5_1_5b_v5e_8")
    parser.add_argument("--model", choices=QWEN2_5, help="another model than the preset's")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="settings of the preset")
    parser.add_argument("--new", type=int, nargs="+", default=[512, 8192], help="new tokens of the longest sample")
    parser.add_argument("--filled", type=float, nargs="+", default=[1.0, 0.5], help="filled share of all rows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = without_weights(options.preset, folder, options.model)
        rows: list[tuple[str, ...]] = []
        for new in options.new:
            sets = (*place, *options.set, f"rollout.max_new_tokens={new}")
            rows += estimated(load(options.preset, sets, {}).settings, options.filled)
    print(" ".join((options.preset, *filter(None, [options.model]), *options.set)))
    print(format_table(rows, header=HEAD, num_left=0))


def estimated(settings: Settings, shares: Sequence[float]) -> list[tuple[str, ...]]:
    """Returns a row of the printed table for each filled fraction of the KV cache in `shares`."""
    kernel_schedules()  # libtpu reads the folder of the schedules when it is loaded
    jax_startup.initialize_distributed(settings.mesh, compiles=True)
    session = Session.open(ScoringSession.open(settings, read_config_only_spec(settings).model))
    engine = session.evaluation_generator.engine
    mesh, shape, footprint = engine.programs.mesh, engine.batch_shape, engine.footprint()
    programs = engine.programs.lower_programs(truncates=sampling_rules(settings).truncates, recomputes=False)
    text = programs["decode"].compile().as_text()
    bundles, chip = take_scheduled_bundles(kernel_schedules()), find_chip(mesh.devices.flat[0].device_kind)
    assert chip is not None
    architecture, dtype = session.model_spec.architecture, settings.model.dtype
    weights, cache = bytes_per_device(footprint.weights), bytes_per_device(footprint.slots)
    work = generation_work(architecture, mesh, dtype, shape)["decode"]
    with jax.set_mesh(mesh):
        block_size = decode_block_size(architecture, shape.block_size, dtype)
    lines = []
    for share in shares:
        turns: dict[str, Any] = dict(work.turns)
        if block_size is not None:
            all_blocks, blocks = (-(-int(shape.cache_length * part) // block_size) for part in (1, share))
            turns[ATTENTION_SCOPE] = turns[ATTENTION_SCOPE] * blocks // all_blocks
        time = program_time(text or "", chip, bundles=bundles, turns=turns, turn_of=DECODE_SCOPE)
        floor = (weights + cache * share) / chip.hbm_bytes_per_s
        seconds = (time.estimated_s, time.parts["attention"], floor)
        lines.append(
            (
                *(f"{shape.cache_length:,}", str(shape.num_rows // mesh.size), f"{share:.0%}"),
                *(f"{one * 1e3:.2f} ms" for one in seconds),
                f"{time.estimated_s / floor:.2f}x",
            )
        )
    return lines


if __name__ == "__main__":
    main()
