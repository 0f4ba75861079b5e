"""Lists the collectives of a compiled program and the loops around them from its HLO text, without running it.

Bytes are counted as in `app.preflight.hlo_text.Collective`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax.stages import Compiled

from app.preflight.hlo_text import COLLECTIVES, Collective, HloProgram, Instruction


@dataclass(frozen=True)
class LoopedCollective:
    """A collective, and how often it runs per iteration of the enclosing loops whose length depends on data."""

    collective: Collective
    instruction: Instruction
    num_executions: int
    is_in_dynamic_loop: bool

    @property
    def dtype(self) -> str:
        return self.instruction.shapes[0].dtype

    @property
    def bytes_per_device(self) -> int:
        """The bytes that each device sends in all runs."""
        return self.num_executions * self.collective.sent_bytes


def program_collectives(compiled: Compiled) -> list[LoopedCollective]:
    """Returns every collective of a compiled program, including all branches of conditionals."""
    text = compiled.as_text()
    assert text is not None, "this backend does not show its programs"
    program = HloProgram(text)
    return list(_collectives_of(program, program.entry, 1, is_in_dynamic_loop=False))


def _collectives_of(
    program: HloProgram, computation: str, num_executions: int, *, is_in_dynamic_loop: bool
) -> Iterator[LoopedCollective]:
    for one in program.computations[computation]:
        if (collective := program.collective(one)) is not None:
            inside = (one, *program.fused(one))
            bare = next(x for x in inside if x.opcode.removesuffix("-start") in COLLECTIVES)
            yield LoopedCollective(collective, bare, num_executions, is_in_dynamic_loop)
        elif one.opcode == "while":
            turns = one.attribute(r'"known_trip_count":\{"n":"(\d+)"')
            is_open, count = is_in_dynamic_loop or turns is None, num_executions * int(turns or 1)
            yield from _collectives_of(program, one.body, count, is_in_dynamic_loop=is_open)
        else:
            for called in one.called:
                yield from _collectives_of(program, called, num_executions, is_in_dynamic_loop=is_in_dynamic_loop)
