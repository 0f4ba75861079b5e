"""The sizes of slots for the settings of a rollout."""

from __future__ import annotations

from app.rollout.engine.shapes import SlotShapes, make_slot_shapes
from settings.schema.rollout import RolloutSettings


def slot_shapes_from_settings(
    rollout: RolloutSettings,
    num_slots: int,
    *,
    max_prompt_length: int,
    setting: str,
    row_shards: int = 1,
    num_blocks: int | None = None,
    row_limit: int | None = None,
    has_turns: bool = False,
    is_tiny: bool = False,
) -> SlotShapes:
    """Returns the sizes for the settings; see `make_slot_shapes`.

    Args:
        num_blocks: what `rollout.kv_blocks: auto` stands for.
        row_limit: see `SlotShapes`.
        has_turns, is_tiny: see `make_slot_shapes`.
    """
    return make_slot_shapes(
        num_slots,
        max_prompt_length=max_prompt_length,
        max_new_tokens=rollout.max_new_tokens,
        prefill_length_min=rollout.prefill_length_min,
        segment_max=rollout.segment.max,
        exact=rollout.mode == "exact",
        block_size=rollout.kv_block_size,
        num_blocks=num_blocks if rollout.kv_blocks == "auto" else rollout.kv_blocks,
        kv_cache=rollout.kv_cache,
        row_limit=row_limit,
        rows_together=rollout.rows_together,
        records_routes=rollout.routing_replay,
        has_turns=has_turns,
        is_tiny=is_tiny,
        row_shards=row_shards,
        setting=setting,
    )
