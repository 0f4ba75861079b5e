"""`grpo rollout --simulate`: every scheduling policy on one trace of lengths, under one model of costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app.records.atomic_write import write_atomic
from app.records.jsonl import check_distinct_paths, check_output_path
from app.report.timeline import Activity, TimelineBar, TimelinePanel, check_timeline_path, write_timeline
from app.rollout.scheduling.cost_model import CostModel, lower_bound_s
from app.rollout.scheduling.event_log import EventRecord, RolloutState, is_event_log, read_event_log
from app.rollout.scheduling.events import SampleRole, Submitted, WorkerKind
from app.rollout.scheduling.length_traces import Trace, read_trace, to_sample_lengths, trace_from_records
from app.rollout.scheduling.metrics import (
    ScheduleMetrics,
    base_worker_name,
    schedule_metrics,
    slot_spans,
    slots_per_worker,
)
from app.rollout.scheduling.scheduler import POLICIES, Scheduler
from app.rollout.scheduling.simulated_slots import ProgramSizes
from app.rollout.scheduling.simulator import SchedulerSimulator, SimulatedWorkerSpec
from app.rollout.shape_buckets import slot_shapes_from_settings
from settings import Resolved
from settings.errors import InputError
from settings.schema.rollout import PdsrSettings, RolloutSettings, SegmentSettings, WorkerPoolSettings

ORACLE = "oracle"
"""`adaptive` that is told every length."""


@dataclass(frozen=True)
class SimulatedPolicy:
    """One policy on the trace."""

    policy: str
    over_lower_bound: float
    faster_than_sync: float
    figures: ScheduleMetrics


@dataclass(frozen=True)
class RecordedRollout:
    """A real rollout, by its event log."""

    policy: str
    slots: dict[str, int]
    """Of each worker."""
    num_events: int
    """That the scheduler, asked again, answered as it did then."""
    figures: ScheduleMetrics
    """By the real clock."""

    @classmethod
    def from_log(cls, begun: RolloutState) -> RecordedRollout:
        records = begun.records
        return cls(begun.scheduler.policy.name, slots_per_worker(records), len(records), schedule_metrics(records))

    def to_text(self) -> str:
        slots = ", ".join(f"{name} {slots}" for name, slots in self.slots.items())
        return (
            f"recorded: {self.policy} took {self.figures.makespan_s:.4g} s (slots: {slots}; bubble "
            f"{self.figures.bubble:.0%}, tail {self.figures.tail_fraction:.0%});\nreplayed, its {self.num_events} "
            "events are answered as they were"
        )


@dataclass(frozen=True)
class Simulation:
    samples: int
    prompts: int
    tokens: int
    longest: int
    workers: dict[str, int]
    """Slots of each."""
    cost: CostModel
    lower_bound_s: float
    policies: tuple[SimulatedPolicy, ...]
    recorded: RecordedRollout | None = None
    """What the lengths come from, where that is an event log."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"cost": self.cost.to_json()}

    def to_text(self) -> str:
        rows = [_HEADINGS, *map(_policy_cells, self.policies)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        slots = ", ".join(f"{name} {slots}" for name, slots in self.workers.items())
        head = (
            f"{self.samples} samples of {self.prompts} prompts, {self.tokens:,} tokens, the longest {self.longest:,}\n"
            f"slots: {slots}; lower bound {self.lower_bound_s:.3g} s"
        )
        told = [] if self.recorded is None else [self.recorded.to_text(), ""]
        return "\n".join([head, "", *told, *table, "", f"{ORACLE} is adaptive that knows every length"])


ROLE_ACTIVITIES: dict[SampleRole | None, Activity] = {
    **{"probe": "probe", "fast": "fast", "heavy": "heavy"},
    **{"any": "fast", None: "suspended"},
}
"""How spans are drawn."""

_METRIC_HEADINGS = (
    "bubble",
    "tail",
    "recall",
    "trips",
    "stolen",
    "suspended",
    "truncated",
    "wasted tokens",
    "segments",
)
_HEADINGS = ("policy", "makespan s", "/ bound", "x sync", *_METRIC_HEADINGS)


def _policy_cells(result: SimulatedPolicy) -> tuple[str, ...]:
    over, faster = f"{result.over_lower_bound:.2f}", f"{result.faster_than_sync:.2f}"
    return result.policy, f"{result.figures.makespan_s:.4g}", over, faster, *_metric_cells(result.figures)


def recorded_table(policy: str, metrics: ScheduleMetrics) -> list[tuple[str, ...]]:
    """The figures of one rollout that was not simulated, under their headings."""
    row = (policy, f"{metrics.makespan_s:.4g}", *_metric_cells(metrics))
    return [("policy", "makespan s", *_METRIC_HEADINGS), row]


def _metric_cells(metrics: ScheduleMetrics) -> tuple[str, ...]:
    return (
        f"{metrics.bubble:.0%}",
        f"{metrics.tail_fraction:.0%}",
        "" if metrics.probe_recall is None else f"{metrics.probe_recall:.2f}",
        *map(str, (metrics.breaker_trips, metrics.stolen, metrics.suspensions, metrics.truncated)),
        f"{metrics.wasted_tokens:,}",
        str(metrics.segments),
    )


def simulate(
    resolved: Resolved, *, trace: Path, cost: Path | None, out: Path | None, timeline: Path | None
) -> Simulation:
    """Compares all policies; writes the comparison to `out` and its picture to `timeline`.

    Raises:
        InputError: a trace, a cost file or an output that cannot be used.
    """
    check_distinct_paths({"--simulate": trace, "--cost": cost, "--out": out, "--timeline": timeline})
    if out is not None:
        check_output_path(out)
    if timeline is not None:
        check_timeline_path(timeline)
    log = read_event_log(trace) if is_event_log(trace) else None
    samples = read_trace(trace) if log is None else trace_from_records(log.records, where=str(trace))
    settings = resolved.settings
    max_new = max(settings.rollout.max_new_tokens, max(one.length for one in samples))
    longest_prompt = max(settings.data.max_prompt_length, max(one.prompt_length for one in samples))
    rollout = settings.rollout.model_copy(update={"max_new_tokens": max_new})
    on_one_device = settings.mesh.cpu_devices == 1
    workers = worker_specs(rollout, max_prompt_length=longest_prompt, on_one_device=on_one_device)
    model = CostModel() if cost is None else read_cost_model(cost)
    simulation, panels = compare_policies(
        samples, workers, model, pdsr=rollout.pdsr, segment=rollout.segment, max_new=max_new
    )
    if log is not None:
        simulation = replace(simulation, recorded=RecordedRollout.from_log(log))
    if out is not None:
        write_atomic(out, json.dumps(simulation.to_dict(), indent=2).encode() + b"\n")
    if timeline is not None:
        title = f"{trace.name}, simulated: {simulation.samples} samples, {sum(simulation.workers.values())} slots"
        write_timeline(timeline, panels, title=title, table=[_HEADINGS, *map(_policy_cells, simulation.policies)])
    return simulation


def read_cost_model(path: Path) -> CostModel:
    """Raises InputError for a file that holds no costs."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--cost: {path.absolute()}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"--cost: {path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"--cost: {path}: expected a JSON object, got {type(values).__name__}")
    return CostModel.from_json(values, where=f"--cost: {path}")


def worker_specs(
    rollout: RolloutSettings, *, max_prompt_length: int, on_one_device: bool = False
) -> list[SimulatedWorkerSpec]:
    """The workers of the settings with the programs that real ones have, in turn on one device or each on its own."""
    pools: list[tuple[WorkerKind, WorkerPoolSettings]] = [
        ("fast", rollout.workers.fast),
        ("heavy", rollout.workers.heavy),
    ]
    device = "0" if on_one_device else None
    specs = []
    for kind, pool in pools:
        name = f"rollout.workers.{kind}.slots"
        shapes = slot_shapes_from_settings(rollout, pool.slots, max_prompt_length=max_prompt_length, setting=name)
        ladders = ProgramSizes(shapes.batch_buckets, shapes.cache_buckets, shapes.prompt_buckets, shapes.prefill_rows)
        rungs = shapes.batch_buckets[:-1]
        specs += [
            SimulatedWorkerSpec(f"{kind}-{i}", kind, pool.slots, rungs, device, ladders) for i in range(pool.count)
        ]
    return specs


def compare_policies(
    trace: Trace,
    workers: Sequence[SimulatedWorkerSpec],
    cost: CostModel,
    *,
    pdsr: PdsrSettings,
    segment: SegmentSettings,
    max_new: int,
) -> tuple[Simulation, list[TimelinePanel]]:
    """All policies and the oracle on the trace, as figures and as panels of a picture."""
    bound = lower_bound_s(to_sample_lengths(trace), [spec.slots for spec in workers], cost)
    runs = {name: _simulate_policy(name, trace, workers, cost, pdsr, segment, max_new) for name in (*POLICIES, ORACLE)}
    found = {name: schedule_metrics(records) for name, records in runs.items()}
    sync_s = found["sync"].makespan_s
    policies = tuple(
        SimulatedPolicy(name, one.makespan_s / bound, sync_s / one.makespan_s, one) for name, one in found.items()
    )
    simulation = Simulation(
        samples=len(trace),
        prompts=len({one.prompt for one in trace}),
        tokens=sum(one.length for one in trace),
        longest=max(one.length for one in trace),
        workers={spec.name: spec.slots for spec in workers},
        cost=cost,
        lower_bound_s=bound,
        policies=policies,
    )
    return simulation, [timeline_panel(one.policy, runs[one.policy], one.figures, bound) for one in policies]


def _simulate_policy(
    policy: str,
    trace: Trace,
    workers: Sequence[SimulatedWorkerSpec],
    cost: CostModel,
    pdsr: PdsrSettings,
    segment: SegmentSettings,
    max_new: int,
) -> list[EventRecord]:
    known = {one.uid: one.length for one in trace} if policy == ORACLE else None
    scheduler = Scheduler("adaptive" if known else policy, pdsr=pdsr, segment=segment, known_lengths=known)
    return SchedulerSimulator(scheduler, trace, workers, cost, max_new=max_new).run()


def timeline_panel(
    name: str, records: Sequence[EventRecord], metrics: ScheduleMetrics, lower_bound: float | None
) -> TimelinePanel:
    """The log of a rollout from its first submission on, drawn; a worker that came back goes on in its old lane."""
    zero = next((event.at for event, _ in records if isinstance(event, Submitted)), 0.0)
    bars = tuple(
        TimelineBar(
            base_worker_name(one.worker),
            one.slot,
            one.start_s - zero,
            one.end_s - zero,
            ROLE_ACTIVITIES[one.role],
            one.uid,
        )
        for one in slot_spans(records)
    )
    over = "" if lower_bound is None else f", {metrics.makespan_s / lower_bound:.2f} x the bound"
    title = f"{name}: {metrics.makespan_s:.3g} s{over}, bubble {metrics.bubble:.0%}, tail {metrics.tail_fraction:.0%}"
    return TimelinePanel(title, tuple(slots_per_worker(records).items()), bars, metrics.makespan_s, lower_bound)
