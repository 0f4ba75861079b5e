"""Sizes for which the prefill and decode programs of a slot engine are compiled."""

from __future__ import annotations

from typing import NamedTuple

from app.model.decode_weights import DecodeWeights
from app.model.kv_cache import KVCache
from settings.errors import InputError
from settings.schema.rollout import KVCacheType

NUM_BUCKETS = 3
"""Number of buckets: full, half and quarter size. More would save little and take longer to compile."""
MIN_ROWS = 8
"""Minimum batch size: fewer rows are hardly cheaper, and matmuls with one row round differently."""
PREFILL_ROWS = (1, 4)
PREFILL_ROWS_OF_TINY = 64
"""Maximum number of prompts that a device prefills together for a tiny model."""
LENGTH_MULTIPLE = 8
MAX_FORCED = 256
"""Maximum number of forced (already known) tokens of a row in a segment. Outside exact mode, a row with more of them
recomputes its whole cache by a prefill instead of occupying its slot for many steps."""


class BatchShape(NamedTuple):
    """Sizes of the largest programs of an engine, on this host's part of the mesh."""

    num_prompts: int
    """Number of prompts that are prefilled together."""
    num_rows: int
    prompt_length: int
    cache_length: int
    block_size: int


class Footprint(NamedTuple):
    """Arrays that occupy the devices during decoding, as shapes with shardings."""

    weights: DecodeWeights | tuple[DecodeWeights, ...]
    slots: KVCache


class SlotShapes(NamedTuple):
    """Sizes for which programs are compiled. Tuples are in ascending order and end with the full size."""

    batch_buckets: tuple[int, ...]
    """Batch sizes of the decode programs, in rows."""
    prompt_buckets: tuple[int, ...]
    """Padded lengths of prompts, in tokens."""
    recompute_buckets: tuple[int, ...]
    """Padded lengths of prompt plus completion for recomputing caches; the last fits a whole row."""
    prefill_rows: tuple[int, ...]
    """Numbers of prompts that a device prefills together."""
    segment_max: int
    """Longest segment, in tokens per row."""
    block_size: int | None = None
    """Tokens per KV block; None = the best size for the devices."""
    num_blocks: int | None = None
    """KV blocks on each device; None = enough for all slots."""
    has_large_blocks: bool = False
    """Whether the default block size may be large, because blocks are not scarce."""
    kv_cache: KVCacheType | None = None
    """Dtype of keys and values; None = the weights' dtype."""
    row_limit: int | None = None
    """Maximum row length in these slots, in tokens; None = `max_length`. Longer samples continue in other slots."""
    rows_together: int | None = None
    """Rows that a decode step computes together, so that engines of any size round alike; None = all."""
    records_routes: bool = False
    """Whether the experts that process each token are recorded."""
    max_forced: int = 0
    """Maximum number of forced (already known) tokens of a row in a segment; 0 = they are prefilled instead."""

    @property
    def num_slots(self) -> int:
        return self.batch_buckets[-1]

    @property
    def max_length(self) -> int:
        """Maximum length of prompt and completion together."""
        return self.recompute_buckets[-1]

    @property
    def max_row_length(self) -> int:
        """Maximum length of a row while it is in these slots."""
        return min(self.row_limit or self.max_length, self.max_length)

    @property
    def used_recompute_buckets(self) -> tuple[int, ...]:
        """The `recompute_buckets` up to the smallest that fits the longest row of these slots."""
        enough = next(i for i, length in enumerate(self.recompute_buckets, 1) if length >= self.max_row_length)
        return self.recompute_buckets[:enough]

    @property
    def max_prompt_length(self) -> int:
        return self.prompt_buckets[-1]

    def prompt_bucket(self, length: int) -> int:
        """Returns the smallest bucket for a prompt of this length.

        Raises:
            InputError: the prompt is longer than the largest bucket.
        """
        if length > self.max_prompt_length:
            raise InputError(
                f"data.max_prompt_length: a prompt has {length} tokens, but the slots hold prompts of at most "
                f"{self.max_prompt_length}; raise data.max_prompt_length to {length} or more, or remove the prompt"
            )
        return next(size for size in self.prompt_buckets if size >= length)


def make_slot_shapes(
    num_slots: int,
    *,
    max_prompt_length: int,
    max_new_tokens: int,
    prefill_length_min: int,
    segment_max: int,
    exact: bool,
    num_blocks: int | None = None,
    has_turns: bool = False,
    is_tiny: bool = False,
    row_shards: int = 1,
    setting: str = "rollout.slots",
) -> SlotShapes:
    """Returns the shapes for prompts of up to `max_prompt_length` and completions of up to `max_new_tokens` tokens.

    Args:
        prefill_length_min: minimum length to which prompts are padded.
        exact: whether all samples must run in programs of the same sizes: one batch size, and one prompt per prefill.
        has_turns: whether environments add observations, whose tokens are forced.
        is_tiny: whether the model is so small that compiling takes longer than running; each program has one size then.
        row_shards: number of devices over which the slots are split.
        setting: name of the setting that gives `num_slots`, for error messages.

    Raises:
        InputError: the slots cannot be split evenly over the devices.
    """
    if num_slots % row_shards:
        raise InputError(
            f"{setting}: {num_slots} cannot be split evenly over the {row_shards} devices that hold rows "
            f"(mesh.shape); set it to a multiple of {row_shards}"
        )
    prompts = _length_buckets(max_prompt_length, min_bucket=prefill_length_min)
    rows = _length_buckets(max_prompt_length + max_new_tokens, min_bucket=prompts[-1] + 1)
    halves = [num_slots // 2**i for i in range(NUM_BUCKETS)]
    batches = sorted({size for size in halves if size == num_slots or (size >= MIN_ROWS and size % row_shards == 0)})
    prefill_rows = PREFILL_ROWS
    if exact:
        batches, prefill_rows = [num_slots], (1,)
    elif is_tiny:
        prompts, rows, batches = prompts[-1:], rows[-1:], [num_slots]
        prefill_rows = (min(num_slots // row_shards, PREFILL_ROWS_OF_TINY),)
    return SlotShapes(
        batch_buckets=tuple(batches),
        prompt_buckets=prompts,
        recompute_buckets=rows,
        prefill_rows=prefill_rows,
        segment_max=min(segment_max, max_new_tokens),
        num_blocks=num_blocks,
        # In exact mode, a memory limit must not change the block size, which affects rounding.
        has_large_blocks=num_blocks is None and not exact,
        max_forced=min(segment_max, max_new_tokens, MAX_FORCED) if exact or has_turns else 0,
    )


def _length_buckets(largest: int, *, min_bucket: int) -> tuple[int, ...]:
    """Returns a quarter and a half (if at least `min_bucket`) and all of `largest`, rounded up to multiples of 8."""
    rounded = {-(-(largest // 2**i) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE for i in range(NUM_BUCKETS)}
    full = max(rounded)
    return tuple(sorted(size for size in rounded if size == full or size >= min_bucket))
