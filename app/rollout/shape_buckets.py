"""The few sizes in which slots are prefilled and decoded: every program of a rollout is one of these."""

from __future__ import annotations

from typing import NamedTuple

from settings.errors import InputError
from settings.schema.rollout import Rollout

NUM_RUNGS = 3
"""Of each ladder: a full size, a half and a quarter. More would save little and compile long."""
MIN_ROWS = 8
"""Fewer cost hardly less, and products with one row round differently from all others."""
PREFILL_ROWS = (1, 4)
GRAIN = 8
"""Lengths are multiples of it."""


class SlotShapes(NamedTuple):
    """Ladders in ascending order; the last rung is the full size."""

    batch_rungs: tuple[int, ...]
    """Rows of a decode program."""
    cache_rungs: tuple[int, ...]
    """Tokens that each of them has room for."""
    prompt_rungs: tuple[int, ...]
    """Tokens of a prefilled prompt, padding included."""
    prefill_rows: tuple[int, ...]
    """Prompts that are prefilled at once."""
    num_pooled: int
    """Prefilled prompts that wait for their samples."""
    segment_max: int
    """Longest segment, in tokens of a row."""

    @property
    def num_slots(self) -> int:
        return self.batch_rungs[-1]

    @property
    def max_length(self) -> int:
        """Prompt and completion."""
        return self.cache_rungs[-1]

    @property
    def max_prompt_length(self) -> int:
        return self.prompt_rungs[-1]

    def prompt_rung(self, length: int) -> int:
        """The smallest that holds a prompt.

        Raises:
            InputError: none does.
        """
        if length > self.max_prompt_length:
            raise InputError(
                f"data.max_prompt_length: a prompt has {length} tokens, and the slots were made for prompts of at most "
                f"{self.max_prompt_length}; raise data.max_prompt_length to {length} or more, or leave the prompt out"
            )
        return next(size for size in self.prompt_rungs if size >= length)


def slot_shapes(
    num_slots: int,
    *,
    max_prompt_length: int,
    max_new_tokens: int,
    prefill_length_min: int,
    num_pooled: int,
    segment_max: int,
    exact: bool,
    row_shards: int = 1,
    name: str = "rollout.slots",
) -> SlotShapes:
    """The sizes for prompts and completions of up to so many tokens.

    Args:
        num_pooled: distinct prompts whose samples are generated side by side.
        exact: a sample always meets programs of the same sizes: one batch, one cache, and its prompt alone in the
            rung of its own length.
        row_shards: devices that the slots are split over.
        name: the setting that the number of slots comes from.

    Raises:
        InputError: the slots cannot be split so.
    """
    if num_slots % row_shards:
        raise InputError(
            f"{name}: {num_slots} cannot be split over the {row_shards} devices that hold rows (mesh.shape); "
            f"set it to a multiple of {row_shards}"
        )
    prompts = _rungs(max_prompt_length, smallest=prefill_length_min)
    caches = _rungs(max_prompt_length + max_new_tokens, smallest=prompts[-1])
    halves = [num_slots // 2**i for i in range(NUM_RUNGS)]
    batches = [rows for rows in halves if rows == num_slots or (rows >= MIN_ROWS and rows % row_shards == 0)]
    return SlotShapes(
        batch_rungs=(num_slots,) if exact else tuple(sorted(set(batches))),
        cache_rungs=caches[-1:] if exact else caches,
        prompt_rungs=prompts,
        prefill_rows=(1,) if exact else PREFILL_ROWS,
        num_pooled=max(num_pooled, PREFILL_ROWS[-1]),
        segment_max=min(segment_max, max_new_tokens),
    )


def shapes_of(
    rollout: Rollout, num_slots: int, *, max_prompt_length: int, name: str, row_shards: int = 1
) -> SlotShapes:
    """The sizes that the settings ask for; see `slot_shapes`."""
    return slot_shapes(
        num_slots,
        max_prompt_length=max_prompt_length,
        max_new_tokens=rollout.max_new_tokens,
        prefill_length_min=rollout.prefill_length_min,
        num_pooled=rollout.prompts_per_step,
        segment_max=rollout.segment.max,
        exact=rollout.mode == "exact",
        row_shards=row_shards,
        name=name,
    )


def _rungs(top: int, *, smallest: int) -> tuple[int, ...]:
    """A quarter, a half and all of `top`, as far as they are not below `smallest`."""
    rounded = {-(-(top // 2**i) // GRAIN) * GRAIN for i in range(NUM_RUNGS)}
    full = max(rounded)
    return tuple(sorted(size for size in rounded if size == full or size >= smallest))
