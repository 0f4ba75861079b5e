"""A scheduled rollout that was killed, at any line of its log, goes on to the very same samples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from app.records.sample import Sample
from app.rollout.scheduling.event_log import EventLog, read_event_log
from app.rollout.scheduling.events import RunSegment, WorkerJoined, WorkerLost
from app.rollout.scheduling.metrics import schedule_metrics, slot_spans, slots_per_worker
from app.rollout.scheduling.scheduler import POLICIES
from app.rollout.sequence import RolloutSequence
from app.rollout.worker_pool import RolloutWorkerPool
from tests.rollout.test_slot_engine import LENGTHS, PROMPTS
from tests.rollout.test_workers import EAGER, bits, expected, samples_of, scheduled, workers_on

RUN = {"seed": 0}


def logged(made: RolloutWorkerPool, path: Path) -> list[Sample]:
    """A rollout whose log stays."""
    made.take_counters()
    with EventLog(path, identity=RUN) as log:
        made.event_log = log
        return samples_of(made)


def killed(whole: Path, path: Path, *, after: int) -> None:
    """The log as it stood after so many lines, and a part of the next."""
    lines = whole.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:after]) + b"".join(lines[after : after + 1])[:40])


def places(whole: Path) -> Sequence[int]:
    """Lines after which to kill it: before and after the submission, in the middle, and at the end."""
    num_lines = whole.read_bytes().count(b"\n")
    return 1, 2, num_lines // 3, 2 * num_lines // 3, num_lines - 1, num_lines


@pytest.mark.parametrize("policy", POLICIES)
def test_wherever_it_was_killed_the_samples_are_the_same(policy: str, tmp_path: Path) -> None:
    assert bits(logged(scheduled(workers_on(2), policy), tmp_path / "whole")) == bits(expected())
    for after in places(tmp_path / "whole"):
        path = tmp_path / f"{after}"
        killed(tmp_path / "whole", path, after=after)
        before = read_event_log(path)
        made = scheduled(workers_on(2), policy)
        assert bits(logged(made, path)) == bits(expected())
        assert made.records[: len(before.records)] == before.records
        assert read_event_log(path).records == made.records and read_event_log(path).scheduler.is_finished
        done = {entry.uid for entry in before.scheduler.samples if entry.finish}
        assert not done & {one.uid for run in runs(made, len(before.records)) for one in run.admit}
        unfinished = sum(len(sample.completion_ids) for sample in expected() if sample.uid not in done)
        assert made.take_counters().generated_tokens <= unfinished


def test_a_truncated_rollout_that_was_killed_cuts_the_same_samples(tmp_path: Path) -> None:
    truncating = EAGER.model_copy(update={"on_fast_limit": "truncate"})
    whole = logged(scheduled(workers_on(2), "pdsr_v1", pdsr=truncating), tmp_path / "whole")
    assert schedule_metrics(read_event_log(tmp_path / "whole").records).truncated
    for after in range(1, (tmp_path / "whole").read_bytes().count(b"\n"), 2):
        path = tmp_path / f"{after}"
        killed(tmp_path / "whole", path, after=after)
        assert bits(logged(scheduled(workers_on(2), "pdsr_v1", pdsr=truncating), path)) == bits(whole), after


def runs(made: RolloutWorkerPool, first: int) -> list[RunSegment]:
    commands = itertools.chain.from_iterable(record.commands for record in made.records[first:])
    return [one for one in commands if isinstance(one, RunSegment)]


@pytest.mark.parametrize(("policy", "num_workers"), [("sync", 1), ("adaptive", 2)])
def test_in_fast_mode_what_was_drawn_is_read_again_and_kept(policy: str, num_workers: int, tmp_path: Path) -> None:
    logged(scheduled(workers_on(num_workers, exact=False), policy), tmp_path / "whole")
    killed(tmp_path / "whole", tmp_path / "log", after=places(tmp_path / "whole")[3])
    before = read_event_log(tmp_path / "log")
    made = scheduled(workers_on(num_workers, exact=False), policy)
    samples = {sample.uid: sample for sample in logged(made, tmp_path / "log")}
    kept = {uid: np.concatenate(drawn, axis=1) for uid, drawn in before.committed_tokens.items()}
    assert kept and before.scheduler.context.workers
    for uid, (ids, logprobs, _) in kept.items():
        assert samples[uid].completion_ids[: len(ids)].tolist() == ids.tolist()
        assert samples[uid].behavior_logprobs[: len(ids)].tobytes() == logprobs.tobytes()
    committed = sum(ids.shape[1] for ids in kept.values())
    assert made.take_counters().generated_tokens == sum(LENGTHS) - committed


def test_other_workers_may_go_on_under_names_that_were_never_used(tmp_path: Path) -> None:
    logged(scheduled(workers_on(1)), tmp_path / "whole")
    for after in (9, 14):
        killed(tmp_path / "whole", tmp_path / "log", after=after) if after == 9 else cut(tmp_path / "log", after=after)
        made = scheduled(workers_on(3), in_turn=True)
        assert bits(logged(made, tmp_path / "log")) == bits(expected())
    joined = [event.worker for event, _ in made.records if isinstance(event, WorkerJoined)]
    assert joined == ["fast-0", "fast-0#2", "heavy-1", "fast-2", "fast-0#3", "heavy-1#2", "fast-2#2"]
    lost = [event for event, _ in made.records if isinstance(event, WorkerLost)]
    assert {event.worker for event in lost} == {*joined[:4]} and lost[0].why == "the process ended"
    times = [event.at for event, _ in made.records]
    assert times == sorted(times) and schedule_metrics(made.records).useful_tokens == sum(LENGTHS)
    assert 0 <= schedule_metrics(made.records).bubble < 1
    assert slots_per_worker(made.records) == {"fast-0": 4, "heavy-1": 4, "fast-2": 4}
    assert {span.worker for span in slot_spans(made.records)} <= set(joined)
    samples_of(scheduled(made.workers))
    assert [worker.name for worker in made.workers] == ["fast-0", "heavy-1", "fast-2"]


def cut(path: Path, *, after: int) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:after]))


def test_times_of_a_sample_leave_out_the_time_between(tmp_path: Path) -> None:
    ticks = itertools.count()
    logged(scheduled(workers_on(1), clock=map(float, ticks).__next__), tmp_path / "whole")
    killed(tmp_path / "whole", tmp_path / "log", after=places(tmp_path / "whole")[3])
    last = read_event_log(tmp_path / "log").last_event_s
    made = scheduled(workers_on(1), clock=map(float, itertools.count(10**6)).__next__)
    samples = logged(made, tmp_path / "log")
    lost = next(event for event, _ in made.records if isinstance(event, WorkerLost))
    assert last < lost.at < last + 10
    assert all(0 <= sample.elapsed_s < last + 1 for sample in samples[:1])


def test_what_a_row_has_drawn_since_is_found_without_reading_the_rest() -> None:
    row = RolloutSequence(PROMPTS[0], 0, max_new_tokens=9, noise_step=0)
    drawn = [np.arange(6, dtype=np.int32).reshape(3, 2), np.arange(9, dtype=np.int32).reshape(3, 3)]
    row = RolloutSequence.restore(row, drawn)
    assert row.num_tokens == 5 and row.is_collected and row.num_segments == 2
    whole = np.concatenate(drawn, axis=1)
    for first, last in itertools.combinations(range(6), 2):
        np.testing.assert_array_equal(row.tokens_between(first, last), whole[:, first:last])
    assert row.tokens_between(5, 5).shape == (3, 0)


def test_a_sample_that_was_dropped_before_its_first_token_is_restored() -> None:
    row = RolloutSequence.restore(RolloutSequence(PROMPTS[0], 0, max_new_tokens=9, noise_step=3), ())
    row.finish_reason = "dropped:non-finite logits"
    sample = row.to_sample(0, decode_text=str, truncates=False)
    assert len(sample.completion_ids) == 0 and sample.policy_version == 3
