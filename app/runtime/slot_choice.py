"""Whether samples are generated in slots, in how many, and how many blocks of KV cache the memory holds for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
from jax.stages import Lowered

from app.mesh.device_memory import device_memory_bytes
from app.mesh.devices import device_platform
from app.mesh.placement import bytes_per_device
from app.model.decoder import DecoderDefinition
from app.records.text_format import format_bytes, format_count
from app.rollout.slot_engine import SlotEngine
from app.rollout.slot_programs import SlotPrograms
from settings.schema.rollout import RolloutSettings

log = logging.getLogger(__name__)

MIN_PARAMETERS = 2**25
"""Number of parameters from which `rollout.slots: auto` means slots.

The up to 16 programs of slots take longer to compile than a smaller model takes for its samples.
"""
SURE_SHARE = 0.5
"""Share of a device's memory up to which arrays surely leave room for padding and for temporaries of programs."""
SPARE_SHARE = 0.05
"""Share of a device's memory that is left free, for fragments and for what nobody counts."""
MEAN_FILL = 0.5
"""Assumed mean length of the rows in the slots, as a share of the longest."""


def batch_reason(rollout: RolloutSettings, definition: DecoderDefinition) -> str | None:
    """Returns why `rollout.slots: auto` stands for one batch, as text; None if it stands for slots."""
    if rollout.placement == "global":
        return "all hosts generate it together"
    asks_for_blocks = isinstance(rollout.kv_blocks, int) or rollout.kv_block_size is not None
    if asks_for_blocks or definition.num_parameters >= MIN_PARAMETERS:
        return None
    return f"the model has only {format_count(definition.num_parameters, 'parameter')}"


def generates_in_slots(rollout: RolloutSettings, definition: DecoderDefinition) -> bool:
    """Returns whether `rollout.slots` stands for slots, and not for one batch or for workers."""
    if rollout.slots == "auto":
        return not rollout.has_workers and batch_reason(rollout, definition) is None
    return rollout.slots is not None


def blocks_in_memory(engine: SlotEngine, *, held_bytes: int, truncates: bool) -> int | None:
    """Returns how many limited blocks fit each device beside all else; None if all slots fit at full length.

    Compiles the programs that need most, with few blocks, unless the answer is clear without. If not even one sample
    fits, it warns, and returns the blocks of one.

    Args:
        engine: slots with enough blocks for all at full length.
        held_bytes: bytes on each device of other arrays, which stay there during generation.
        truncates: whether the sampling rules can exclude tokens.
    """
    available, programs = device_memory_bytes(), engine.programs
    needed = held_bytes + bytes_per_device(programs.abstract_weights) + bytes_per_device(programs.abstract_pool)
    if available is None or needed <= SURE_SHARE * available:
        return None
    few = programs.with_least_blocks()
    pool_bytes, others = bytes_per_device(few.abstract_pool), bytes_per_device(few.abstract_weights)
    device = programs.mesh.devices.flat[0]
    # Virtual devices cannot compile for those that they stand for.
    if held_bytes + others < available and device.platform == device_platform(device):
        log.info("compiling programs of slots, to see how much memory they leave for the KV cache")
        lowered = few.lower_programs(truncates=truncates, recomputes=not engine.exact)
        try:
            pool_bytes = _peak_bytes(few.lower_open())
            others = max(map(_peak_bytes, lowered.values())) - pool_bytes
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("RESOURCE_EXHAUSTED"):
                raise
            others = available
    free = max(int((1 - SPARE_SHARE) * available) - held_bytes - others, 0)
    fitting = free * few.num_blocks // pool_bytes
    if fitting < few.num_blocks:
        log.warning(
            "rollout.kv_blocks: auto: of the %s of a device, %s are left for the KV cache, which needs %s for one "
            "sample; lower rollout.max_new_tokens or data.max_prompt_length, or split the weights over more devices "
            "with mesh.shape or rollout.mesh",
            *map(format_bytes, (available, free, pool_bytes)),
        )
        return few.num_blocks
    return fitting if fitting * few.block_size < programs.num_blocks * programs.block_size else None


def _peak_bytes(program: Lowered) -> int:
    """Returns the memory of a program on each device while it runs, its arguments included."""
    found: Any = program.compile().memory_analysis()
    outputs = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + outputs + found.temp_size_in_bytes


def slots_in_blocks(programs: SlotPrograms) -> int:
    """Returns the number of slots that the blocks hold at their assumed mean length, at most as many as there are.

    Large numbers are rounded down, so that batches can be halved twice.
    """
    per_device = programs.shapes.num_slots // programs.num_shards
    fitting = max(int(programs.num_blocks / MEAN_FILL) // programs.blocks_per_row, 1)
    if fitting >= per_device:
        return programs.shapes.num_slots
    return (fitting if fitting < 8 else fitting // 4 * 4) * programs.num_shards


def slots_note(rollout: RolloutSettings, definition: DecoderDefinition, programs: SlotPrograms | None) -> Iterator[str]:
    """Yields what `auto` stands for in `rollout.slots` and `rollout.kv_blocks`, as text.

    Args:
        programs: those of the slots; None for one batch or workers.
    """
    if programs is None:
        if rollout.slots == "auto" and not rollout.has_workers:
            yield f"rollout.slots: auto: one batch, because {batch_reason(rollout, definition)}"
        return
    num_slots = programs.shapes.num_slots
    cache = f"{programs.capacity:,} tokens, {format_bytes(bytes_per_device(programs.abstract_pool))} on each device"
    if rollout.slots == "auto":
        fit = "all samples of a step" if num_slots >= rollout.num_rows else "as many samples as fit"
        yield f"rollout.slots: auto: {num_slots} on each host for {fit}, with a KV cache of {cache}"
    elif rollout.kv_blocks == "auto" and programs.preempts:
        yield f"rollout.kv_blocks: auto: {cache}, all that the memory holds for {num_slots} slots"
