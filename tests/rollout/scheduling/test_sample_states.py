import pytest

from app.rollout.scheduling.protocol import NewSample, RowReport
from app.rollout.scheduling.sample_states import SampleState, SampleTable


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


@pytest.mark.parametrize(
    ("worker", "row"),
    [("other", RowReport("a", 7, None)), ("w", RowReport("a", -1, None))],
)
def test_a_report_of_another_worker_or_with_fewer_tokens_is_a_bug(worker: str, row: RowReport) -> None:
    table, _ = running()
    with pytest.raises(AssertionError):
        table.commit(worker, row, seconds=1.0, steps=7)


def test_a_turn_is_answered_once() -> None:
    table, uid = running()
    with pytest.raises(AssertionError, match="waits for no answer"):
        table.answer(uid, num_tokens=9, finish=None)
    table.commit("w", RowReport(uid, 7, None, turn_end="stop"), seconds=1.0, steps=7)
    table.check_invariants()
    assert (table[uid].state, table[uid].worker, table[uid].held_by) == (SampleState.ACTING, None, "w")
    table.answer(uid, num_tokens=9, finish=None)
    assert (table[uid].state, table[uid].num_tokens, table[uid].held_by) == (SampleState.SUSPENDED, 9, "w")
    assert table[uid].seconds == 1.0 and table.num_waiting == 1
    with pytest.raises(AssertionError, match="waits for no answer"):
        table.answer(uid, num_tokens=9, finish=None)


def test_a_dropped_sample_keeps_its_reason() -> None:
    table, uid = running()
    table.commit("w", RowReport(uid, 3, "dropped:non-finite logits"), seconds=1.0, steps=7)
    assert (table[uid].state, table[uid].finish) == (SampleState.DROPPED, "dropped:non-finite logits")


def test_a_sample_that_lost_all_is_new_again() -> None:
    table, uid = running()
    table.mark_lost(table[uid])
    assert table[uid].state is SampleState.NEW


def test_the_check_sees_a_state_that_was_changed_behind_its_back() -> None:
    table, uid = running()
    table.check_invariants()
    table[uid].state = SampleState.DONE
    with pytest.raises(AssertionError):
        table.check_invariants()
