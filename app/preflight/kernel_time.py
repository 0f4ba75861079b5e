"""The time of Pallas kernels on a TPU, from the instructions that the compiler scheduled for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from app.mesh.tpu_chips import TpuChip
from app.model.attention import ATTENTION_SCOPE, KERNEL_BLOCK_SIZES
from app.preflight.hlo_text import HloProgram, Instruction

BLOCKS_PER_TURN = {"attention_forward": (2, 2), "attention_backward": (3, 2)}
"""Kernel -> blocks of query heads, and of key heads, that a turn copies at most."""


def kernel_times(
    program: HloProgram, chip: TpuChip, bundles: Mapping[str, int], turns: Mapping[str, int]
) -> Iterator[tuple[str, float]]:
    """Yields the name and the seconds of each kernel of a program: the longer of its instructions and its copies.

    Args:
        bundles: see `take_scheduled_bundles`.
        turns: the pairs of blocks for each key head, as `ATTENTION_SCOPE`.
    """
    for instructions in program.computations.values():
        for one in instructions:
            kernel = next((name for name in BLOCKS_PER_TURN if one.name.startswith(name)), None)
            if kernel is None or one.opcode != "custom-call":
                continue
            num_turns = one.shapes[0].sizes[0] * turns[ATTENTION_SCOPE]
            cycles = bundles[kernel] * num_turns
            copied = _bytes_per_turn(kernel, one) * num_turns
            yield one.name, max(cycles / chip.clock_hz, copied / chip.hbm_bytes_per_s)


def take_scheduled_bundles(folder: Path) -> dict[str, int]:
    """Returns the bundles of instructions of each kernel that was compiled since the last call.

    One turn of a kernel's grid takes a cycle for each bundle. The compiler compiles equal kernels of a program once.
    """
    bundles: dict[str, int] = {}
    for path in folder.iterdir():
        name = re.fullmatch(r"\d+-(\w+)[.\w]*-\d+-schedule-analysis_final_bundles\.txt", path.name)
        if name and name[1] in BLOCKS_PER_TURN:
            total = re.search(r"total scheduled bundles:\s+(\d+)", path.read_text(errors="replace"))
            assert total, path
            bundles[name[1]] = max(int(total[1]), bundles.get(name[1], 0))
        path.unlink()
    return bundles


def _bytes_per_turn(kernel: str, one: Instruction) -> int:
    _, group_size, num_tokens, head_dim = one.shapes[0].sizes
    by_query, by_key = BLOCKS_PER_TURN[kernel]
    size = max(size for size in KERNEL_BLOCK_SIZES if num_tokens % size == 0)
    bytes_per_number = one.shapes[0].num_bytes // (one.shapes[0].num_items or 1)
    return (by_query * group_size + by_key) * size * head_dim * bytes_per_number
