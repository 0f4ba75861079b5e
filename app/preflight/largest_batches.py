"""Estimates the largest token quotas that fit a device's memory, from the compiler's figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.preflight.compiled_programs import CompiledProgram
from app.preflight.memory import MemoryBreakdown
from settings import Settings

USABLE_MEMORY_FRACTION = 0.9
"""Fraction of a device's memory available to a phase; the rest is for fragmentation and the error of the estimate."""


@dataclass(frozen=True)
class BatchLimit:
    """Largest value of one setting while all others stay the same."""

    setting: str
    now: int
    fits: int | None
    """Largest value that fits; None if no value does."""

    def to_text(self) -> str:
        """Returns one readable line."""
        return f"{self.setting} = {self.now:,}: {'no value' if self.fits is None else f'at most {self.fits:,}'} fits"


def find_batch_limits(
    settings: Settings,
    programs: Sequence[CompiledProgram],
    memory: Mapping[str, MemoryBreakdown],
    *,
    available_bytes: int,
) -> Iterator[BatchLimit]:
    """Yields the largest quota of each update, if the temporaries of its gradients are in proportion to the quota."""
    quotas = {"update": ("algorithm", settings.algorithm), "critic": ("critic", settings.critic)}
    for program in programs:
        section, values = quotas.get(program.phase, ("", None))
        if program.name == "gradients" and values is not None and (now := values.max_tokens_per_device) is not None:
            fixed = sum(size for name, size in memory[program.phase].items() if name != "temporaries")
            fits = int((USABLE_MEMORY_FRACTION * available_bytes - fixed) * now / program.temporary_bytes)
            yield BatchLimit(f"{section}.max_tokens_per_device", now, fits if fits > 0 else None)
