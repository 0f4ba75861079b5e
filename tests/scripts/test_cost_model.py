from dataclasses import replace

import pytest

from scripts.simulate.cost_model import CostModel, SampleLengths, lower_bound_s
from tests.rollout.scheduling.driving import FREE

MEASURED = replace(FREE, step_s=1.0, step_row_s=0.5, measured_steps=((8, 64, 3.0), (4, 64, 9.0)))


def test_a_measured_program_costs_what_was_measured_and_others_what_the_constants_say() -> None:
    assert MEASURED.step(rows=8, cache_length=64) == 3.0
    assert MEASURED.step(rows=8, cache_length=128) == 1.0 + 8 * 0.5


def test_a_program_faster_than_the_constants_lowers_the_bound() -> None:
    work = [SampleLengths("p", 1, 10), SampleLengths("q", 1, 2)]
    fitted = replace(MEASURED, measured_steps=())
    # 3 s where the constants say 5; that the other is slower lowers nothing.
    assert lower_bound_s(work, [8], MEASURED) == pytest.approx(0.6 * lower_bound_s(work, [8], fitted))


def test_costs_are_read_back() -> None:
    assert CostModel.from_json(MEASURED.to_json()) == MEASURED
