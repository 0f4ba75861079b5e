"""Random rollouts with random faults, each from one seed."""

from __future__ import annotations

import itertools
import random

import numpy as np

from app.rollout.scheduling.length_estimator import FinishedLength, LearnedLengths
from app.rollout.scheduling.scheduler import POLICIES, Scheduler
from settings.schema.rollout import PdsrSettings, SegmentSettings
from tests.rollout.scheduling import length_traces
from tests.rollout.scheduling.driving import with_constants
from tests.rollout.scheduling.length_traces import Trace, TraceSample, TraceTurn
from tests.rollout.scheduling.simulator import Costs, Faults, SchedulerSimulator, SimulatedWorkerSpec

MAX_NEW = 200
SECOND_COSTS = Costs(step_s=0.01, segment_s=0.02, move_s=0.01)


def storm(seed: int, *, has_turns: bool = False) -> SchedulerSimulator:
    """Simulates a small trace with random workers, rules and faults, and checks every invariant after every event."""
    rng, turns_rng = random.Random(seed), random.Random(f"turns of {seed}")
    policy = rng.choice(list(POLICIES))
    trace = random_trace(rng, seed)
    max_suspended = turns_rng.choice([None, 0, 1, 3]) if has_turns else None
    if has_turns:
        trace = random_turns(turns_rng, trace)
    scheduler = Scheduler(
        policy,
        pdsr=random_rules(rng),
        segment=random_segment(rng),
        learned=random_knowledge(rng),
        has_turns=has_turns and turns_rng.random() < 0.5,
        max_suspended=max_suspended,
    )
    with_constants(scheduler, **random_constants(rng))
    faults = Faults() if rng.random() < 0.2 else random_faults(rng, seed)
    workers, num_waves = random_workers(rng), rng.choice([1, 1, 3])
    releases = rng.random() < 0.3
    return SchedulerSimulator(
        scheduler,
        trace,
        workers,
        SECOND_COSTS,
        max_new=MAX_NEW,
        faults=faults,
        check=True,
        num_submissions=num_waves,
        releases=releases,
    )


def random_faults(rng: random.Random, seed: int) -> Faults:
    death, non_finite = (rng.choice([0.0, 0.02, 0.2]) for _ in range(2))
    return Faults(seed, death, non_finite)


def random_trace(rng: random.Random, seed: int) -> Trace:
    prompts, group = rng.randint(1, 8), rng.randint(1, 5)
    numpy_rng = np.random.default_rng(seed)
    shape = {"prompts": prompts, "group": group}
    log_normal = {
        "mean": rng.choice([5, 40, 150]),
        "sigma": rng.choice([0.3, 1.0, 2.0]),
        "correlation": rng.random(),
        "max_new": MAX_NEW,
    }
    kind = rng.randrange(7)
    if kind == 0:
        return length_traces.equal(**shape, length=rng.choice([1, 20, MAX_NEW]))
    if kind == 1:
        return length_traces.one_giant(**shape, length=rng.randint(1, 10), giant=MAX_NEW)
    if kind == 2:
        return length_traces.bimodal(numpy_rng, **shape, short=2, long=MAX_NEW, share=rng.random())
    if kind == 3:
        return length_traces.drift(numpy_rng, **shape, **log_normal)
    trace = length_traces.log_normal(numpy_rng, **shape, **log_normal)
    return length_traces.ascending(trace) if kind == 4 else trace


def random_turns(rng: random.Random, trace: Trace) -> Trace:
    """Returns the samples with turns at random places, of which the last may end the sample."""
    most, latency_s, longest = rng.choice([0, 1, 4, 20]), rng.choice([0.0, 0.1, 3.0]), rng.choice([0, 5, 60])

    def with_random_turns(one: TraceSample) -> TraceSample:
        ends = sorted(rng.sample(range(1, one.length + 1), min(rng.randint(0, most), one.length)))
        turns = []
        for end, following in itertools.pairwise([*ends, one.length]):
            room = following - end - 1
            ends_sample = room < 0 or rng.random() < 0.05
            finish = rng.choice(["stop", "length", "dropped:timeout"]) if ends_sample else None
            observation = rng.randint(0, min(room, longest)) if room > 0 else 0
            turns.append(TraceTurn(end, observation, latency_s * rng.random(), finish))
            if finish is not None:
                return one._replace(turns=tuple(turns), length=end + observation)
        return one._replace(turns=tuple(turns))

    return [with_random_turns(one) for one in trace]


def random_knowledge(rng: random.Random) -> LearnedLengths:
    prompts = {f"p{i}": rng.randint(1, MAX_NEW) for i in range(rng.choice([0, 3]))}
    num_finished = rng.choice([0, 0, 40])
    return LearnedLengths(
        prompts, tuple(FinishedLength(rng.randint(1, MAX_NEW), rng.random()) for _ in range(num_finished))
    )


def random_rules(rng: random.Random) -> PdsrSettings:
    """Returns random limits, from below every sample (all are heavy) to above every sample (all are fast)."""
    return PdsrSettings(
        unit=rng.choice(["tokens", "seconds"]),
        heavy_percent=rng.choice([0.1, 10.0, 99.0]),
        probe_limit_tokens=rng.choice([1, 30, 1000]),
        fast_limit_tokens=rng.choice([1, 40, 1000]),
        fast_limit_s=rng.choice([0.01, 1.0, 100.0]),
        on_fast_limit=rng.choice(["suspend", "truncate"]),
        percentile=rng.choice([1.0, 80.0, 99.0]),
        window=rng.choice([32, 128]),
    )


def random_constants(rng: random.Random) -> dict[str, float]:
    return {
        "window_min": rng.choice([1, 4, 32]),
        "probe_advance": rng.choice([0, 256]),
        "tripped_share": rng.choice([0.12, 1.0]),
        "max_moves": rng.choice([1, 2, 5]),
    }


def random_segment(rng: random.Random) -> SegmentSettings:
    least = rng.choice([1, 7, 64])
    return SegmentSettings(min=least, max=least * rng.choice([1, 10]))


def random_workers(rng: random.Random) -> list[SimulatedWorkerSpec]:
    """Returns random workers, at least one, some of them on one device."""
    counts = rng.choice([(1, 0), (0, 1), (1, 1), (2, 1), (1, 2), (3, 0)])
    specs, limits = [], {"fast": rng.choice([None, 130, 150, 250]) if counts[1] else None, "heavy": None}
    for kind, count in zip(("fast", "heavy"), counts, strict=True):
        for i in range(count):
            slots = rng.choice([1, 2, 5, 8])
            rungs = tuple(rung for rung in (2, 4) if rung < slots)
            device, capacity = rng.choice([None, "shared"]), rng.choice([1, 100, 8192])
            kept = {"max_length": limits[kind], "keeps_caches": rng.random() < 0.8}
            specs.append(SimulatedWorkerSpec(f"{kind}-{i}", kind, slots, rungs, device, capacity=capacity, **kept))
    return specs
