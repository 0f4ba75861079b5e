from dataclasses import replace

import pytest

from app.rollout.scheduling.events import NewSample, RowReport
from app.rollout.scheduling.sample_states import SampleState, SampleTable


def running(worker: str = "w") -> tuple[SampleTable, str]:
    ledger = SampleTable()
    entry = ledger.add(NewSample("a", "p", 0, 10, 100))
    assert entry is not None
    ledger.start(entry, worker)
    return ledger, entry.uid


def test_a_result_counts_once() -> None:
    ledger, uid = running()
    assert ledger.commit("w", RowReport(uid, 1, 7, "stop"), 1.0)
    assert not ledger.commit("w", RowReport(uid, 1, 7, "stop"), 1.0)
    assert (ledger[uid].state, ledger[uid].num_tokens, ledger[uid].seconds) == (SampleState.DONE, 7, 1.0)


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
    ledger, uid = running()
    before = replace(ledger[uid])
    assert not ledger.commit(worker, row, 1.0)
    assert ledger[uid] == before and len(ledger.entries) == 1


def test_the_epoch_before_a_loss_is_fenced_off() -> None:
    ledger, uid = running()
    ledger.commit("w", RowReport(uid, 1, 7, None), 1.0)
    ledger.mark_lost(ledger[uid])
    assert not ledger.commit("w", RowReport(uid, 1, 9, "stop"), 1.0)
    ledger.start(ledger[uid], "w")
    assert not ledger.commit("w", RowReport(uid, 1, 9, "stop"), 1.0)
    assert ledger.commit("w", RowReport(uid, 2, 8, None), 1.0)


def test_tokens_never_shrink() -> None:
    ledger, uid = running()
    ledger.commit("w", RowReport(uid, 1, 7, None), 1.0)
    assert not ledger.commit("w", RowReport(uid, 1, 6, None), 1.0)
    assert ledger[uid].num_tokens == 7


def test_a_dropped_sample_keeps_its_reason() -> None:
    ledger, uid = running()
    ledger.commit("w", RowReport(uid, 1, 3, "dropped:non-finite logits"), 1.0)
    assert (ledger[uid].state, ledger[uid].finish) == (SampleState.DROPPED, "dropped:non-finite logits")


def test_a_sample_that_lost_all_is_new_again() -> None:
    ledger, uid = running()
    ledger.mark_lost(ledger[uid])
    assert ledger[uid].state is SampleState.NEW


def test_the_check_sees_a_state_that_was_changed_behind_its_back() -> None:
    ledger, uid = running()
    ledger.check_invariants()
    ledger[uid].state = SampleState.DONE
    with pytest.raises(AssertionError):
        ledger.check_invariants()


def test_a_known_uid_is_not_added_again() -> None:
    ledger, uid = running()
    assert ledger.add(NewSample(uid, "q", 5, 1, 1)) is None
    assert ledger[uid].prompt == "p"
