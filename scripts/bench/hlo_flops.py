"""Counts the FLOPs of the matmuls in a compiled TPU program from its HLO text, without running it.

XLA's own count includes each loop body only once, and no Pallas kernels. Here, a loop body counts once per iteration,
and the kernels of `app.model.grouped_product` count for the rows that are routed to the experts of a device. Attention
kernels are not counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

from app.preflight.hlo_text import ArrayShape, HloProgram, Instruction
from scripts.bench.kernel_time import GROUPED_PRODUCTS, ROUTED_ROWS


def product_flops(text: str, turns: Mapping[str, int]) -> Counter[str]:
    """Returns the FLOPs on each device for each kind of matmul: `grouped` (experts), `head` (LM head) and `other`.

    Args:
        turns: see `scripts.bench.program_time.program_time`.
    """
    program, total = HloProgram(text), Counter[str]()

    def add(computation: str, times: int) -> None:
        shapes = {one.name: one.shapes for one in program.computations[computation]}
        for one in program.computations[computation]:
            if one.opcode == "while":
                add(one.body, times * program.num_turns(one, turns))
            elif one.opcode == "custom-call" and one.name.startswith(GROUPED_PRODUCTS):
                arrays = [shape for name in one.operands for shape in shapes.get(name, ())]
                matrices = next(x.sizes for x in (*one.shapes, *arrays) if len(x.sizes) == 3)
                total["grouped"] += times * 2 * turns[ROUTED_ROWS] * matrices[1] * matrices[2]
            elif one.opcode in ("convolution", "dot"):
                left, right = (shapes[name][0] for name in one.operands[:2])
                part = "head" if re.search(r"\blm_head\b", one.op_name) else "other"
                total[part] += times * 2 * _multiplications(one, left, right)
            else:
                for called in one.called:
                    add(called, times)

    add(program.entry, 1)
    return total


def _multiplications(one: Instruction, left: ArrayShape, right: ArrayShape) -> int:
    if one.opcode == "dot":
        dims = one.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        contracted = [left.sizes[int(dim)] for dim in dims.split(",") if dim]
        return math.prod(one.shapes[0].sizes) * math.prod(contracted)
    inward, inner, outward = re.findall(r"dim_labels=(\w+)_(\w+)->(\w+)", one.text)[0]
    count = math.prod([one.shapes[0].sizes[outward.index(dim)] for dim in "bf"]) * right.sizes[inner.index("i")]
    windows = _windows(one, len(inward) - 2)
    for dim, window in enumerate(windows):
        sizes = left.sizes[inward.index(str(dim))], one.shapes[0].sizes[outward.index(str(dim))]
        count *= _overlaps(*sizes, **window)
    return count


def _windows(one: Instruction, num_dims: int) -> list[dict[str, int]]:
    """Returns the window of a convolution in each spatial dim; XLA writes batch dims of matmuls as spatial dims."""

    def each(name: str, default: int) -> list[int]:
        listed = one.attribute(rf"window=\{{[^}}]*\b{name}=([\dx]+)")
        return [int(size) for size in listed.split("x")] if listed else [default] * num_dims

    pads = one.attribute(r"window=\{[^}]*\bpad=([\d_x\-]+)")
    before = [int(pad.split("_")[0]) for pad in pads.split("x")] if pads else [0] * num_dims
    names = {"size": 1, "stride": 1, "lhs_dilate": 1, "rhs_dilate": 1}
    columns = [each(name, default) for name, default in names.items()]
    return [dict(zip([*names, "pad"], row, strict=True)) for row in zip(*columns, before, strict=True)]


def _overlaps(length: int, results: int, *, size: int, stride: int, lhs_dilate: int, rhs_dilate: int, pad: int) -> int:
    """Returns the number of (result, window position) pairs in one dim that read an element rather than padding."""
    reached = (o * stride + k * rhs_dilate - pad for o in range(results) for k in range(size))
    return sum(0 <= at <= (length - 1) * lhs_dilate and at % lhs_dilate == 0 for at in reached)
