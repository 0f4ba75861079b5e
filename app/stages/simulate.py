"""`grpo rollout --simulate`: every scheduling policy on one trace of lengths, under one model of costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app.records.atomic_write import write_whole
from app.records.jsonl import check_distinct, check_output
from app.report.timeline import Activity, Bar, TimelinePanel, check_timeline, write_timeline
from app.rollout.scheduling.cost_model import CostModel, lower_bound_s
from app.rollout.scheduling.event_log import Begun, LogRecord, is_log, read_log
from app.rollout.scheduling.events import Kind, Role, Submitted
from app.rollout.scheduling.length_traces import Trace, read_trace, trace_of, work
from app.rollout.scheduling.metrics import Figures, figures, lane, lanes, spans
from app.rollout.scheduling.scheduler import POLICIES, Scheduler
from app.rollout.scheduling.simulated_slots import Ladders
from app.rollout.scheduling.simulator import VirtualClock, WorkerSpec
from app.rollout.shape_buckets import shapes_of
from settings import Resolved
from settings.errors import InputError
from settings.schema.rollout import Pdsr, Rollout, Segment, WorkerPool

ORACLE = "oracle"
"""`adaptive` that is told every length."""


@dataclass(frozen=True)
class Simulated:
    """One policy on the trace."""

    policy: str
    over_lower_bound: float
    faster_than_sync: float
    figures: Figures


@dataclass(frozen=True)
class Recorded:
    """A real rollout, by its event log."""

    policy: str
    slots: dict[str, int]
    """Of each worker."""
    num_events: int
    """That the scheduler, asked again, answered as it did then."""
    figures: Figures
    """By the real clock."""

    @classmethod
    def of(cls, begun: Begun) -> Recorded:
        records = begun.records
        return cls(begun.scheduler.policy.name, lanes(records), len(records), figures(records))

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
    policies: tuple[Simulated, ...]
    recorded: Recorded | None = None
    """What the lengths come from, where that is an event log."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"cost": self.cost.to_json()}

    def to_text(self) -> str:
        rows = [_HEADINGS, *map(_cells, self.policies)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        slots = ", ".join(f"{name} {slots}" for name, slots in self.workers.items())
        head = (
            f"{self.samples} samples of {self.prompts} prompts, {self.tokens:,} tokens, the longest {self.longest:,}\n"
            f"slots: {slots}; lower bound {self.lower_bound_s:.3g} s"
        )
        told = [] if self.recorded is None else [self.recorded.to_text(), ""]
        return "\n".join([head, "", *told, *table, "", f"{ORACLE} is adaptive that knows every length"])


ACTIVITIES: dict[Role | None, Activity] = {
    **{"probe": "probe", "fast": "fast", "heavy": "heavy"},
    **{"any": "fast", None: "suspended"},
}
"""How spans are drawn."""

_FIGURES = ("bubble", "tail", "recall", "trips", "stolen", "suspended", "truncated", "wasted tokens", "segments")
_HEADINGS = ("policy", "makespan s", "/ bound", "x sync", *_FIGURES)


def _cells(one: Simulated) -> tuple[str, ...]:
    over, faster = f"{one.over_lower_bound:.2f}", f"{one.faster_than_sync:.2f}"
    return one.policy, f"{one.figures.makespan_s:.4g}", over, faster, *_figure_cells(one.figures)


def recorded_table(policy: str, found: Figures) -> list[tuple[str, ...]]:
    """The figures of one rollout that was not simulated, under their headings."""
    row = (policy, f"{found.makespan_s:.4g}", *_figure_cells(found))
    return [("policy", "makespan s", *_FIGURES), row]


def _figure_cells(found: Figures) -> tuple[str, ...]:
    return (
        f"{found.bubble:.0%}",
        f"{found.tail_fraction:.0%}",
        "" if found.probe_recall is None else f"{found.probe_recall:.2f}",
        *map(str, (found.breaker_trips, found.stolen, found.suspensions, found.truncated)),
        f"{found.wasted_tokens:,}",
        str(found.segments),
    )


def simulate(
    resolved: Resolved, *, trace: Path, cost: Path | None, out: Path | None, timeline: Path | None
) -> Simulation:
    """Compares all policies; writes the comparison to `out` and its picture to `timeline`.

    Raises:
        InputError: a trace, a cost file or an output that cannot be used.
    """
    check_distinct({"--simulate": trace, "--cost": cost, "--out": out, "--timeline": timeline})
    if out is not None:
        check_output(out)
    if timeline is not None:
        check_timeline(timeline)
    log = read_log(trace) if is_log(trace) else None
    samples = read_trace(trace) if log is None else trace_of(log.records, where=str(trace))
    settings = resolved.settings
    max_new = max(settings.rollout.max_new_tokens, max(one.length for one in samples))
    longest_prompt = max(settings.data.max_prompt_length, max(one.prompt_length for one in samples))
    rollout = settings.rollout.model_copy(update={"max_new_tokens": max_new})
    on_one_device = settings.mesh.cpu_devices == 1
    workers = worker_specs(rollout, max_prompt_length=longest_prompt, on_one_device=on_one_device)
    model = CostModel() if cost is None else read_cost(cost)
    simulation, panels = compare(samples, workers, model, pdsr=rollout.pdsr, segment=rollout.segment, max_new=max_new)
    if log is not None:
        simulation = replace(simulation, recorded=Recorded.of(log))
    if out is not None:
        write_whole(out, json.dumps(simulation.to_dict(), indent=2).encode() + b"\n")
    if timeline is not None:
        title = f"{trace.name}, simulated: {simulation.samples} samples, {sum(simulation.workers.values())} slots"
        write_timeline(timeline, panels, title=title, table=[_HEADINGS, *map(_cells, simulation.policies)])
    return simulation


def read_cost(path: Path) -> CostModel:
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


def worker_specs(rollout: Rollout, *, max_prompt_length: int, on_one_device: bool = False) -> list[WorkerSpec]:
    """The workers of the settings with the programs that real ones have, in turn on one device or each on its own."""
    pools: list[tuple[Kind, WorkerPool]] = [("fast", rollout.workers.fast), ("heavy", rollout.workers.heavy)]
    device = "0" if on_one_device else None
    specs = []
    for kind, pool in pools:
        name = f"rollout.workers.{kind}.slots"
        shapes = shapes_of(rollout, pool.slots, max_prompt_length=max_prompt_length, name=name)
        ladders = Ladders(shapes.batch_rungs, shapes.cache_rungs, shapes.prompt_rungs, shapes.prefill_rows)
        rungs = shapes.batch_rungs[:-1]
        specs += [WorkerSpec(f"{kind}-{i}", kind, pool.slots, rungs, device, ladders) for i in range(pool.count)]
    return specs


def compare(
    trace: Trace, workers: Sequence[WorkerSpec], cost: CostModel, *, pdsr: Pdsr, segment: Segment, max_new: int
) -> tuple[Simulation, list[TimelinePanel]]:
    """All policies and the oracle on the trace, as figures and as panels of a picture."""
    bound = lower_bound_s(work(trace), [spec.slots for spec in workers], cost)
    runs = {name: _run(name, trace, workers, cost, pdsr, segment, max_new) for name in (*POLICIES, ORACLE)}
    found = {name: figures(records) for name, records in runs.items()}
    sync_s = found["sync"].makespan_s
    policies = tuple(
        Simulated(name, one.makespan_s / bound, sync_s / one.makespan_s, one) for name, one in found.items()
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
    return simulation, [panel(one.policy, runs[one.policy], one.figures, bound) for one in policies]


def _run(
    policy: str,
    trace: Trace,
    workers: Sequence[WorkerSpec],
    cost: CostModel,
    pdsr: Pdsr,
    segment: Segment,
    max_new: int,
) -> list[LogRecord]:
    known = {one.uid: one.length for one in trace} if policy == ORACLE else None
    scheduler = Scheduler("adaptive" if known else policy, pdsr=pdsr, segment=segment, known_lengths=known)
    return VirtualClock(scheduler, trace, workers, cost, max_new=max_new).run()


def panel(name: str, records: Sequence[LogRecord], found: Figures, bound: float | None) -> TimelinePanel:
    """The log of a rollout from its first submission on, drawn; a worker that came back goes on in its old lane."""
    zero = next((event.at for event, _ in records if isinstance(event, Submitted)), 0.0)
    bars = tuple(
        Bar(lane(one.worker), one.slot, one.start_s - zero, one.end_s - zero, ACTIVITIES[one.role], one.uid)
        for one in spans(records)
    )
    over = "" if bound is None else f", {found.makespan_s / bound:.2f} x the bound"
    title = f"{name}: {found.makespan_s:.3g} s{over}, bubble {found.bubble:.0%}, tail {found.tail_fraction:.0%}"
    return TimelinePanel(title, tuple(lanes(records).items()), bars, found.makespan_s, bound)
