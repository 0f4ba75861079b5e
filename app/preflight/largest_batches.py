"""Estimates the largest batches that fit a device's memory, from the estimates of `app.preflight.memory`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.mesh.placement import num_local_row_shards
from app.preflight.memory import MemoryBreakdown
from app.records.text_format import format_bytes
from app.runtime.session import Session

USABLE_MEMORY_FRACTION = 0.9
"""Fraction of a device's memory available to a phase; the rest is for programs, fragmentation and estimate errors."""
ROW_BUFFERS = ("kv_cache", "logits", "logits_work")
BATCH_BUFFERS = (*ROW_BUFFERS, "prompt_cache", "activations")


@dataclass(frozen=True)
class BatchLimit:
    """Largest value of one setting while all others stay the same."""

    setting: str
    now: int
    fits: int | None
    """Largest value that fits; None if no value does."""
    phase: str
    """Phase of a step whose memory grows with the setting."""
    bytes_at_fits: int
    """Bytes of that phase on each device at the value `fits`."""

    def to_text(self) -> str:
        """Returns one readable line."""
        now = f"{self.setting} = {self.now:,}"
        if self.fits is None:
            return f"{now}: no value fits, because the other buffers of {self.phase} fill the memory"
        return f"{now}: at most {self.fits:,} fits; {self.phase} then needs {format_bytes(self.bytes_at_fits)}"


def find_batch_limits(
    session: Session, memory: Mapping[str, MemoryBreakdown], *, available_bytes: int
) -> list[BatchLimit]:
    """Returns the largest value of each batch-size setting with which its phase fits in the usable memory.

    Buffers that grow with a setting are assumed to be proportional to it.
    """
    settings, rollout, batching = session.settings, session.settings.rollout, session.continuous_batching
    sizes = []
    """For each setting: its name, its value, the increment, its phase, and the buffers that grow with it."""
    if session.workers is not None and rollout.pool != "ray":
        worker = max(session.workers.workers, key=lambda worker: worker.engine.shapes.num_slots)
        slots = worker.engine.shapes.num_slots
        sizes.append((f"rollout.workers.{worker.kind}.slots", slots, 1, "rollout", ROW_BUFFERS))
    elif batching is not None:
        step = num_local_row_shards(session.mesh)
        sizes.append(("rollout.slots", batching.engine.shapes.num_slots, step, "rollout", ROW_BUFFERS))
    elif session.workers is None:
        # The size of mini-batches is fixed, so more prompts result in more mini-batches.
        now, num_mini_batches = rollout.prompts_per_step, settings.num_mini_batches
        step = now // num_mini_batches if num_mini_batches > 1 else 1
        sizes.append(("rollout.prompts_per_step", now, step, "rollout", BATCH_BUFFERS))
    for phase, section, quota in (
        ("update", "algorithm", settings.algorithm.max_tokens_per_device),
        ("critic", "critic", settings.critic.max_tokens_per_device),
    ):
        if quota is not None and phase in memory:
            sizes.append((f"{section}.max_tokens_per_device", quota, 1, phase, ("activations",)))
    limits = []
    for setting, now, step, phase, buffers in sizes:
        growing = sum(memory[phase].get(name, 0) for name in buffers)
        fixed = sum(memory[phase].values()) - growing
        fits = int((USABLE_MEMORY_FRACTION * available_bytes - fixed) * now / growing) // step * step
        largest, size = (fits, fixed + growing * fits // now) if fits > 0 else (None, 0)
        limits.append(BatchLimit(setting, now, largest, phase, size))
    return limits
