"""A scheduler that tests drive by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.rollout.scheduling.length_estimator import FinishedLength, LearnedLengths
from app.rollout.scheduling.pdsr_v1 import PdsrV1Policy
from app.rollout.scheduling.pdsr_v2 import PdsrV2Policy
from app.rollout.scheduling.protocol import (
    Answered,
    Closed,
    Command,
    NewSample,
    RowReport,
    RunSegment,
    SegmentEnded,
    Submitted,
    Suspend,
    WorkerJoined,
    WorkerKind,
)
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.scheduling.scheduling_policy import Probes
from settings.schema.rollout import PdsrSettings, SegmentSettings
from tests.rollout.scheduling.invariants import check_invariants

"""A cost model in which everything takes no time."""


def make_scheduler(
    policy: str = "adaptive",
    *,
    pdsr: dict | None = None,
    segment: dict | None = None,
    history: Mapping[str, float] | None = None,
    finished: Sequence[int] = (),
    **more: Any,
) -> Scheduler:
    """Returns a scheduler that knows these mean lengths of prompts, and the tokens of these finished samples.

    Args:
        pdsr: settings and constants.
    """
    learned = LearnedLengths(history or {}, tuple(FinishedLength(tokens, tokens / 100) for tokens in finished))
    constants = {name: value for name, value in (pdsr or {}).items() if name not in PdsrSettings.model_fields}
    rules = PdsrSettings(**{name: value for name, value in (pdsr or {}).items() if name not in constants})
    scheduler = Scheduler(policy, pdsr=rules, segment=SegmentSettings(**(segment or {})), learned=learned, **more)
    return with_constants(scheduler, **constants)


def with_constants(scheduler: Scheduler, **constants: float) -> Scheduler:
    """Sets numbers of the policies that are no settings."""
    for name, value in constants.items():
        assert hasattr(scheduler.context, name)
        setattr(scheduler.context, name, value)
    scheduler.context.update_threshold(scheduler.policy.percentile)
    return scheduler


def joined(
    at: float,
    worker: str,
    kind: WorkerKind = "fast",
    slots: int = 2,
    rungs: tuple[int, ...] = (),
    *,
    device: str | None = None,
    capacity: int = 8192,
    max_length: int | None = None,
    keeps_caches: bool = True,
) -> WorkerJoined:
    return WorkerJoined(at, worker, kind, slots, rungs, device, capacity, max_length, keeps_caches)


def samples(prompts: int, group: int, *, max_new: int = 4096, first: int = 0) -> tuple[NewSample, ...]:
    return tuple(
        NewSample(f"p{p}/s{i}", f"p{p}", i, 10, max_new) for p in range(first, first + prompts) for i in range(group)
    )


class Driven:
    """A scheduler and the last segment of each worker, so that a test can end it with any result."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.at = 0.0
        self.running: dict[str, RunSegment] = {}
        self.last: list[Command] = []

    def tell(self, event: Any) -> list[Command]:
        self.last = self.scheduler.handle(event)
        check_invariants(self.scheduler)
        for command in self.last:
            if isinstance(command, RunSegment):
                self.running[command.worker] = command
        return self.last

    def join(self, worker: str, *sizes: Any, **more: Any) -> list[Command]:
        return self.tell(joined(self.at, worker, *sizes, **more))

    def submit(self, new: tuple[NewSample, ...], *, close: bool = True) -> list[Command]:
        """Submits samples; the first segments start before `Closed`, so that samples count as waiting in them."""
        commands = self.tell(Submitted(self.at, new))
        return commands + (self.tell(Closed(self.at)) if close else [])

    def end(self, worker: str, tokens: dict[str, int], finished: tuple[str, ...] = (), **more: Any):
        """Ends the worker's segment with these numbers of tokens."""
        return self.tell(self.ended(worker, tokens, finished, **more))

    def ended(
        self,
        worker: str,
        tokens: dict[str, int],
        finished: tuple[str, ...] = (),
        seconds: float = 1.0,
        *,
        acting: tuple[str, ...] = (),
    ):
        self.at += seconds
        gained = [count - self.scheduler.samples[uid].num_tokens for uid, count in tokens.items()]
        rows = tuple(
            RowReport(uid, count, "stop" if uid in finished else None, "stop" if uid in acting else None)
            for uid, count in tokens.items()
        )
        return SegmentEnded(self.at, worker, rows, seconds, max(gained))

    def answer(self, uid: str, num_tokens: int, finish: str | None = None) -> list[Command]:
        return self.tell(Answered(self.at, (RowReport(uid, num_tokens, finish),)))

    def rows(self, worker: str) -> list[str]:
        return list(self.scheduler.context.workers[worker].rows)


def probes_of(driven: Driven) -> Probes:
    """Returns the probes of a P-DSR policy."""
    policy = driven.scheduler.policy
    assert isinstance(policy, PdsrV1Policy | PdsrV2Policy)
    return policy._probes


def admitted(commands: list[Command], worker: str | None = None) -> list[str]:
    """Returns the uids in the order of admission."""
    runs = [one for one in commands if isinstance(one, RunSegment) and worker in (None, one.worker)]
    return [one.uid for run in runs for one in run.admit]


def suspended(commands: list[Command]) -> list[tuple[str, str]]:
    return [(one.uid, one.why) for one in commands if isinstance(one, Suspend)]
