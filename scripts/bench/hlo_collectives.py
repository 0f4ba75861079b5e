"""Bytes that a compiled program moves between devices, read from its HLO text: nothing is run.

    collectives_of(jax.jit(f).lower(x).compile())

Bytes are those that each device of a group of n sends under ring algorithms, which are optimal in bandwidth. With b the
bytes of a device's operand:

    all-gather          (n - 1) b
    reduce-scatter      (n - 1) / n b
    all-reduce      2 x (n - 1) / n b     a reduce-scatter, then an all-gather
    all-to-all          (n - 1) / n b
    collective-permute              b     of each pair of different devices

Sources: Chan, Heimlich, Purkayastha & van de Geijn 2007, "Collective communication"; NVIDIA nccl-tests, PERFORMANCE.md.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from jax.stages import Compiled

DeviceGroups = tuple[tuple[int, ...], ...]
"""Groups of devices that communicate, as places in `mesh.devices.flat`; (from, to) pairs for a permute."""

BYTES_SENT_BY_KIND: Mapping[str, Callable[[int, int], float]] = MappingProxyType(
    {
        "all-gather": lambda n, b: (n - 1) * b,
        "reduce-scatter": lambda n, b: (n - 1) / n * b,
        "all-reduce": lambda n, b: 2 * (n - 1) / n * b,
        "all-to-all": lambda n, b: (n - 1) / n * b,
        "collective-permute": lambda n, b: b,
    }
)
"""Maps a kind to a function (devices of a group, bytes of a device's operand) -> bytes that each device sends."""

UNSUPPORTED_OPCODES = frozenset({"send", "recv", "collective-broadcast", "ragged-all-to-all"})
"""Opcodes that communicate but are not supported; a program that has one is refused."""


@dataclass(frozen=True)
class Collective:
    """A collective instruction of a program."""

    kind: str
    dtype: str
    """HLO's name of the first operand's type: `f32`, `bf16`, `pred`."""
    operand_bytes: int
    """Bytes of the operands on each device; several operands may be merged."""
    groups: DeviceGroups
    loop_trip_counts: tuple[int | None, ...] = ()
    """Iterations of each loop around it, the outermost first; None if they depend on the data."""

    @property
    def is_in_dynamic_loop(self) -> bool:
        """Whether it is in a loop whose number of iterations depends on the data."""
        return None in self.loop_trip_counts

    @property
    def num_executions(self) -> int:
        """Number of executions per iteration of all dynamic loops."""
        return math.prod(loop for loop in self.loop_trip_counts if loop is not None)

    @property
    def bytes_per_device(self) -> float:
        """Bytes that the busiest device sends."""
        if self.kind == "collective-permute":
            return self.num_executions * self.operand_bytes * any(a != b for a, b in self.groups)
        return self.num_executions * max(
            BYTES_SENT_BY_KIND[self.kind](len(group), self.operand_bytes) for group in self.groups
        )

    def bytes_leaving_host(self, host_of_partition: Sequence[int]) -> float:
        """Returns the bytes that the busiest host sends to other hosts.

        A ring over hosts leaves each host over one link. All-to-all sends each device its own part, wherever it is.

        Args:
            hosts: host of each partition, in order.
        """
        leaving = dict.fromkeys(host_of_partition, 0.0)
        for group in self.groups:
            members = [host_of_partition[partition] for partition in group]
            if self.kind == "collective-permute":
                leaving[members[0]] += self.operand_bytes * (members[0] != members[1])
            elif self.kind == "all-to-all":
                for host in members:
                    leaving[host] += self.operand_bytes * sum(other != host for other in members) / len(members)
            elif len(set(members)) > 1:
                for host in set(members):
                    leaving[host] += BYTES_SENT_BY_KIND[self.kind](len(group), self.operand_bytes)
        return self.num_executions * max(leaving.values())


@dataclass(frozen=True)
class Traffic:
    """Sums over several collectives, per iteration of the dynamic loops around them."""

    count: int
    """Number of executions, including those in loops with a known number of iterations."""
    bytes_per_device: float
    bytes_leaving_host: float
    by_kind: Mapping[str, float]
    """Maps a kind to bytes per device."""


def total_traffic(collectives: Iterable[Collective], host_of_partition: Sequence[int]) -> Traffic:
    """Returns the sums over the collectives; see `Collective.bytes_leaving_host` for `hosts`."""
    found = list(collectives)
    by_kind: dict[str, float] = {}
    for one in found:
        by_kind[one.kind] = by_kind.get(one.kind, 0.0) + one.bytes_per_device
    leaving = sum(one.bytes_leaving_host(host_of_partition) for one in found)
    return Traffic(sum(one.num_executions for one in found), sum(by_kind.values()), leaving, by_kind)


# The text ----------------------------------------------------------------------------------------------------------

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<opcode>[a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b(?P<dtype>[a-z]+(?P<bits>\d*)\w*)\[(?P<sizes>[0-9,<= ]*)\]")
_CALLED = re.compile(r"\b(?P<role>body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands_text: str
    """Text after the opening parenthesis of the operands."""

    @property
    def operands(self) -> list[str]:
        depth, end = 1, 0
        while depth:
            depth += {"(": 1, ")": -1}.get(self.operands_text[end], 0)
            end += 1
        return re.findall(r"%([\w.\-]+)", self.operands_text[: end - 1])

    @property
    def kind(self) -> str:
        """Kind without the suffix of asynchronous forms; the matching `-done` is not a collective."""
        return self.opcode.removesuffix("-start")


def program_collectives(program: Compiled) -> list[Collective]:
    """Returns every collective of a compiled program; see `parse_collectives`."""
    text = program.as_text()
    assert text is not None, "this backend does not show its programs"
    return parse_collectives(text)


def parse_collectives(hlo: str) -> list[Collective]:
    """Returns every collective of a compiled module, with the loops around it; all branches are counted.

    Raises:
        ValueError: a collective or a notation of groups that is not supported.
    """
    computations, entry = _parse_computations(hlo)
    partitions = re.search(r"\bnum_partitions=(\d+)", hlo.partition("\n")[0])
    num_partitions = int(partitions[1]) if partitions else 1
    return list(_iterate_collectives(computations, entry, (), num_partitions))


def _parse_computations(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Returns name -> instructions, and the name of the entry computation."""
    found: dict[str, list[_Instruction]] = {}
    entry, inside = "", None
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            inside = found.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif line.startswith("}"):
            inside = None
        elif inside is not None and (match := _INSTRUCTION.match(line)):
            inside.append(_Instruction(match["name"], match["shape"], match["opcode"], line[match.end() :]))
    if not entry:
        raise ValueError("no ENTRY computation; expected the text of a compiled HLO module")
    return found, entry


def _iterate_collectives(
    computations: Mapping[str, list[_Instruction]],
    name: str,
    loop_trip_counts: tuple[int | None, ...],
    num_partitions: int,
) -> Iterator[Collective]:
    shapes = {one.name: one.shape for one in computations[name]}
    for one in computations[name]:
        if one.opcode in UNSUPPORTED_OPCODES:
            raise ValueError(f"{one.opcode} ({one.name}) moves bytes that are not counted here")
        if one.kind in BYTES_SENT_BY_KIND:
            yield _parse_collective(one, shapes, loop_trip_counts, num_partitions)
        elif not one.opcode.endswith(("-done", "-update")):
            # A while that is not annotated goes round until its data say so.
            trips = _TRIP_COUNT.search(one.operands_text)
            around = (
                (*loop_trip_counts, int(trips[1]) if trips else None) if one.opcode == "while" else loop_trip_counts
            )
            for called in _called_computations(one):
                yield from _iterate_collectives(computations, called, around, num_partitions)


def _called_computations(instruction: _Instruction) -> Iterator[str]:
    for match in _CALLED.finditer(instruction.operands_text):
        yield match[2]
    for match in _CALLED_LISTS.finditer(instruction.operands_text):
        yield from re.findall(r"%?([\w.\-]+)", match[1])


def _parse_collective(
    instruction: _Instruction, shapes: Mapping[str, str], loop_trip_counts: tuple[int | None, ...], num_partitions: int
) -> Collective:
    operands = [shapes[name] for name in instruction.operands]
    first = _ARRAY.search(operands[0])
    assert first is not None, instruction
    attribute = "source_target_pairs" if instruction.kind == "collective-permute" else "replica_groups"
    written = re.search(rf"\b{attribute}=(.*)", instruction.operands_text)
    groups = parse_groups(written[1], num_partitions) if written else _all_partitions(num_partitions)
    return Collective(instruction.kind, first["dtype"], sum(map(_num_bytes, operands)), groups, loop_trip_counts)


def _num_bytes(shape: str) -> int:
    """Returns the bytes of an array or a tuple of arrays in HLO's notation: `f32[2,3]{1,0}`."""
    total = 0
    for array in _ARRAY.finditer(shape):
        bits = 8 if array["dtype"] == "pred" else int(array["bits"] or 0)
        sizes = [int(size.strip(" <=")) for size in array["sizes"].split(",") if size.strip()]
        total += math.prod(sizes) * bits // 8
    return total


def _all_partitions(num_partitions: int) -> DeviceGroups:
    return (tuple(range(num_partitions)),)


def parse_groups(text: str, num_partitions: int) -> DeviceGroups:
    """Parses the groups at the start of `text`, in any of XLA's notations.

    `{{0,1},{2,3}}` lists them, and `{}` is one group of all devices. `[4,2]<=[2,4]T(1,0)` are the rows of a [4, 2]
    array: numbers from 0 as [2, 4], transposed and reshaped. `mesh['x'=2,'y'=4] {'y'}` groups devices that differ only
    along y. Of a split axis, `'y':(2)4` is the part of size 4 with 2 before it. If the mesh is not in numerical order,
    `device_ids=([2,4]T(1,0))` gives its rows in the notation above.

    Raises:
        ValueError: another notation.
    """
    if listed := re.match(r"\{((?:\{[0-9, ]*\},?\s*)*)\}", text):
        groups = re.findall(r"\{([0-9, ]*)\}", listed[1])
        return tuple(tuple(map(int, group.split(","))) for group in groups) or _all_partitions(num_partitions)
    if iota := re.match(r"\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", text):
        shape, sizes, order = (_integers(part) for part in iota.groups())
        return _to_device_groups(_transposed_iota(sizes, order).reshape(shape))
    if named := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(\[([0-9,]+)\]T\(([0-9,]+)\)\))? \{([^}]*)\}", text):
        mesh, sizes, order, axes = named.groups()
        return _groups_on_axes(mesh, axes, _transposed_iota(_integers(sizes), _integers(order)) if sizes else None)
    raise ValueError(f"groups in a notation that is not known here: {text[:120]}")


def _integers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def _transposed_iota(sizes: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order or tuple(range(len(sizes))))


def _to_device_groups(groups: np.ndarray) -> DeviceGroups:
    return tuple(tuple(row) for row in groups.tolist())


def _groups_on_axes(mesh: str, axes: str, order: np.ndarray | None) -> DeviceGroups:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    # Every axis as one or three parts: those before, in and behind what is named of it.
    parts: list[tuple[int, bool]] = []
    named = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _axes(axes)}
    for name, size in sizes.items():
        before, inside = named.get(name, (1, 1))
        parts += [(before, False), (inside, name in named), (size // (before * inside), False)]
    in_order = np.arange(math.prod(sizes.values())) if order is None else order
    ids = in_order.reshape([size for size, _ in parts])
    together = [i for i, (_, is_named) in enumerate(parts) if is_named]
    apart = [i for i, (_, is_named) in enumerate(parts) if not is_named]
    width = math.prod(parts[i][0] for i in together)
    return _to_device_groups(ids.transpose([*apart, *together]).reshape(-1, width))


def _axes(text: str) -> list[tuple[str, str, str]]:
    """Returns (name, size before it, its size) of each named axis; the last two are empty for a whole axis."""
    found = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", text)
    names = [name for name, _, _ in found]
    if any(a == b for a, b in itertools.combinations(names, 2)):
        raise ValueError(f"groups over two parts of one axis are not known here: {text}")
    return found
