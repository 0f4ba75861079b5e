import pytest

from app.rollout.scheduling.protocol import NewSample, RowReport
from app.rollout.scheduling.sample_states import SampleState, SampleTable
from tests.rollout.scheduling.invariants import check_table


def running(worker: str = "w") -> tuple[SampleTable, str]:
    table = SampleTable()
    entry = table.add(NewSample("a", "p", 0, 10, 100))
    table.start(entry, worker)
    return table, entry.uid


def test_a_row_pays_for_the_steps_that_it_took_part_in() -> None:
    table, uid = running()
    table.commit("w", RowReport(uid, 5, None), seconds=4.0, steps=10)
    table.commit("w", RowReport(uid, 5, None), seconds=4.0, steps=10)  # waited for blocks
    table.commit("w", RowReport(uid, 8, "stop"), seconds=3.0, steps=3)
    assert table[uid].seconds == 2.0 + 0.0 + 3.0


def test_a_turn_is_answered_once() -> None:
    table, uid = running()
    with pytest.raises(AssertionError, match="waits for no answer"):
        table.answer(uid, num_tokens=9, finish=None)
    table.commit("w", RowReport(uid, 7, None, turn_end="stop"), seconds=1.0, steps=7)
    check_table(table)
    assert (table[uid].state, table[uid].worker, table[uid].held_by) == (SampleState.ACTING, None, "w")
    table.answer(uid, num_tokens=9, finish=None)
    assert (table[uid].state, table[uid].num_tokens, table[uid].held_by) == (SampleState.SUSPENDED, 9, "w")
    assert table[uid].seconds == 1.0 and table.num_waiting == 1
    with pytest.raises(AssertionError, match="waits for no answer"):
        table.answer(uid, num_tokens=9, finish=None)


def test_the_check_sees_a_state_that_was_changed_behind_its_back() -> None:
    table, uid = running()
    check_table(table)
    table[uid].state = SampleState.DONE
    with pytest.raises(AssertionError):
        check_table(table)
