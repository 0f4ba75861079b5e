"""GAE of each backend in JAX on a TPU or GPU that is not there, against one read and one write of the data.

    python scripts/bench/gae_compiled.py [--place v5e-8|h100-1] [--shape 256x131072] [--chunks 64 128 256]

Compiles GAE with one gamma and lambda, and with a mask, for one chip. The floor is the chip's time to read rewards and
values and to write advantages and returns, 16 bytes a token (17 with a mask). Estimated by the compiler, never
measured: on a TPU by its schedule, on a GPU by the bytes that its kernels access. A loop over time has no estimate
there, since starting its kernels takes longer than what they do. Needs `pip install -e '.[tpu]'` or `'.[cuda]'`.
"""

from __future__ import annotations

import argparse
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.advantage.gae.estimate import generalized_advantages
from app.mesh.compile_only import compile_only_devices, kernel_schedules
from app.mesh.gpu_cards import GPU_HOSTS, GpuHost
from app.mesh.tpu_chips import parse_slice
from app.preflight.hlo_text import HloProgram
from app.preflight.kernel_time import take_scheduled_bundles
from app.preflight.program_time import program_time
from app.records.text_format import format_bytes, format_percent, format_table

BYTES_PER_TOKEN = 16
NO_KERNELS = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", default="v5e-8", help="TPU slice or GPU host, of which one device is used")
    parser.add_argument("--shape", default="256x131072", help="rows x tokens")
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256], help="steps of a chunk")
    options = parser.parse_args()
    shape = tuple(map(int, options.shape.split("x")))
    cases = [("serial", None), *(("chunked", size) for size in options.chunks)]
    rows = [
        estimated(options.place, shape, backend, size, masked=masked)
        for masked in (False, True)
        for backend, size in cases
    ]
    head = ("backend", "chunk", "mask", "estimated by the compiler", "floor", "of the floor", "temporaries")
    print(format_table(rows, header=head))


def estimated(
    place_name: str, shape: tuple[int, ...], backend: str, chunk_size: int | None, *, masked: bool
) -> tuple[str, ...]:
    """Returns a line of the table."""
    schedules, place = kernel_schedules(), GPU_HOSTS.get(place_name) or parse_slice(place_name)
    mesh = Mesh(np.array(compile_only_devices(place)[:1]), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    numbers = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=everywhere)
    mask = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=everywhere) if masked else None
    solve = partial(generalized_advantages, gamma=0.99, lam=0.95, backend=backend, chunk_size=chunk_size)
    with jax.set_mesh(mesh):
        lowered = jax.jit(lambda rewards, values, mask: solve(rewards, values, mask=mask)).lower(numbers, numbers, mask)
        compiled = lowered.compile()
    text = compiled.as_text() or ""
    num_bytes = (BYTES_PER_TOKEN + masked) * shape[0] * shape[1]
    if isinstance(place, GpuHost):
        [bandwidth] = map(float, re.findall(r"memory_bandwidth: (\d+)", place.chip.description))
        total = math.nan if " while(" in text else accessed_bytes(text) / bandwidth
    else:
        bandwidth = place.chip.hbm_bytes_per_s
        time = program_time(text, place.chip, bundles=take_scheduled_bundles(schedules), turns={})
        total = time.compute_s + time.kernel_s
    floor = num_bytes / bandwidth
    memory = compiled.memory_analysis()
    assert memory is not None
    has_estimate = not math.isnan(total)
    return (
        backend, str(chunk_size or ""), "yes" if masked else "", f"{total * 1e3:.2f} ms" if has_estimate else "a loop",
        f"{floor * 1e3:.2f} ms", format_percent(floor / total) if has_estimate else "",
        format_bytes(memory.temp_size_in_bytes),
    )  # fmt: skip


def accessed_bytes(text: str) -> int:
    """Returns the bytes that the kernels of a GPU program without loops read and write, operands and results."""
    program = HloProgram(text)
    lines = program.computations[program.entry]
    sizes = {one.name: one.num_bytes for one in lines}
    kernels = [one for one in lines if one.opcode not in NO_KERNELS]
    return sum(one.num_bytes + sum(sizes[operand] for operand in one.operands) for one in kernels)


if __name__ == "__main__":
    main()
