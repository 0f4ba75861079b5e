"""Drives schedulers by hand or in random order, and checks invariants after every event."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from app.rollout.scheduling import protocol
from app.rollout.scheduling.length_estimator import FinishedLength, LearnedLengths
from app.rollout.scheduling.protocol import Command, NewSample, RowReport, RunSegment, Suspend, WorkerJoined
from app.rollout.scheduling.sample_states import ENDED, WAITING, SampleEntry, SampleState
from app.rollout.scheduling.scheduler import POLICIES, Scheduler
from settings.schema.rollout import PdsrSettings, SegmentSettings

Names = Sequence[str]


def is_finished(scheduler: Scheduler) -> bool:
    return scheduler.is_closed and all(entry.state in ENDED for entry in scheduler.samples)


def check_invariants(scheduler: Scheduler) -> None:
    """Raises AssertionError if samples, rows and slots disagree, or a slot is idle while samples wait."""
    table, workers = scheduler.samples, scheduler.context.workers
    assert +table.counts == Counter(entry.state for entry in table), "counts differ from states"
    for entry in table:
        uid, state = entry.uid, entry.state
        assert (state is SampleState.RUNNING) == (entry.worker is not None), f"{uid}: {state} on {entry.worker}"
        assert (state in ENDED) == (entry.finish is not None), f"{uid}: {state}, {entry.finish}"
        keeps = state in WAITING or state is SampleState.ACTING
        assert entry.held_by is None or (entry.num_tokens and keeps), f"{uid}: {state} with a kept cache"
        assert 0 <= entry.num_tokens <= entry.sample.max_new, f"{uid}: {entry.num_tokens} tokens"
        assert state is not SampleState.SUSPENDED or entry.num_tokens, f"{uid}: suspended without tokens"
        assert entry.held_by is None or entry.held_by in workers, f"{entry.uid}: its cache is lost"
    running = [entry for entry in table if entry.state is SampleState.RUNNING]
    acting = [entry for entry in table if entry.state is SampleState.ACTING]
    assert sum(len(worker.rows) for worker in workers.values()) == len(running), "a row runs on a lost worker"
    for name, worker in workers.items():
        assert sorted(worker.rows) == sorted(one.uid for one in running if one.worker == name), f"{name}: rows"
        assert sorted(worker.acting) == sorted(one.uid for one in acting if one.held_by == name), f"{name}: acting"
        assert worker.num_free_slots >= 0, f"{name}: too many rows for {worker.slots} slots"
        assert worker.is_busy == bool(worker.rows), f"{name} is idle with rows, or busy without"
        takes_sample = worker.answered or (worker.has_free_slot and scheduler.policy.find(worker))
        assert worker.is_busy or not takes_sample, f"{name} is idle while samples wait"
        for entry in map(table.__getitem__, worker.answered):
            assert entry.state in WAITING and entry.held_by == name and worker.fits(entry), f"{entry.uid}: not back"
    has_place = any(worker.fits(entry) for entry in table if entry.state in WAITING for worker in workers.values())
    assert running or acting or not has_place, "samples wait, but no worker is running"


def make_scheduler(
    policy: str = "adaptive", *, pdsr: Any = None, history: Any = None, finished: Any = (), **more: Any
) -> Scheduler:
    """Returns a scheduler with these settings, constants, mean lengths of prompts and lengths of finished samples."""
    learned = LearnedLengths(history or {}, tuple(FinishedLength(tokens, tokens / 100) for tokens in finished))
    constants = {name: value for name, value in (pdsr or {}).items() if name not in PdsrSettings.model_fields}
    rules = PdsrSettings(**{name: value for name, value in (pdsr or {}).items() if name not in constants})
    scheduler = Scheduler(
        policy, pdsr=rules, segment=SegmentSettings(**more.pop("segment", {})), learned=learned, **more
    )
    return with_constants(scheduler, **constants)


def with_constants(scheduler: Scheduler, **constants: float) -> Scheduler:
    """Sets constants of the policies, which are not settings."""
    for name, value in constants.items():
        assert hasattr(scheduler.context, name)
        setattr(scheduler.context, name, value)
    scheduler.context.update_threshold(scheduler.policy.percentile)
    return scheduler


def joined(
    worker: str, kind: protocol.WorkerKind = "fast", slots: int = 2, rungs: tuple[int, ...] = (), **more: Any
) -> WorkerJoined:
    usual = {"at": 0.0, "device": None, "capacity": 8192, "max_length": None, "keeps_caches": True}
    return WorkerJoined(worker=worker, kind=kind, slots=slots, rungs=rungs, **(usual | more))


def samples(prompts: int, group: int, *, first: int = 0) -> tuple[NewSample, ...]:
    """Returns samples `p0/s0`, `p0/s1`, ... whose prompts have 10 tokens."""
    uids = ((p, i) for p in range(first, first + prompts) for i in range(group))
    return tuple(NewSample(f"p{p}/s{i}", f"p{p}", i, 10, 4096) for p, i in uids)


class Driven:
    """A scheduler and the last segment of each worker, so that a test can end it with any result."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.at = 0.0
        self.running: dict[str, RunSegment] = {}
        self.records: list[protocol.EventRecord] = []

    def tell(self, event: Any) -> list[Command]:
        commands = self.scheduler.handle(event)
        self.records.append(protocol.EventRecord(event, tuple(commands)))
        check_invariants(self.scheduler)
        self.running |= {one.worker: one for one in commands if isinstance(one, RunSegment)}
        return commands

    def join(self, worker: str, *sizes: Any, **more: Any) -> list[Command]:
        return self.tell(joined(worker, *sizes, at=self.at, **more))

    def lose(self, worker: str) -> list[Command]:
        return self.tell(protocol.WorkerLost(self.at, worker))

    def submit(self, new: tuple[NewSample, ...], *, close: bool = True) -> list[Command]:
        """Submits samples; the first segments start before `Closed`, so that samples count as waiting in them."""
        commands = self.tell(protocol.Submitted(self.at, new))
        return commands + (self.tell(protocol.Closed(self.at)) if close else [])

    def end(
        self, worker: str, tokens: dict[str, int], finished: Names = (), seconds: float = 1.0, *, acting: Names = ()
    ) -> list[Command]:
        self.at += seconds
        gained = [count - self.scheduler.samples[uid].num_tokens for uid, count in tokens.items()]
        rows = tuple(
            RowReport(uid, count, "stop" if uid in finished else None, "stop" if uid in acting else None)
            for uid, count in tokens.items()
        )
        return self.tell(protocol.SegmentEnded(self.at, worker, rows, seconds, max(gained)))

    def end_all(self, worker: str, num_tokens: int, *, finished: int = 0, **more: Any) -> list[Command]:
        """Ends the worker's segment with this number of tokens for each row; the first `finished` rows are done."""
        rows = self.rows(worker)
        return self.end(worker, dict.fromkeys(rows, num_tokens), rows[:finished], **more)

    def answer(self, uid: str, num_tokens: int, finish: str | None = None) -> list[Command]:
        return self.tell(protocol.Answered(self.at, (RowReport(uid, num_tokens, finish),)))

    def rows(self, worker: str) -> list[str]:
        return list(self.scheduler.context.workers[worker].rows)


def admitted(commands: Iterable[Command], worker: str | None = None) -> list[str]:
    runs = [one for one in commands if isinstance(one, RunSegment) and worker in (None, one.worker)]
    return [one.uid for run in runs for one in run.admit]


def roles(commands: Iterable[Command]) -> dict[str, str]:
    return {one.uid: one.role for run in commands if isinstance(run, RunSegment) for one in run.admit}


def suspended(commands: Iterable[Command]) -> list[tuple[str, str]]:
    return [(one.uid, one.why) for one in commands if isinstance(one, Suspend)]


# Storms ----------------------------------------------------------------------------------------------------------


class Traced(NamedTuple):
    """A sample whose length is known, in completion tokens including observations."""

    sample: NewSample
    length: int
    turns: tuple[tuple[int, int, str | None], ...] = ()
    """End of each turn, tokens that its answer adds, and the finish reason if the sample ends with it."""


class Storm(Driven):
    """Sends events in random order, with random faults, for samples with known lengths."""

    def __init__(self, scheduler: Scheduler, trace: Sequence[Traced], workers: Sequence[WorkerJoined], seed: int):
        super().__init__(scheduler)
        self.trace = {one.sample.uid: one for one in trace}
        self.rng = random.Random(seed)
        is_calm = self.rng.random() < 0.3
        self.death, self.non_finite = (0.0 if is_calm else self.rng.choice([0.0, 0.02, 0.1]) for _ in range(2))
        self.releases = self.rng.random() < 0.3
        self.num_faults, self.counts = 0, Counter[str]()
        self.workers: dict[str, WorkerJoined] = {}
        self.started: dict[str, float] = {}
        """When the running segment of a worker has started."""
        self.turns: dict[str, list[int]] = {uid: [] for uid in self.trace}
        """Ends of the turns that environments got."""
        self.kept: dict[str, str] = {}
        """Worker that keeps the cache of a suspended or acting row."""
        new, most = [one.sample for one in trace], len(trace)
        cuts = [0, *sorted(self.rng.choices(range(most + 1), k=self.rng.choice([0, 0, 2]))), most]
        parts = [protocol.Submitted(0.0, tuple(new[a:b])) for a, b in itertools.pairwise(cuts)]
        self.script: list[Any] = [*workers, *parts, protocol.Closed(0.0)]

    def keeps_caches(self, worker: str) -> bool:
        return self.workers[worker].keeps_caches

    def tell(self, event: Any) -> list[Command]:
        if isinstance(event, WorkerJoined):
            self.workers[event.worker] = event
        commands = super().tell(event)
        for command in commands:
            if isinstance(command, Suspend) and command.why != "truncated" and self.keeps_caches(command.worker):
                self.kept[command.uid] = command.worker
            if not isinstance(command, RunSegment):
                continue
            self.started[command.worker] = self.at
            for one in command.admit:
                keeper = self.kept.pop(one.uid, None)
                assert one.how == "recompute" or keeper in self.workers, f"{one.uid}: {one.how} of a lost cache"
                assert one.how != "resume" or keeper == command.worker
                self.counts[one.how] += 1
        return commands

    def run(self) -> None:
        while moves := list(self.moves()):
            self.at += 0.1 * self.rng.random()
            self.rng.choice(moves)()

    def moves(self) -> Iterable[Callable[[], object]]:
        yield from (partial(self.end_segment, name) for name in self.started)
        if self.script:
            yield lambda: self.tell(self.script.pop(0))
        for entry in self.scheduler.samples:
            if entry.state is SampleState.ACTING:
                yield partial(self.answer_turn, entry)
            if entry.finish and self.releases and entry.number % 2:
                yield partial(self.tell, protocol.Released(self.at, (entry.uid,)))

    def occurs(self, chance: float) -> bool:
        occurs = self.num_faults < 40 and self.rng.random() < chance
        self.num_faults += occurs
        return occurs

    def answer_turn(self, entry: SampleEntry) -> None:
        [turn] = [turn for turn in self.trace[entry.uid].turns if turn[0] == entry.num_tokens]
        self.answer(entry.uid, turn[0] + turn[1], turn[2])

    def num_left(self, uid: str) -> tuple[int, bool]:
        """Returns the number of tokens to the end of the row's turn, and whether an environment answers it."""
        traced, now = self.trace[uid], self.scheduler.samples[uid].num_tokens
        turn = next((end for end, *_ in traced.turns if end > now), None)
        return (traced.length if turn is None else turn) - now, turn is not None

    def num_steps(self, name: str) -> int:
        """Returns the decode steps until the worker's segment ends."""
        length, finished, active = self.running[name].limits
        left = sorted(self.num_left(uid)[0] for uid in self.rows(name))
        steps = [length, left[-1]]
        if 0 < finished <= len(left):
            steps.append(left[finished - 1])
        if 0 < active < len(left):
            steps.append(left[-active - 1])
        return min(steps)

    def end_segment(self, name: str) -> None:
        """Ends a segment, or loses the worker and adds a replacement."""
        seconds, steps, reports = self.at - self.started.pop(name), self.num_steps(name), []
        if self.occurs(self.death):
            self.lose(name)
            self.script.append(replace(self.workers.pop(name), at=self.at, worker=f"{name}#"))
            return
        for uid in self.rows(name):
            entry, (left, is_answered) = self.scheduler.samples[uid], self.num_left(uid)
            num_tokens, ends = entry.num_tokens + min(steps, left), left <= steps
            finish = "length" if num_tokens == entry.sample.max_new else "stop"
            if self.occurs(self.non_finite):
                finish, ends, is_answered = "dropped:non-finite logits", True, False
            longest = self.workers[name].max_length
            assert longest is None or entry.sample.prompt_length + num_tokens <= longest, "a row beyond its slot"
            if acts := ends and is_answered:
                self.turns[uid].append(num_tokens)
                self.kept[uid] = name
            reports.append(RowReport(uid, num_tokens, finish if ends and not acts else None, "stop" if acts else None))
        self.tell(protocol.SegmentEnded(self.at, name, tuple(reports), seconds, steps))


def storm(seed: int, *, has_turns: bool = False) -> Storm:
    """Returns a small trace with random rules, workers and faults."""
    rng = random.Random(seed)
    trace = random_trace(rng, seed)
    if has_turns:
        trace = [with_random_turns(rng, one) for one in trace]
    # Limits range from below every sample (all are heavy) to above every sample (all are fast).
    rules: dict[str, list[Any]] = {
        "probe_limit_tokens": [1, 30, 1000],
        "fast_limit_tokens": [1, 40, 1000],
        "fast_limit_s": [0.01, 1.0, 100.0],
        "unit": ["tokens", "seconds"],
        "on_fast_limit": ["suspend", "truncate"],
        "heavy_percent": [0.1, 10.0, 99.0],
        "percentile": [1.0, 80.0, 99.0],
        "window": [32, 128],
        "window_min": [1, 4, 32],
        "max_moves": [1, 2, 5],
        "probe_advance": [0, 256],
    }
    least = rng.choice([1, 7, 64])
    scheduler = make_scheduler(
        rng.choice(list(POLICIES)),
        pdsr={name: rng.choice(values) for name, values in rules.items()},
        segment={"min": least, "max": least * rng.choice([1, 10])},
        history={f"p{i}": rng.randint(1, 200) for i in range(rng.choice([0, 3]))},
        finished=[rng.randint(1, 200) for _ in range(rng.choice([0, 0, 40]))],
        has_turns=has_turns and rng.random() < 0.5,
        max_suspended=rng.choice([None, 0, 1, 3]) if has_turns else None,
    )
    return Storm(scheduler, trace, random_workers(rng), seed)


def random_trace(rng: random.Random, seed: int) -> list[Traced]:
    """Returns samples of prompts that are all long or short, or have correlated log-normal lengths, in any order."""
    numbers, mean, prompts = np.random.default_rng(seed), rng.choice([5, 40, 150]), rng.randint(1, 8)
    logs = numbers.standard_normal((prompts, 1)) + numbers.standard_normal((prompts, rng.randint(1, 5)))
    lengths, kind = mean * np.exp(rng.choice([0.0, 0.3, 1.0]) * logs), rng.randrange(3)
    if kind == 0:
        lengths = np.where(logs[:, :1] < 0, 2, 200) * np.ones_like(logs)
    whole = np.ndenumerate(np.clip(np.rint(lengths), 1, 200).astype(int))
    trace = [Traced(NewSample(f"p{p}/s{i}", f"p{p}", i, 128, 200), int(length)) for (p, i), length in whole]
    return sorted(trace, key=lambda one: one.length) if kind == 1 else trace


def with_random_turns(rng: random.Random, one: Traced) -> Traced:
    """Returns a sample with turns at random places, of which the last may end it."""
    most, longest, turns = rng.choice([0, 1, 4, 20]), rng.choice([0, 5, 60]), []
    ends = sorted(rng.sample(range(1, one.length + 1), min(rng.randint(0, most), one.length)))
    for end, following in itertools.pairwise([*ends, one.length]):
        room = following - end - 1
        ends_sample = room < 0 or rng.random() < 0.05
        observation = rng.randint(0, min(room, longest)) if room > 0 else 0
        finish = rng.choice(["stop", "length", "dropped:timeout"]) if ends_sample else None
        turns.append((end, observation, finish))
        if ends_sample:
            return one._replace(turns=tuple(turns), length=end + observation)
    return one._replace(turns=tuple(turns))


def random_workers(rng: random.Random) -> list[WorkerJoined]:
    """Returns one or more random workers; some share a device, and next to heavy ones some take only short rows."""
    num_fast, num_heavy = rng.choice([(1, 0), (0, 1), (1, 1), (2, 1), (1, 2), (3, 0)])
    limit = rng.choice([None, 130, 150, 250]) if num_heavy else None
    workers = []
    for number in range(num_fast + num_heavy):
        is_fast, slots = number < num_fast, rng.choice([1, 2, 5, 8])
        rungs = tuple(rung for rung in (2, 4) if rung < slots)
        sizes = {"device": rng.choice([None, "shared"]), "capacity": rng.choice([1, 100, 8192])}
        sizes |= {"max_length": limit if is_fast else None, "keeps_caches": rng.random() < 0.8}
        workers.append(joined(f"w{number}", "fast" if is_fast else "heavy", slots, rungs, **sizes))
    return workers
