"""Tests of the simulated time of slots, against hand-computed values."""

from dataclasses import replace

from scripts.simulate.cost_fit import FREE
from scripts.simulate.simulated_slots import ProgramSizes, SimulatedSlots

SIZES = ProgramSizes(batch=(2, 4, 8), prompt=(4, 8), prefill_rows=(1, 4), recompute=(16, 64))


def test_prompts_are_read_once_padded_to_their_rungs_and_as_many_at_once_as_a_program_takes() -> None:
    slots = SimulatedSlots(SIZES, replace(FREE, prefill_s=100.0, prefill_token_s=1.0))
    lengths = {"a": 3, "b": 4, "c": 1, "d": 2, "e": 4, "f": 7}
    arrive = {"num_fresh": 6, "recomputed": [], "copied": []}
    # Five of rung 4: four at once and one; one of rung 8.
    assert slots.admit(lengths, **arrive) == (100 + 4 * 4) + (100 + 4) + (100 + 8)
    assert slots.admit(lengths, **arrive) == 0


def test_a_row_that_is_read_anew_pays_for_its_padding_and_one_that_moves_for_its_tokens() -> None:
    slots = SimulatedSlots(SIZES, replace(FREE, prefill_token_s=1.0, move_s=1000.0, move_token_s=0.5))
    assert slots.admit({}, num_fresh=0, recomputed=[5, 17], copied=[]) == 8 + 64
    assert slots.admit({}, num_fresh=0, recomputed=[], copied=[10, 20]) == 2 * 1000 + 15


def test_steps_cost_what_the_smallest_program_does_up_to_the_longest_row() -> None:
    slots = SimulatedSlots(SIZES, replace(FREE, step_row_s=1.0, step_cached_token_s=0.5))
    assert slots.decode(3, lengths=[16, 2, 1]) == 3 * 4 + 0.5 * 4 * (16 + 17 + 18)


def test_a_kernel_reads_each_row_only_as_far_as_it_has_tokens() -> None:
    cost = replace(FREE, step_row_s=1.0, step_cached_token_s=0.5, reads_to_longest=False)
    assert SimulatedSlots(SIZES, cost).decode(3, lengths=[16, 2, 1]) == 3 * 4 + 0.5 * (19 + 22 + 25)
