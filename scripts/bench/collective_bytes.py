"""Bytes that a decoded token moves between devices: weights split over fsdp while decoding, against gathered ones.

    python scripts/bench/collective_bytes.py [--rows 128] [--new-tokens 1024] [--out FILE.json]

Baseline of the ratios: fsdp-decode, the layout of the historic runner and of MaxText-like samplers, where weights stay
split as they are trained and every decode step gathers them. Read from programs compiled for 8 virtual CPU devices;
nothing is run. Hosts are the first and the last four of them at v4-16, all of them at v5e-8.

A decode program is a loop over tokens, as the engine's; what is counted is one turn of it, and what XLA moved before
the loop is told apart. Programs of one, two and three layers are compiled: a layer's collectives are the same in each,
which is checked, so those of all layers follow exactly. They are compiled in float32 and counted at bfloat16's two
bytes, because a CPU's compiler widens bfloat16 before it gathers; only weights are gathered, which is checked, too.
Bytes depend on no row and no cache length.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hlo_collectives import LoopedCollective, program_collectives
from jax.sharding import AxisType, Mesh
from shapes import QWEN2_5_1_5B, QWEN2_5_7B

from app.mesh.axis_rules import AXES
from app.mesh.placement import abstract_arrays, row_sharding
from app.mesh.tpu_chips import parse_slice
from app.model.architecture import Architecture
from app.model.decode_weights import DecodeConversion, abstract_decode_weights
from app.model.decoder import DecoderDefinition
from app.model.kv_cache import abstract_cache, cache_shapes, constrain_cache
from app.model.prefill_and_decode import decode_step
from app.model.token_logprobs import scaled_logits
from app.rollout.sampling.token_sampling import SamplingRules, sample_tokens
from settings.schema.rollout import DecodeLayout

MODELS = {"1.5B": QWEN2_5_1_5B, "7B": QWEN2_5_7B}
PLACES = {"v4-16": [(1, 8, 1), (2, 4, 1)], "v5e-8": [(1, 8, 1)]}
"""Meshes by slice: that of the historic runner, and `auto` if it differs."""
COMPILED, COUNTED = jnp.dtype("float32"), jnp.dtype("bfloat16")
CACHE_LENGTH = 128


@dataclass(frozen=True)
class Moved:
    """Bytes that a program sends."""

    per_device: float
    leaving_host: float
    calls: float

    def of_layers(self, more: Moved, count: int) -> Moved:
        """Returns the bytes for `count` layers, given those of programs with one and two layers."""
        pairs = zip(self.as_tuple(), more.as_tuple(), strict=True)
        return Moved(*(one + (count - 1) * (two - one) for one, two in pairs))

    def as_tuple(self) -> tuple[float, ...]:
        return self.per_device, self.leaving_host, self.calls


def moved_by(collectives: Sequence[LoopedCollective], mesh: Mesh, hosts: Sequence[int]) -> Moved:
    """Returns the bytes of weights in the compute type; the check whether all rows are done is only a few bits.

    A ring over hosts leaves each host over one link.

    Args:
        hosts: the host of each device of the mesh, in order.
    """
    weights = [one for one in collectives if one.dtype != "pred"]
    kinds = {(one.collective.kind, one.dtype, one.instruction.group_size) for one in weights}
    assert kinds <= {("all-gather", "f32", mesh.shape["fsdp"])}, kinds
    per_device = sum(one.bytes_per_device for one in weights) * COUNTED.itemsize / COMPILED.itemsize
    lines = np.moveaxis(np.reshape(hosts, mesh.devices.shape), AXES.index("fsdp"), -1).reshape(-1, mesh.shape["fsdp"])
    crossing = sum(len(set(line)) > 1 for line in lines.tolist())
    return Moved(per_device, per_device * crossing, sum(one.num_executions for one in weights))


def in_layers(
    compile_with: Callable[[int], list[LoopedCollective]], mesh: Mesh, hosts: Sequence[int], num_layers: int
) -> list[Moved]:
    """Returns the bytes [per iteration of the loop, before the loop] of all layers."""
    found = []
    programs = [compile_with(count) for count in (1, 2, 3)]
    for in_loop in (True, False):
        one, two, three = (
            moved_by([c for c in program if c.is_in_dynamic_loop == in_loop], mesh, hosts) for program in programs
        )
        assert one.of_layers(two, 3) == three, "layers differ in what they move"
        found.append(one.of_layers(two, num_layers))
    return found


def decoding(architecture: Architecture, mesh: Mesh, layout: DecodeLayout, rows: int) -> list[LoopedCollective]:
    """Returns the bytes of a loop of decode steps."""
    definition = DecoderDefinition.create(architecture)
    weights = abstract_decode_weights(definition, mesh, COMPILED, layout)
    cache = abstract_cache(cache_shapes(architecture, rows, CACHE_LENGTH, COMPILED), mesh)
    of_rows: Any = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=row_sharding(mesh))

    def decode(weights: Any, cache: Any, token_ids: jax.Array, positions: jax.Array) -> Any:
        head = definition.bind(weights.params).head

        def step(carry: tuple) -> tuple:
            cache, token_ids, positions = carry
            hidden, cache, _ = decode_step(
                definition, weights, cache, token_ids, positions, jnp.ones_like(positions, bool)
            )
            drawn = sample_tokens(
                scaled_logits(hidden, head, 1.0), SamplingRules(1.0), jax.vmap(jax.random.key)(positions)
            )
            return constrain_cache(cache), drawn.token_ids, positions + 1

        return jax.lax.while_loop(lambda carry: ~jnp.all(carry[1] == 0), step, (cache, token_ids, positions))

    with jax.set_mesh(mesh):
        compiled = jax.jit(decode, donate_argnums=1).lower(weights, cache, of_rows, of_rows).compile()
    return program_collectives(compiled)


def gathering(architecture: Architecture, mesh: Mesh, layout: DecodeLayout) -> list[LoopedCollective]:
    """Returns the bytes of converting trained weights to decoding weights, once per policy version."""
    definition = DecoderDefinition.create(architecture)
    params = abstract_arrays(definition.shapes, definition.shardings(mesh))
    with jax.set_mesh(mesh):
        program = jax.jit(DecodeConversion(definition, mesh, COMPILED, layout))
        return program_collectives(program.lower(params).compile())


def measure(architecture: Architecture, mesh: Mesh, hosts: Sequence[int], layout: DecodeLayout, rows: int) -> dict:
    """Returns the bytes per token step, before the loop, and per policy version."""
    layers = architecture.num_layers
    step, before = in_layers(
        lambda count: decoding(replace(architecture, num_layers=count), mesh, layout, rows), mesh, hosts, layers
    )
    _, once = in_layers(
        lambda count: gathering(replace(architecture, num_layers=count), mesh, layout), mesh, hosts, layers
    )
    return {name: moved.__dict__ for name, moved in (("step", step), ("before_loop", before), ("version", once))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128, help="sequences of the batch, over all devices")
    parser.add_argument("--new-tokens", type=int, default=1024, help="steps of a rollout, of one policy version")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "collective_bytes.json")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    print(
        f"GB that each device sends, bfloat16; a batch of {options.rows} rows, a rollout of {options.new_tokens} token "
        "steps.\nBaseline: fsdp-decode, the layout of the historic runner and of MaxText-like samplers.\n"
    )
    print(
        f"{'':<30}{'token step':>12}{'per token':>12}{'across hosts':>14}{'before loop':>12}{'per version':>12}"
        f"{'rollout':>10}{'ratio':>12}"
    )
    cases = []
    for name, architecture in MODELS.items():
        for place, shapes in PLACES.items():
            for shape in shapes:
                cases += compare(name, architecture, place, shape, options)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "jax": jax.__version__,
        "read_from": "programs compiled for 8 virtual CPU devices",
        "rows": options.rows,
        "new_tokens": options.new_tokens,
        "cases": cases,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def compare(
    name: str, architecture: Architecture, place: str, shape: tuple[int, int, int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Prints both layouts of one model on one mesh."""
    pretended = parse_slice(place)
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3)
    hosts = [i // pretended.chips_per_host for i in range(pretended.num_chips)]
    cases, baseline = [], 0.0
    layouts: tuple[DecodeLayout, ...] = ("fsdp", "gathered")
    for layout in layouts:
        found = measure(architecture, mesh, hosts, layout, options.rows)
        step = found["step"]["per_device"]
        outside = found["version"]["per_device"] + found["before_loop"]["per_device"]
        rollout = outside + options.new_tokens * step
        baseline = baseline or rollout
        # A step draws a token of every row, and all devices send.
        per_token = step * mesh.size / options.rows
        cells = [step, per_token, found["step"]["leaving_host"], found["before_loop"]["per_device"]]
        cells += [found["version"]["per_device"], rollout]
        widths = (12, 12, 14, 12, 12, 10)
        title = f"{name} {place} {','.join(map(str, shape))} {layout}"
        ratio = "baseline" if layout == "fsdp" else f"1/{baseline / rollout:,.0f}"
        print(
            f"{title:<30}" + "".join(f"{x / 1e9:>{w}.3f}" for x, w in zip(cells, widths, strict=True)) + f"{ratio:>12}",
            flush=True,
        )
        cases.append(
            {
                "model": name,
                "slice": place,
                "hosts": pretended.num_hosts,
                "mesh": shape,
                "layout": layout,
                "bytes": found,
                "bytes_per_token_of_a_row_all_devices": per_token,
                "rollout_bytes_per_device": rollout,
                "rollout_over_baseline": rollout / baseline,
            }
        )
    return cases


if __name__ == "__main__":
    main()
