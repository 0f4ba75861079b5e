"""Estimates the time of a compiled TPU program from its HLO text, without running it.

The compiler states the cycles of fusions. Times of all other operations follow from their bytes: of collectives at the
bandwidth of the links, otherwise at the bandwidth of the memory. Asynchronous operations count only for the time that
is not overlapped by other work.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from app.mesh.chips import TpuChip
from app.preflight.hlo_text import Collective, HloProgram, Instruction
from scripts.bench.kernel_time import GROUPED_PRODUCTS, kernel_time

FREE_OPCODES = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "iota"),
        *("partition-id", "replica-id"),
    }
)
"""Opcodes of instructions that take no time, because they move no arrays."""
ALIASING_CALLS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding")
"""Targets of custom calls that move no arrays, such as allocations and bitcasts."""
TOUCHED_ONCE = ("dynamic-slice", "slice", "gather", "dynamic-reshape")
"""Opcodes of instructions that read only as many bytes as they write, although their operand may be larger."""


@dataclass
class ProgramTime:
    """The estimated seconds of one call on each device."""

    compute_s: float = 0.0
    kernel_s: float = 0.0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each of `PARTS`; their sum is `estimated_s`."""

    @property
    def exposed_collective_s(self) -> float:
        """Seconds of collectives that do not overlap with other work."""
        return self.parts.get("collectives", 0.0)

    @property
    def estimated_s(self) -> float:
        return self.compute_s + self.kernel_s + self.exposed_collective_s

    def spend(self, part: str, seconds: float) -> None:
        """Adds seconds outside Pallas kernels to a part."""
        self.parts[part] += seconds
        if part != "collectives":
            self.compute_s += seconds

    def wait(self, ends: list[tuple[float, str]]) -> None:
        """Waits for asynchronous operations, given as (end time, part), and adds the waiting time to their parts."""
        for until, part in sorted(ends):
            self.spend(part, max(0.0, until - self.estimated_s))

    def add(self, other: ProgramTime, times: int = 1) -> None:
        """Adds the seconds of `other`, multiplied by `times`."""
        self.compute_s += other.compute_s * times
        self.kernel_s += other.kernel_s * times
        for part, seconds in other.parts.items():
            self.parts[part] += seconds * times


PARTS = ("attention", "matrix products", "LM head", "collectives", "rest")


def program_time(
    text: str, chip: TpuChip, *, bundles: Mapping[str, int], turns: Mapping[str, int], turn_of: str | None = None
) -> ProgramTime:
    """Returns the time of one call of a program on each device.

    Args:
        text: HLO text of the compiled program.
        bundles: instruction bundles per kernel; see `scripts.bench.kernel_time.take_scheduled_bundles`.
        turns: maps the name scope of a data-dependent loop or grid to its number of iterations or steps.
        turn_of: name scope of a loop, to return the time of one iteration instead of the whole call.

    Raises:
        InputError: the number of iterations of a loop or the schedule of a kernel is unknown.
    """
    walk = _Walk(HloProgram(text), chip, bundles, turns)
    return walk.time_of(walk.program.computation_of(turn_of))


@dataclass
class _Walk:
    program: HloProgram
    chip: TpuChip
    bundles: Mapping[str, int]
    turns: Mapping[str, int]

    def time_of(self, computation: str, part: str = "rest") -> ProgramTime:
        """Returns the time of one run of a computation whose instructions start one after the other.

        Args:
            part: the part for instructions that belong to no other part.
        """
        total = ProgramTime()
        results: dict[str, Instruction] = {}
        in_flight: dict[str, list[tuple[float, str]]] = {}
        """Value with handles of asynchronous operations -> (end time, part) of each operation."""
        links_free_at = 0.0
        for one in self.program.computations[computation]:
            results[one.name] = one
            now = total.estimated_s
            starts, ends = self.program.starts(one), self.program.ends(one)
            if ends or one.holds_handles:
                in_flight[one.name] = [end for operand in one.operands for end in in_flight.pop(operand, [])]
            target = one.attribute(r'custom_call_target="(\w+)"')
            if one.opcode in FREE_OPCODES or target in ALIASING_CALLS:
                continue
            if one.opcode == "while":
                total.add(self.time_of(one.body, self._part(one, part)), self.program.num_turns(one, self.turns))
            elif one.opcode == "conditional":
                total.add(max((self.time_of(name, part) for name in one.called), key=lambda branch: branch.estimated_s))
            elif one.opcode == "call":
                total.add(self.time_of(one.called[0], part))
            elif ends:
                total.wait(in_flight.pop(one.name))
            elif not self.program.carries(one) and (collective := self.program.collective(one)) is not None:
                links_free_at = max(now, links_free_at) + self._collective_s(collective)
                if starts:
                    in_flight[one.name] = [(links_free_at, "collectives")]
                else:
                    total.wait([(links_free_at, "collectives")])
            elif starts:
                in_flight[one.name] = [(now + one.num_bytes / 2 / self.chip.hbm_bytes_per_s, "rest")]
            elif target == "tpu_custom_call":
                kernel_s = kernel_time(one, self.chip, self.bundles, self.turns)
                total.kernel_s += kernel_s
                total.parts[self._part(one, part)] += kernel_s
            else:
                total.spend(self._part(one, part), self._instruction_s(one, results))
        total.wait([end for several in in_flight.values() for end in several])
        return total

    def _collective_s(self, one: Collective) -> float:
        in_ring = one.kind != "collective-permute"
        return one.sent_bytes / (self.chip.ring_bytes_per_s if in_ring else self.chip.ring_bytes_per_s / 2)

    def _instruction_s(self, one: Instruction, results: Mapping[str, Instruction]) -> float:
        if cycles := one.attribute(r'"estimated_cycles":"(\d+)"'):
            return int(cycles) / self.chip.clock_hz
        operands = [results[name] for name in one.operands if name in results]
        touched = one.num_bytes + sum(operand.num_bytes for operand in operands)
        if one.opcode in TOUCHED_ONCE:
            touched = 2 * one.num_bytes
        elif one.opcode == "dynamic-update-slice":
            touched = 2 * operands[1].num_bytes
        elif one.opcode == "fusion":
            touched = self._fusion_bytes(one) or touched
        elif one.opcode == "sort":
            # Each pass of a bitonic sort reads and writes the arrays.
            passes = math.log2(max(2, *one.shapes[0].sizes))
            touched = touched * passes * (passes + 1) / 2
        return touched / self.chip.hbm_bytes_per_s

    def _fusion_bytes(self, one: Instruction) -> int | None:
        """Returns the bytes that a fusion with a gather or an in-place scatter moves; None for other fusions."""
        inside = {inner.name: inner for inner in self.program.fused(one)}
        opcodes = {inner.opcode: inner for inner in inside.values()}
        if "scatter" in opcodes and '"aliasing_operands":{"lists":[{' in one.text:
            return 2 * inside[opcodes["scatter"].operands[-1]].num_bytes
        return 2 * one.num_bytes if "gather" in opcodes else None

    def _part(self, one: Instruction, default: str) -> str:
        if re.search(r"\battention\b", one.op_name):
            return "attention"
        if re.search(r"\blm_head\b", one.op_name):
            return "LM head"
        if one.name.startswith(GROUPED_PRODUCTS):
            return "matrix products"
        products = ("convolution", "dot")
        inside = (inner.opcode for inner in self.program.fused(one))
        return "matrix products" if one.opcode in products or any(x in products for x in inside) else default
