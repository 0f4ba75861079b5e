"""Tests of the pipeline of generation and training on the virtual clock."""

from __future__ import annotations

from typing import Any, cast

import pytest

from scripts.simulate import simulate_async
from scripts.simulate.cost_model import CostModel
from scripts.simulate.length_traces import Trace
from scripts.simulate.simulate_async import Pace, Pipeline, Training


class Taking:
    """Training whose every step takes so many seconds, and which notes the prompts of each."""

    def __init__(self, seconds: float):
        self.taken: list[set[str]] = []
        self._seconds = seconds

    def seconds(self, lengths: Trace) -> float:
        self.taken.append({one.prompt.partition("@")[2] for one in lengths})
        return self._seconds


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROMPTS": 4, "SLOTS": 8, "MAX_NEW": 256, "MEAN": 60}.items():
        monkeypatch.setattr(simulate_async, name, value)


def run(training: Taking, *, staleness: int, num_steps: int = 12) -> Pace:
    return Pipeline(cast(Training, training), 2, CostModel(), staleness=staleness).run(num_steps)


def test_where_training_is_slow_it_never_waits_and_rounds_are_taken_in_order() -> None:
    training = Taking(1e4)
    pace = run(training, staleness=1)
    assert pace.step_s == pytest.approx(1e4) and pace.training_bubble == pytest.approx(0, abs=1e-3)
    assert training.taken == [{str(number)} for number in range(12)]


def test_where_training_takes_no_time_it_always_waits_and_rounds_ahead_fill_the_slots() -> None:
    paces = [run(Taking(0.0), staleness=k) for k in (1, 3)]
    assert all(pace.training_bubble == pytest.approx(1) for pace in paces)
    assert paces[1].step_s < paces[0].step_s and paces[1].generation_bubble < paces[0].generation_bubble


def test_no_more_rounds_are_pending_than_staleness_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[int] = []
    request: Any = Pipeline._request

    def counted(self: Any, max_pending: int, now: float) -> None:
        request(self, max_pending, now)
        pending.append(self._num_pending)

    monkeypatch.setattr(Pipeline, "_request", counted)
    run(Taking(1.0), staleness=2)
    assert set(pending) == {2, 3} and pending[0] == 3
