"""Chooses the numbers of decode slots and of KV blocks by the available memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import jax

from app.mesh.device_mesh import num_hosts
from app.mesh.devices import device_memory_bytes, device_platform, program_memory_bytes
from app.mesh.placement import bytes_per_device
from app.records.text_format import format_bytes
from app.rollout.engine.engine import SlotEngine
from app.rollout.engine.programs import SlotPrograms, compile_together
from settings import Settings

log = logging.getLogger(__name__)

TINY_PARAMETERS = 2**25
"""Number of parameters below which compiling the programs for decode slots takes longer than generating samples."""
SURE_SHARE = 0.7
"""If arrays fill at most this fraction of a device's memory, the rest is assumed to suffice for temporaries."""
POOL_COPIES = 3
"""Assumed memory of the KV cache in a program as a multiple of its size: TPUs make padded copies for narrow heads."""
SPARE_SHARE = 0.05
"""Fraction of a device's memory that is left free, for fragmentation and uncounted buffers."""
MEAN_FILL = 0.5
"""Assumed mean length of the rows in the slots, as a fraction of the maximum."""


def blocks_in_memory(engine: SlotEngine, *, held_bytes: int, truncates: bool) -> int | None:
    """Returns the number of KV blocks that fit on each device; None if all slots fit at full length.

    If memory is scarce, compiles the largest programs for two numbers of blocks to measure their memory. If not even
    one sample fits, logs a warning and returns the number of blocks for one sample.

    Args:
        engine: an engine that has enough blocks for all slots at full length.
        held_bytes: bytes per device of other arrays that stay there during generation.
        truncates: whether the sampling rules can exclude tokens.
    """
    available, programs = device_memory_bytes(), engine.programs
    weight_bytes, pool_bytes = map(bytes_per_device, (programs.abstract_weights, programs.abstract_pool))
    if available is None or held_bytes + weight_bytes + POOL_COPIES * pool_bytes <= SURE_SHARE * available:
        return None
    few, more = programs.with_blocks_for_rows(1), programs.with_blocks_for_rows(2)
    if few.num_blocks == more.num_blocks:
        return None  # one slot on each device
    room = int((1 - SPARE_SHARE) * available) - held_bytes
    device = programs.mesh.devices.flat[0]
    if device.platform != device_platform(device):
        # Virtual devices cannot compile for the devices that they simulate.
        fitting = (room - weight_bytes) * few.num_blocks // bytes_per_device(few.abstract_pool)
    elif weight_bytes > room:
        fitting = 0
    else:
        log.info("compiling generation programs to measure how much memory is left for the KV cache")
        fitting = _blocks_beside_programs(few, more, room, truncates=truncates, recomputes=not engine.exact)
    if fitting < few.num_blocks:
        log.warning(
            "rollout.kv_blocks: auto: a device's %s cannot hold the KV cache of one sample, %s, in addition to all "
            "other arrays; set fewer rollout.slots, lower rollout.max_new_tokens or data.max_prompt_length, or "
            "split the weights "
            "over more devices with mesh.shape or rollout.mesh",
            *map(format_bytes, (available, bytes_per_device(few.abstract_pool))),
        )
        return few.num_blocks
    return fitting if fitting * few.block_size < programs.num_blocks * programs.block_size else None


def _blocks_beside_programs(
    few: SlotPrograms, more: SlotPrograms, room: int, *, truncates: bool, recomputes: bool
) -> int:
    """Returns the largest number of blocks with which every program fits in `room` bytes; 0 if one cannot be compiled.

    The bytes per block, including padding and copies, are measured by compiling each program for both block counts.
    """
    lowered = [one.lower_programs(truncates=truncates, recomputes=recomputes).values() for one in (few, more)]
    try:
        peaks = [*map(program_memory_bytes, compile_together([*lowered[0], *lowered[1]]))]
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        return 0
    added, num_programs = more.num_blocks - few.num_blocks, len(peaks) // 2
    pairs = zip(peaks[:num_programs], peaks[num_programs:], strict=True)
    return few.num_blocks + min(math.floor((room - least) * added / (most - least)) for least, most in pairs)


def slots_in_blocks(programs: SlotPrograms) -> int:
    """Returns how many slots, up to `num_slots`, the KV blocks suffice for if rows have the assumed mean length.

    Counts of 8 or more per device are rounded down to a multiple of 4, so that batches can be halved twice.
    """
    per_device = programs.shapes.num_slots // programs.num_shards
    # A row's last block is half empty.
    of_a_row = min(MEAN_FILL * programs.blocks_per_row + 0.5, programs.blocks_per_row)
    fitting = max(int((programs.num_blocks - 2) / of_a_row), 1)
    if fitting >= per_device:
        return programs.shapes.num_slots
    return (fitting if fitting < 8 else fitting // 4 * 4) * programs.num_shards


def slots_note(settings: Settings, programs: SlotPrograms) -> Iterator[str]:
    """Yields a note for users about the value chosen for `rollout.slots: auto` or `rollout.kv_blocks: auto`."""
    rollout, hosts = settings.rollout, num_hosts(programs.mesh)
    num_slots = programs.shapes.num_slots // hosts
    cache = f"{programs.capacity:,} tokens, {format_bytes(bytes_per_device(programs.abstract_pool))} on each device"
    if rollout.slots == "auto" or rollout.has_workers:
        fit = "all samples of a step" if num_slots >= rollout.num_rows else "as many samples as fit"
        fit = "evaluations" if rollout.has_workers else fit
        yield f"rollout.slots: auto: {num_slots} on each host for {fit}, with a KV cache of {cache}"
    elif rollout.kv_blocks == "auto" and programs.preempts:
        yield f"rollout.kv_blocks: auto: {cache}, all that fits in memory, for {num_slots} slots"
