"""Tests of the simulated time of slots, against hand-computed values."""

from dataclasses import replace

from scripts.simulate.simulated_slots import ProgramSizes, SimulatedSlots
from tests.rollout.scheduling.driving import FREE

LADDERS = ProgramSizes(batch=(2, 4, 8), cache=(16, 32, 64), prompt=(4, 8), prefill_rows=(1, 4))
COPIES = replace(FREE, copy_token_s=1.0)


def test_prompts_are_read_once_padded_to_their_rungs_and_as_many_at_once_as_a_program_takes() -> None:
    slots = SimulatedSlots(LADDERS, replace(FREE, prefill_s=100.0, prefill_token_s=1.0))
    lengths = {"a": 3, "b": 4, "c": 1, "d": 2, "e": 4, "f": 7}
    arrive = {"num_fresh": 6, "recomputed": [], "num_copied": 0}
    # Five of rung 4: four at once and one; one of rung 8.
    assert slots.admit(lengths, **arrive) == (100 + 4 * 4) + (100 + 4) + (100 + 8)
    assert slots.admit(lengths, **arrive) == 0


def test_a_row_that_is_read_anew_pays_for_the_longest_cache_and_for_its_move() -> None:
    slots = SimulatedSlots(LADDERS, replace(FREE, prefill_token_s=1.0, move_s=1000.0))
    assert slots.admit({}, num_fresh=0, recomputed=[5], num_copied=0) == 64 + 1000
    assert slots.cache_length == 64


def test_fewer_rows_have_full_room_and_admitting_uses_all_slots_again() -> None:
    slots = SimulatedSlots(LADDERS, COPIES)
    assert slots.compact(8) == 0
    assert slots.compact(2) == 8 * 32 + 8 * 64 + 4 * 64 + 2 * 64
    assert (slots.batch_size, slots.cache_length) == (2, 64)
    assert slots.admit({"a": 3}, num_fresh=1, recomputed=[], num_copied=0) == 8 * 64
    assert slots.batch_size == 8


def test_caches_grow_when_a_row_that_may_go_on_has_no_room() -> None:
    slots = SimulatedSlots(LADDERS, COPIES)
    # The last token needs no room: 17 tokens fit caches of 16.
    assert slots.grow_to_fit([(10, 7), (3, 2)]) == (None, 0)
    assert slots.grow_to_fit([(10, 20), (3, 2)]) == (7, 0)
    assert slots.grow_to_fit([(17, 20)]) == (16, 8 * 32)
    assert slots.cache_length == 32


def test_steps_cost_what_their_program_does() -> None:
    slots = SimulatedSlots(LADDERS, replace(FREE, step_row_s=1.0, step_cached_token_s=0.5))
    assert slots.decode(3) == 3 * (8 + 0.5 * 8 * 16)
