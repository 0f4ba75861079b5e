from dataclasses import replace

import pytest

from app.rollout.scheduling.protocol import NewSample, RowReport
from app.rollout.scheduling.sample_states import SampleState, SampleTable


def running(worker: str = "w") -> tuple[SampleTable, str]:
    table = SampleTable()
    entry = table.add(NewSample("a", "p", 0, 10, 100))
    assert entry is not None
    table.start(entry, worker)
    return table, entry.uid


def test_a_result_counts_once() -> None:
    table, uid = running()
    assert table.commit("w", RowReport(uid, 1, 7, "stop"), seconds=1.0, steps=7)
    assert not table.commit("w", RowReport(uid, 1, 7, "stop"), seconds=1.0, steps=7)
    assert (table[uid].state, table[uid].num_tokens, table[uid].seconds) == (SampleState.DONE, 7, 1.0)


def test_a_row_pays_for_the_steps_that_it_took_part_in() -> None:
    table, uid = running()
    table.commit("w", RowReport(uid, 1, 5, None), seconds=4.0, steps=10)
    table.commit("w", RowReport(uid, 1, 5, None), seconds=4.0, steps=10)  # waited for blocks
    table.commit("w", RowReport(uid, 1, 8, "stop"), seconds=3.0, steps=3)
    assert table[uid].seconds == 2.0 + 0.0 + 3.0


@pytest.mark.parametrize(
    ("worker", "row"),
    [
        ("other", RowReport("a", 1, 7, None)),
        ("w", RowReport("a", 0, 7, None)),
        ("w", RowReport("a", 2, 7, None)),
        ("w", RowReport("unknown", 1, 7, None)),
    ],
)
def test_a_result_of_another_worker_epoch_or_sample_changes_nothing(worker: str, row: RowReport) -> None:
    table, uid = running()
    before = replace(table[uid])
    assert not table.commit(worker, row, seconds=1.0, steps=7)
    assert table[uid] == before and len(table.entries) == 1


def test_a_turn_is_answered_once() -> None:
    table, uid = running()
    assert not table.answer(uid, num_tokens=9, finish=None), "it is not its turn"
    table.commit("w", RowReport(uid, 1, 7, None, turn_end="stop"), seconds=1.0, steps=7)
    table.check_invariants()
    assert (table[uid].state, table[uid].worker, table[uid].held_by) == (SampleState.ACTING, None, "w")
    assert not table.answer(uid, num_tokens=6, finish="stop"), "of an earlier turn"
    assert table.answer(uid, num_tokens=9, finish=None)
    assert not table.answer(uid, num_tokens=9, finish=None)
    assert (table[uid].state, table[uid].num_tokens, table[uid].held_by) == (SampleState.SUSPENDED, 9, "w")
    assert table[uid].seconds == 1.0 and table.num_waiting == 1


def test_the_epoch_before_a_loss_is_fenced_off() -> None:
    table, uid = running()
    table.commit("w", RowReport(uid, 1, 7, None), seconds=1.0, steps=7)
    table.mark_lost(table[uid])
    assert not table.commit("w", RowReport(uid, 1, 9, "stop"), seconds=1.0, steps=7)
    table.start(table[uid], "w")
    assert not table.commit("w", RowReport(uid, 1, 9, "stop"), seconds=1.0, steps=7)
    assert table.commit("w", RowReport(uid, 2, 8, None), seconds=1.0, steps=7)


def test_tokens_never_shrink() -> None:
    table, uid = running()
    table.commit("w", RowReport(uid, 1, 7, None), seconds=1.0, steps=7)
    assert not table.commit("w", RowReport(uid, 1, 6, None), seconds=1.0, steps=7)
    assert table[uid].num_tokens == 7


def test_a_dropped_sample_keeps_its_reason() -> None:
    table, uid = running()
    table.commit("w", RowReport(uid, 1, 3, "dropped:non-finite logits"), seconds=1.0, steps=7)
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


def test_a_known_uid_is_not_added_again() -> None:
    table, uid = running()
    assert table.add(NewSample(uid, "q", 5, 1, 1)) is None
    assert table[uid].prompt == "p"
