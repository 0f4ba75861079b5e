from pathlib import Path

import numpy as np
import pytest

from app.records.jsonl import write_jsonl
from app.rollout.scheduling.protocol import Closed, Event, EventRecord, RowReport, SegmentEnded, Submitted, WorkerJoined
from app.rollout.scheduling.scheduler import POLICIES
from scripts.simulate import length_traces
from scripts.simulate.cost_model import CostModel
from scripts.simulate.length_traces import TraceSample, read_trace
from scripts.simulate.simulator import SchedulerSimulator, SimulatedWorkerSpec
from settings.errors import InputError
from tests.rollout.scheduling.driving import Driven, make_scheduler, samples


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_lengths_correlate_inside_groups_as_asked(correlation: float) -> None:
    trace = length_traces.log_normal(
        np.random.default_rng(0), prompts=4000, group=2, mean=500, sigma=0.8, correlation=correlation, max_new=10**9
    )
    logs = np.log([one.length for one in trace]).reshape(-1, 2)
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(correlation, abs=0.05)
    assert logs.std() == pytest.approx(0.8, rel=0.05)
    assert np.exp(logs).mean() == pytest.approx(500, rel=0.05)


def test_long_samples_are_cut() -> None:
    trace = length_traces.log_normal(
        np.random.default_rng(0), prompts=100, group=2, mean=500, sigma=2.0, correlation=0.5, max_new=600
    )
    assert max(one.length for one in trace) == 600


def test_the_other_traces_are_what_they_are_called() -> None:
    rng, shape = np.random.default_rng(0), {"prompts": 20, "group": 4}
    assert {one.length for one in length_traces.equal(**shape, length=9)} == {9}
    assert {one.length for one in length_traces.bimodal(rng, **shape, short=3, long=70, share=0.5)} == {3, 70}
    assert [one.length for one in length_traces.one_giant(**shape, length=3, giant=70)] == [3] * 79 + [70]
    log_normal = {"mean": 100, "sigma": 0.8, "correlation": 0.5, "max_new": 10**6}
    calm = length_traces.log_normal(np.random.default_rng(5), **shape, **log_normal)
    drifting = length_traces.drift(np.random.default_rng(5), **shape, **log_normal)
    assert [b.length / a.length for a, b in zip(calm, drifting, strict=True)] == [1] * 40 + [2] * 40
    ascending = length_traces.ascending(calm)
    assert sorted(one.length for one in ascending) == sorted(one.length for one in calm)
    firsts = [one.length for one in ascending if one.index == 0]
    assert max(firsts) <= min(one.length for one in ascending if one.index == 3)


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    trace = [TraceSample("a/s0", "a", 0, 5, 7), TraceSample("odd", "q", 3, 1, 128)]
    write_jsonl(tmp_path / "t.jsonl", (one._asdict() for one in trace))
    assert read_trace(tmp_path / "t.jsonl") == trace


@pytest.mark.parametrize("policy", POLICIES)
def test_the_event_log_of_a_rollout_is_its_trace(policy: str) -> None:
    rng = np.random.default_rng(2)
    trace = length_traces.log_normal(rng, prompts=6, group=4, mean=60, sigma=1.0, correlation=0.5, max_new=200)
    workers = [SimulatedWorkerSpec("f", "fast", 4), SimulatedWorkerSpec("h", "heavy", 4)]
    clock = SchedulerSimulator(make_scheduler(policy), trace, workers, CostModel(), max_new=200)
    assert length_traces.trace_from_records(clock.run()) == trace


def test_samples_that_were_dropped_are_in_no_trace(tmp_path: Path) -> None:
    driven = Driven(make_scheduler())
    records = []

    def tell(event: Event) -> None:
        records.append(EventRecord(event, tuple(driven.tell(event))))

    tell(WorkerJoined(0.0, "w", "fast", 3))
    tell(Submitted(0.0, samples(1, 3)))
    tell(driven.ended("w", {"p0/s0": 5, "p0/s1": 5, "p0/s2": 5}, finished=("p0/s1",)))
    tell(Closed(1.0))
    rows = (RowReport("p0/s0", 7, "dropped:non-finite logits"), RowReport("p0/s2", 9, "stop"))
    tell(SegmentEnded(2.0, "w", rows, 1.0, 4))
    assert length_traces.trace_from_records(records) == [
        TraceSample("p0/s1", "p0", 1, 5, 10),
        TraceSample("p0/s2", "p0", 2, 9, 10),
    ]
    fields = {"prompt_token_ids": [1], "finish_reason": "stop"}
    broken = {"uid": "a/s0", **fields, "completion_token_ids": [], "finish_reason": "dropped:non-finite logits"}
    path = tmp_path / "samples.jsonl"
    write_jsonl(path, [broken, {"uid": "a/s1", **fields, "completion_token_ids": [3]}])
    assert read_trace(path) == [TraceSample("a/s1", "a", 1, 1, 1)]


def test_samples_of_a_rollout_are_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(
        '{"uid": "train/7/s2", "prompt": [{"role": "user"}], "prompt_token_ids": [1, 2], "completion_token_ids": [3]}\n'
    )
    assert read_trace(path) == [TraceSample("train/7/s2", "train/7", 2, 1, 2)]


def test_a_file_without_a_sample_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.touch()
    with pytest.raises(InputError, match="expected a sample on every line"):
        read_trace(path)
