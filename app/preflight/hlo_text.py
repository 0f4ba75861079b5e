"""Reads the text of a compiled XLA program: its instructions in scheduled order, and the bytes of its collectives."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from settings.errors import InputError

ITEM_BITS = {"pred": 8, "token": 0}
"""Bits per element of the types whose names do not state it."""

_NAME = r"%?([\w.\-]+)"
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(rf"(?:ROOT )?{_NAME} = (.*)")
_HEADER = re.compile(rf"(ENTRY )?{_NAME} \(")
_MESH_GROUP = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\)\))? \{([^}]*)\}")

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
SEMAPHORES = 4
"""Memory space that contains the handles of asynchronous collectives."""


@dataclass(frozen=True)
class ArrayShape:
    """Dtype, sizes and memory space of one array in an instruction's result, on one device."""

    dtype: str
    sizes: tuple[int, ...]
    memory_space: int
    """0: the device's main memory (HBM); others: on-chip memory."""

    @property
    def num_bytes(self) -> int:
        bits = ITEM_BITS.get(self.dtype, int((re.search(r"\d+", self.dtype) or ["32"])[0]))
        return math.prod(self.sizes) * bits // 8


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program."""

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    """Arrays of the result; several, in order, if it is a tuple."""
    operands: tuple[str, ...]
    text: str
    """The rest of the instruction's line after its opcode: operands and attributes."""

    @property
    def num_bytes(self) -> int:
        """Size of the instruction's result in bytes."""
        return sum(shape.num_bytes for shape in self.shapes)

    @cached_property
    def op_name(self) -> str:
        """JAX name scopes and operation from which the instruction was compiled; empty if the compiler added it."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that a fusion, a call or the branches of a conditional run."""
        listed = self.attribute(r"branch_computations=\{([^}]*)\}")
        names = r"(?:calls|to_apply|true_computation|false_computation)=" + _NAME
        return tuple(re.findall(_NAME, listed) if listed else re.findall(names, self.text))

    @property
    def group_size(self) -> int:
        """Number of devices in one group of a collective.

        Groups are written as a list, `{{0,1},{2,3}}`; as their shape, `[2,2]<=[4]`; or as axes of a mesh, as in
        `mesh['x'=2,'y'=4] {'y'}`, where `'y':(2)2` stands for a part of size 2 of an axis.
        """
        if mesh := _MESH_GROUP.search(self.text):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
            parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
            return math.prod(int(part or sizes[axis]) for axis, part in parts)
        if iota := self.attribute(r"replica_groups=\[\d+,(\d+)\]"):
            return int(iota)
        if listed := self.attribute(r"replica_groups=\{\{([\d,]+)\}"):
            return len(listed.split(","))
        raise ValueError(f"the groups of {self.name} have an unknown notation: {self.text[:120]}")

    @property
    def body(self) -> str:
        """Name of the computation that a `while` instruction repeats; empty for others."""
        return self.attribute(r"body=%?([\w.\-]+)") or ""

    @property
    def holds_handles(self) -> bool:
        """Whether the instruction's result contains handles of asynchronous operations."""
        return any(shape.memory_space == SEMAPHORES for shape in self.shapes)

    def attribute(self, pattern: str) -> str | None:
        """Returns what the first group of a regular expression matches in `text`; None without a match."""
        found = re.search(pattern, self.text)
        return found[1] if found else None


class Collective(NamedTuple):
    """Kind of a collective, and the bytes that it sends with a ring algorithm.

    Source: Chan, Heimlich, Purkayastha and van de Geijn 2007, "Collective communication"; NVIDIA nccl-tests,
    PERFORMANCE.md.
    """

    kind: str
    sent_bytes: int
    """Bytes that each device sends."""


class HloProgram:
    """The named computations of a compiled program, each with its instructions in scheduled order."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        # A custom kernel's metadata may span several lines.
        for line in re.sub(r'\n(?="|\}\})', "", text).splitlines():
            if not line.startswith((" ", "}", "HloModule")) and line.endswith("{") and (head := _HEADER.match(line)):
                current = self.computations.setdefault(head[2], [])
                self.entry = head[2] if head[1] else self.entry
            elif line.startswith("  ") and (found := _INSTRUCTION.match(line.strip())):
                current.append(_parse_instruction(found[1], found[2]))

    def fused(self, instruction: Instruction) -> Sequence[Instruction]:
        """Returns all instructions inside a fusion, including nested fusions."""
        inside = [one for name in instruction.called for one in self.computations.get(name, ())]
        return [*inside, *(deeper for one in inside if one.opcode == "fusion" for deeper in self.fused(one))]

    def starts(self, one: Instruction) -> bool:
        """Returns whether an instruction starts an asynchronous operation."""
        return one.opcode.endswith("-start") or self._calls(one, "AsyncCollectiveStart")

    def ends(self, one: Instruction) -> bool:
        """Returns whether an instruction waits for an asynchronous operation."""
        return one.opcode.endswith("-done") or self._calls(one, "AsyncCollectiveDone")

    def carries(self, one: Instruction) -> bool:
        """Returns whether an instruction is a fusion that does other work while an asynchronous collective runs."""
        return one.opcode == "fusion" and one.holds_handles and not self.starts(one)

    def _calls(self, one: Instruction, target: str) -> bool:
        return one.opcode == "fusion" and any(f'"{target}"' in inner.text for inner in self.fused(one))

    def computation_of(self, turn_of: str | None) -> str:
        """Returns the name of the body of the loop with name scope `turn_of`; of the entry computation for None."""
        if turn_of is None:
            return self.entry
        lines = (one for lines in self.computations.values() for one in lines)
        [loop] = [one for one in lines if one.opcode == "while" and one.op_name.endswith(f"{turn_of}/while")]
        return loop.body

    def num_turns(self, loop: Instruction, turns: Mapping[str, int]) -> int:
        """Returns a loop's number of iterations, from its HLO text or, for a data-dependent loop, from `turns`.

        Args:
            turns: maps the name scope of a data-dependent loop to its number of iterations.

        Raises:
            InputError: the number of iterations is unknown.
        """
        scopes = (scope for scope in turns if re.search(rf"\b{scope}\b", loop.op_name))
        count = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"') or turns.get(next(scopes, ""))
        if count is None:
            *lines, condition = self.computations[loop.attribute(r"condition=%?([\w.\-]+)") or ""]
            if condition.opcode == "compare" and condition.attribute(r"direction=(\w+)") == "LT":
                limits = (one for one in lines if one.name == condition.operands[-1] and one.opcode == "constant")
                count = next((one.attribute(r"^(\d+)\)") for one in limits), None)
        if count is None:
            raise InputError(
                f"the loop {loop.name} ({loop.op_name}) of a compiled program has an unknown number of iterations, "
                "so its work cannot be counted; use the libtpu that this JAX requires (pip install -e '.[tpu]')"
            )
        return int(count)

    def sent_bytes(self, turns: Mapping[str, int], *, turn_of: str | None = None) -> Counter[str]:
        """Returns, for each kind of collective, the bytes that each device sends in one call of the program.

        Of a conditional, only the branch that sends the most is counted.

        Args:
            turns: maps the name scope of a data-dependent loop to its number of iterations.
            turn_of: name scope of a loop, to count one of its iterations instead of the whole call.
        """
        return self._sent_bytes(self.computation_of(turn_of), turns)

    def _sent_bytes(self, computation: str, turns: Mapping[str, int]) -> Counter[str]:
        sent = Counter[str]()
        for one in self.computations[computation]:
            if one.opcode == "while":
                each = self._sent_bytes(one.body, turns)
                count = self.num_turns(one, turns) if each.total() else 0
                sent.update({kind: size * count for kind, size in each.items()})
            elif one.opcode in ("call", "conditional"):
                sent.update(max((self._sent_bytes(name, turns) for name in one.called), key=Counter.total))
            elif not (self.ends(one) or self.carries(one)) and (found := self.collective(one)) is not None:
                sent[found.kind] += found.sent_bytes
        return sent

    def collective(self, one: Instruction) -> Collective | None:
        """Returns the collective that an instruction is, starts or contains; None for other instructions."""
        inside = self.fused(one) if one.opcode in ("fusion", "async-start", "call-start") else [one]
        found = next((x for x in inside if x.opcode.removesuffix("-start") in COLLECTIVES), None)
        if found is None:
            return None
        kind = found.opcode.removesuffix("-start")
        # The result of most start instructions contains the operands, then the collective's result.
        shapes = [shape for shape in found.shapes if shape.memory_space != SEMAPHORES and shape.sizes]
        holds_operands = found.opcode.endswith("-start") and kind != "all-reduce"
        size = sum(shape.num_bytes for shape in shapes[len(shapes) // 2 if holds_operands else 0 :])
        if kind == "collective-permute":
            return Collective(kind, size)
        n = found.group_size
        if one.opcode == "fusion" and kind == "all-reduce" and any(x.opcode == "dynamic-slice" for x in inside):
            kind, size = "reduce-scatter", size // n
        factor = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}.get(kind, (n - 1) / n)
        return Collective(kind, int(size * factor))


def _parse_instruction(name: str, rest: str) -> Instruction:
    end = _tuple_end(rest) if rest.startswith("(") else rest.index(" ")
    opcode, _, arguments = rest[end:].strip().partition("(")
    shapes = tuple(
        ArrayShape(
            dtype,
            tuple(int(size) for size in sizes.split(",") if size),
            int(space[1]) if (space := re.search(r"S\((\d+)\)", layout or "")) else 0,
        )
        for dtype, sizes, layout in _ARRAY.findall(re.sub(r"/\*.*?\*/", "", rest[:end]))
    )
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments[: _tuple_end("(" + arguments) - 1]))
    return Instruction(name, opcode, shapes, operands, arguments)


def _tuple_end(text: str) -> int:
    """Returns the index after the parenthesis that closes the first one."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"unbalanced parentheses in HLO text: {text[:80]}")
