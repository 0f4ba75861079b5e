from dataclasses import replace

from scripts.simulate.cost_fit import FREE
from scripts.simulate.cost_model import CostModel

COST = replace(FREE, step_s=1.0, step_row_s=0.5)


def test_costs_are_read_back() -> None:
    assert CostModel.from_json(COST.to_json()) == COST
