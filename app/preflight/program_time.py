"""The time of a compiled TPU program as its compiler estimates it: nothing is run.

The compiler states cycles for fusions. Everything else is counted from bytes: other instructions and copies at the
bandwidth of the memory, collectives at the bandwidth of the links. Of what runs in the background, only the time that
is not covered by work between its start and its end counts.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from app.mesh.tpu_chips import TpuChip
from app.preflight.hlo_text import SEMAPHORES, Collective, HloProgram, Instruction
from settings.errors import InputError

FREE_OPCODES = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "iota"),
        *("partition-id", "replica-id"),
    }
)
"""Instructions that move no arrays of any size."""
ALIASING_CALLS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding")
"""Targets of custom calls that only name memory."""
TOUCHED_ONCE = ("dynamic-slice", "slice", "gather", "dynamic-reshape")
"""Instructions that read as much as they write, however large their first operand is."""


@dataclass
class ProgramTime:
    """Seconds of one call on each device, by the compiler's estimate."""

    compute_s: float = 0.0
    kernel_s: float = 0.0
    exposed_collective_s: float = 0.0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by part: those of `PARTS`, which add up to the whole."""
    collective_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that each device sends, by kind of collective."""

    @property
    def estimated_s(self) -> float:
        return self.compute_s + self.kernel_s + self.exposed_collective_s

    def add(self, other: ProgramTime, times: int = 1) -> None:
        """Adds another's figures `times` times."""
        self.compute_s += other.compute_s * times
        self.kernel_s += other.kernel_s * times
        self.exposed_collective_s += other.exposed_collective_s * times
        for part, seconds in other.parts.items():
            self.parts[part] += seconds * times
        for kind, num_bytes in other.collective_bytes.items():
            self.collective_bytes[kind] += num_bytes * times


PARTS = ("attention", "matrix products", "LM head", "collectives", "rest")


def program_time(
    program: HloProgram,
    chip: TpuChip,
    *,
    kernel_s: Mapping[str, float],
    loop_counts: Mapping[str, int],
    turn_of: str | None = None,
) -> ProgramTime:
    """Returns the time of one call of a program on each device.

    Args:
        kernel_s: seconds of each Pallas kernel by the name of its instruction.
        loop_counts: turns of loops that depend on data, by their name scope.
        turn_of: the name scope of a loop of which only one turn is counted, instead of the whole call.

    Raises:
        InputError: a loop's count is unknown.
    """
    walk = _Walk(program, chip, kernel_s, loop_counts)
    if turn_of is None:
        return walk.time_of(program.entry)
    loops = [one for lines in program.computations.values() for one in lines if one.opcode == "while"]
    [loop] = [one for one in loops if one.op_name.endswith(f"{turn_of}/while")]
    return walk.time_of(_body(loop))


def _body(loop: Instruction) -> str:
    return loop.attribute(r"body=%?([\w.\-]+)") or ""


@dataclass
class _Walk:
    program: HloProgram
    chip: TpuChip
    kernel_s: Mapping[str, float]
    loop_counts: Mapping[str, int]

    def time_of(self, computation: str, part: str = "rest") -> ProgramTime:
        """Returns the time of one run of a computation, whose instructions start one after the other.

        Args:
            part: the part of instructions whose own is unknown.
        """
        total = ProgramTime()
        results: dict[str, Instruction] = {}
        in_flight: dict[str, list[tuple[float, str]]] = {}
        """Value that holds handles of what runs in the background -> when each ends on this clock, and its part."""
        links_free_at = 0.0
        for one in self.program.computations[computation]:
            results[one.name] = one
            now = total.estimated_s
            self._follow(one, in_flight)
            if one.opcode in FREE_OPCODES or one.attribute(r'custom_call_target="(\w+)"') in ALIASING_CALLS:
                continue
            if one.opcode == "while":
                total.add(self._loop(one, part))
            elif one.opcode == "conditional":
                total.add(max((self.time_of(name, part) for name in one.called), key=lambda branch: branch.estimated_s))
            elif one.opcode == "call":
                total.add(self.time_of(one.called[0], part))
            elif one.opcode.endswith("-done") or self._calls(one, "AsyncCollectiveDone"):
                self._wait(total, in_flight.pop(one.name, []))
            elif (collective := self.program.collective(one)) is not None and not self._carries(one):
                total.collective_bytes[collective.kind] += collective.sent_bytes
                links_free_at = max(now, links_free_at) + self._collective_s(collective)
                ends = [(links_free_at, "collectives")]
                if one.opcode.endswith("-start") or self._calls(one, "AsyncCollectiveStart"):
                    in_flight[one.name] = ends
                else:
                    self._wait(total, ends)
            elif one.opcode.endswith("-start"):
                in_flight[one.name] = [(now + self._memory_s(one.num_bytes / 2), "rest")]
            elif (kernel := self.kernel_s.get(one.name)) is not None:
                total.kernel_s += kernel
                total.parts[self._part(one, part)] += kernel
            else:
                seconds = self._instruction_s(one, results)
                total.compute_s += seconds
                total.parts[self._part(one, part)] += seconds
        self._wait(total, [ended for several in in_flight.values() for ended in several])
        return total

    def _follow(self, one: Instruction, in_flight: dict[str, list[tuple[float, str]]]) -> None:
        """Passes the handles in an instruction's operands on to its own result."""
        is_end = one.opcode.endswith("-done") or self._calls(one, "AsyncCollectiveDone")
        if is_end or any(shape.memory_space == SEMAPHORES for shape in one.shapes):
            handles = [ended for operand in one.operands for ended in in_flight.pop(operand, [])]
            if handles:
                in_flight[one.name] = handles

    @staticmethod
    def _wait(total: ProgramTime, ends: list[tuple[float, str]]) -> None:
        for until, part in sorted(ends):
            exposed = max(0.0, until - total.estimated_s)
            if part == "collectives":
                total.exposed_collective_s += exposed
            else:
                total.compute_s += exposed
            total.parts[part] += exposed

    def _loop(self, one: Instruction, part: str) -> ProgramTime:
        scopes = (scope for scope in self.loop_counts if re.search(rf"\b{scope}\b", one.op_name))
        count = one.attribute(r'"known_trip_count":\{"n":"(\d+)"') or self.loop_counts.get(next(scopes, ""))
        if count is None and (count := self._compared_count(one)) is None:
            raise InputError(
                f"the loop {one.name} ({one.op_name}) of a compiled program has no known number of turns, so the time "
                "of the program is unknown: use the libtpu that this JAX asks for (pip install -e '.[tpu]')"
            )
        turn = self.time_of(_body(one), self._part(one, part))
        total = ProgramTime()
        total.add(turn, int(count))
        return total

    def _compared_count(self, loop: Instruction) -> int | None:
        """Returns the constant that the loop's counter stays below; None if its condition is another."""
        lines = {one.name: one for one in self.program.computations[loop.attribute(r"condition=%?([\w.\-]+)") or ""]}
        *_, condition = lines.values()
        limit = lines.get(condition.operands[-1]) if condition.operands else None
        if limit is None or condition.opcode != "compare" or condition.attribute(r"direction=(\w+)") != "LT":
            return None
        constant = limit.attribute(r"^(\d+)\)") if limit.opcode == "constant" else None
        return None if constant is None else int(constant)

    def _calls(self, one: Instruction, target: str) -> bool:
        return one.opcode == "fusion" and any(f'"{target}"' in inner.text for inner in self.program.fused(one))

    def _collective_s(self, one: Collective) -> float:
        in_ring = one.kind != "collective-permute"
        return one.sent_bytes / (self.chip.ring_bytes_per_s if in_ring else self.chip.link_bytes_per_s)

    def _carries(self, one: Instruction) -> bool:
        """Returns whether a fusion does other work while a collective that has been started goes on."""
        return (
            one.opcode == "fusion"
            and any(x.memory_space == SEMAPHORES for x in one.shapes)
            and not self._calls(one, "AsyncCollectiveStart")
        )

    def _instruction_s(self, one: Instruction, results: Mapping[str, Instruction]) -> float:
        if (cycles := one.estimated_cycles) is not None:
            return cycles / self.chip.clock_hz
        operands = [results[name] for name in one.operands if name in results]
        if one.opcode in TOUCHED_ONCE:
            return self._memory_s(2 * one.num_bytes)
        if one.opcode == "dynamic-update-slice":
            return self._memory_s(2 * operands[1].num_bytes)
        touched = one.num_bytes + sum(operand.num_bytes for operand in operands)
        if one.opcode == "sort":
            # A bitonic sort: each of its passes reads and writes the arrays.
            passes = math.log2(max(2, *one.shapes[0].sizes))
            return self._memory_s(touched * passes * (passes + 1) / 2)
        return self._memory_s(touched)

    def _memory_s(self, num_bytes: float) -> float:
        return num_bytes / self.chip.hbm_bytes_per_s

    def _part(self, one: Instruction, default: str) -> str:
        if re.search(r"\battention\b", one.op_name):
            return "attention"
        if re.search(r"\blm_head\b", one.op_name):
            return "LM head"
        products = ("convolution", "dot")
        inside = (inner.opcode for inner in self.program.fused(one))
        return "matrix products" if one.opcode in products or any(x in products for x in inside) else default
