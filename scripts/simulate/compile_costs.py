"""Estimates the cost of decoding on TPUs that are not there, for the grid of `simulate_rollout.py`.

    python scripts/simulate/compile_costs.py [MACHINE ...] [--out FILE.json]

Compiles the programs of a worker for its chips, and fits the cost model to the compiler's estimates (`cost_fit.py`).
Nothing is run; libtpu is needed (`pip install -e '.[tpu]'`). What the host does between segments is not known to a
compiler: `segment_s` and `admit_*` are those of `CostModel`.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.mesh import jax_startup
from app.mesh.chips import find_chip
from app.mesh.compile_only import compiler_versions
from app.mesh.placement import bytes_per_device
from app.model.architecture import Architecture
from app.model.attention.dense import ATTENTION_SCOPE
from app.model.prefill_and_decode import DECODE_SCOPE
from app.preflight.config_only_spec import read_config_only_spec
from app.rollout.slots.slot_engine import SlotEngine
from app.rollout.slots.slot_programs import ProgramName
from app.runtime.session import Session
from scripts.bench.compiled_presets import without_weights
from scripts.bench.kernel_time import kernel_schedules, take_scheduled_bundles
from scripts.bench.program_time import program_time
from scripts.bench.program_work import generation_work
from scripts.simulate.cost_fit import Timed, explained, fit, step_counts
from scripts.simulate.cost_model import CostModel
from settings import load

RESULTS = Path(__file__).parent / "results" / "tpu_costs.json"
MACHINES: dict[str, dict[str, Any]] = {
    "Qwen2.5-1.5B on v5e-8": {
        **{"preset": "gsm8k_qwen2_5_1_5b_v5e_8", "model": "Qwen2.5-1.5B"},
        **{"mesh": "1,8,1", "workers": {"fast": 6, "heavy": 2}},
    },
    "Qwen2.5-7B on v6e-8": {
        **{"preset": "gsm8k_qwen2_5_3b_v6e_8", "model": "Qwen2.5-7B"},
        **{"mesh": "1,4,2", "workers": {"fast": 3, "heavy": 1}},
    },
    "Qwen2.5-3B on v6e-8": {
        **{"preset": "gsm8k_qwen2_5_3b_v6e_8", "model": "Qwen2.5-3B"},
        **{"mesh": "1,8,1", "workers": {"fast": 6, "heavy": 2}},
    },
}
"""Workers of one chip with all weights, and of two chips that split them. `simulate_async.py` has the last one."""
SLOTS, MAX_PROMPT, MAX_NEW = 64, 128, 4096
FILLED = (256, 1024, 2304, 4096)
"""Tokens in the cache of each row for which a decoded token is estimated."""
PREFILLS = ((1, 64), (1, 128), (4, 128))
"""Prompts and their padded length."""


def open_engine(machine: dict[str, Any]) -> tuple[SlotEngine, Architecture]:
    """Returns the slots of the first worker of a machine, and the architecture of its model. Compiles nothing."""
    counts = [f"rollout.workers.{kind}.count={count}" for kind, count in machine["workers"].items()]
    slots = [f"rollout.workers.{kind}.slots={SLOTS}" for kind in machine["workers"]]
    with tempfile.TemporaryDirectory() as folder:
        sets = (
            *without_weights(machine["preset"], folder, machine["model"]),
            *(f"mesh.shape={machine['mesh']}", "rollout.scheduler=pdsr_v2", *counts, *slots),
            *(f"data.max_prompt_length={MAX_PROMPT}", f"rollout.max_new_tokens={MAX_NEW}"),
            "rollout.prefill_length_min=16",
        )
        settings = load(machine["preset"], sets, {}).settings
        kernel_schedules()  # libtpu reads where they go when it is loaded
        jax_startup.initialize_distributed(settings.mesh, compiles=True)
        session = Session.open(settings, read_config_only_spec(settings).model)
        session.open_generators()
    assert session.workers is not None
    return session.workers.workers[0].engine, session.model_spec.architecture


def estimates(engine: SlotEngine, architecture: Architecture) -> Iterator[Timed]:
    """Yields the compiler's estimates for the programs of a worker."""
    programs, full = engine.programs, engine.batch_shape
    mesh, block_size = programs.mesh, programs.block_size
    chip = find_chip(mesh.devices.flat[0].device_kind)
    assert chip is not None
    specs = programs.program_specs(suspends=True, recomputes=False, truncates=False)
    bundles: dict[str, int] = {}

    @functools.cache
    def compiled(name: ProgramName) -> str:
        text = programs._lower(specs[name]).compile().as_text() or ""
        bundles.update(take_scheduled_bundles(kernel_schedules()))
        return text

    def estimate(name: ProgramName, **how: Any) -> float:
        text = compiled(name)
        return program_time(text, chip, bundles=bundles, **how).estimated_s

    for prompts, length in PREFILLS:
        shape = full._replace(num_prompts=prompts, prompt_length=length)
        turns = generation_work(architecture, mesh, programs.dtype, shape)["prefill"].turns
        counts = {"prefill_s": 1, "prefill_token_s": prompts * length}
        yield Timed(f"prefill {prompts} x {length}", counts, estimate(("prefill", prompts, length), turns=turns))
    for rows in engine.shapes.batch_buckets:
        work = generation_work(architecture, mesh, programs.dtype, full._replace(num_rows=rows))["decode"]
        all_blocks = -(-full.cache_length // block_size)
        for length in FILLED:
            # The last block of a row is half full in the mean.
            blocks = length / block_size + 0.5
            turns = {**work.turns, ATTENTION_SCOPE: int(work.turns[ATTENTION_SCOPE] * blocks / all_blocks)}
            seconds = estimate(("decode", rows, False), turns=turns, turn_of=DECODE_SCOPE)
            yield Timed(f"decode {rows} rows of {length}", step_counts(1, rows=rows, cache_length=length), seconds)
    # A row moves as the cache of the longest sample, whatever its tokens.
    sent_s = bytes_per_device(programs.abstract_row) / chip.link_bytes_per_s
    yield Timed("move a row", {"move_s": 1}, estimate(("take",), turns={}) + sent_s + estimate(("put",), turns={}))


def measured_machine(name: str) -> dict[str, Any]:
    timed = list(estimates(*open_engine(MACHINES[name])))
    assumed = CostModel()
    cost = replace(
        fit(timed),
        **{field: getattr(assumed, field) for field in ("segment_s", "admit_s", "admit_row_s")},
        reads_to_longest=False,
    )
    return {
        "workers": MACHINES[name]["workers"],
        "mesh": MACHINES[name]["mesh"],
        "cost": cost.to_json(),
        "programs": {one.what: {"s": one.seconds, "fitted_over": round(explained(one, cost), 3)} for one in timed},
        "versions": compiler_versions(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help=f"all by default: {', '.join(MACHINES)}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    first, *others = options.machines or MACHINES
    record = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    record[first] = measured_machine(first)
    for what, one in record[first]["programs"].items():
        print(f"{first}: {what:<24} {1e3 * one['s']:8.3f} ms   fitted / estimated {one['fitted_over']:.2f}")
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if others:
        # A process compiles for one slice.
        subprocess.run([sys.executable, __file__, *others, "--out", str(options.out)], check=True)


if __name__ == "__main__":
    main()
