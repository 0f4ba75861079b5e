"""`grpo rollout --simulate`: every scheduling policy on one trace of lengths, under one model of costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.jsonl import check_output
from app.report.timeline import Activity, Bar, TimelinePanel, timeline_picture
from app.rollout.scheduling.cost_model import CostModel, lower_bound_s
from app.rollout.scheduling.event_log import LogRecord
from app.rollout.scheduling.events import Kind, Role
from app.rollout.scheduling.figures import Figures, figures, spans
from app.rollout.scheduling.scheduler import POLICIES, Scheduler
from app.rollout.scheduling.traces import Trace, read_trace, work
from app.rollout.scheduling.virtual_clock import VirtualClock, WorkerSpec
from app.rollout.slot_shapes import slot_shapes
from app.whole_file import write_whole
from settings import Resolved
from settings.errors import InputError
from settings.rollout_section import Pdsr, Segment, WorkerPool

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        rows = [_HEADINGS, *map(_cells, self.policies)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        slots = ", ".join(f"{name} {slots}" for name, slots in self.workers.items())
        head = (
            f"{self.samples} samples of {self.prompts} prompts, {self.tokens:,} tokens, the longest {self.longest:,}\n"
            f"slots: {slots}; lower bound {self.lower_bound_s:.3g} s"
        )
        return "\n".join([head, "", *table, "", f"{ORACLE} is adaptive that knows every length"])


ACTIVITIES: dict[Role | None, Activity] = {
    **{"probe": "probe", "fast": "fast", "heavy": "heavy"},
    **{"any": "fast", None: "suspended"},
}
"""How spans are drawn."""

_HEADINGS = (
    *("policy", "makespan s", "/ bound", "x sync", "bubble", "tail", "recall", "trips", "stolen", "suspended"),
    *("truncated", "wasted tokens", "segments"),
)


def _cells(one: Simulated) -> tuple[str, ...]:
    found = one.figures
    return (
        one.policy,
        f"{found.makespan_s:.4g}",
        f"{one.over_lower_bound:.2f}",
        f"{one.faster_than_sync:.2f}",
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
    for path in (out, timeline):
        if path is not None:
            check_output(path)
    kind = timeline_kind(timeline)
    samples = read_trace(trace)
    rollout = resolved.settings.rollout
    max_new = max(rollout.max_new_tokens, max(one.length for one in samples))
    longest_prompt = max(resolved.settings.data.max_prompt_length, max(one.prompt_length for one in samples))
    workers = worker_specs(
        fast=rollout.workers.fast,
        heavy=rollout.workers.heavy,
        max_prompt_length=longest_prompt,
        max_new_tokens=max_new,
        exact=rollout.mode == "exact",
    )
    model = CostModel() if cost is None else read_cost(cost)
    simulation, panels = compare(samples, workers, model, pdsr=rollout.pdsr, segment=rollout.segment, max_new=max_new)
    if out is not None:
        write_whole(out, json.dumps(simulation.to_dict(), indent=2).encode() + b"\n")
    if timeline is not None:
        title = f"{trace.name}: {simulation.samples} samples, {sum(simulation.workers.values())} slots"
        write_whole(timeline, timeline_picture(panels, title=title, kind=kind))
    return simulation


def timeline_kind(path: Path | None) -> Any:
    """`png` or `svg`, by the name of the file."""
    suffix = ".png" if path is None else path.suffix.lower()
    if suffix not in (".png", ".svg"):
        raise InputError(f"--timeline: expected a name that ends in .png or .svg, got {path}")
    return suffix[1:]


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


def worker_specs(
    *, fast: WorkerPool, heavy: WorkerPool, max_prompt_length: int, max_new_tokens: int, exact: bool = False
) -> list[WorkerSpec]:
    """The workers of the settings, each with devices of its own, and the programs that real ones have."""
    pools: list[tuple[Kind, WorkerPool]] = [("fast", fast), ("heavy", heavy)]
    specs = []
    for kind, pool in pools:
        shapes = slot_shapes(
            pool.slots,
            max_prompt_length=max_prompt_length,
            max_new_tokens=max_new_tokens,
            prefill_length_min=1,
            num_pooled=1,
            segment_max=max_new_tokens,
            exact=exact,
        )
        sizes = pool.slots, shapes.batch_rungs[:-1], shapes.cache_rungs
        specs += [WorkerSpec(f"{kind}-{i}", kind, *sizes) for i in range(pool.count)]
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
    slots = tuple((spec.name, spec.slots) for spec in workers)
    return simulation, [panel(one.policy, runs[one.policy], one.figures, slots, bound) for one in policies]


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


def panel(
    name: str,
    records: Sequence[LogRecord],
    found: Figures,
    slots: tuple[tuple[str, int], ...],
    bound: float | None,
) -> TimelinePanel:
    """The log of a rollout, drawn; a worker that came back under another name goes on in its old lane.

    Args:
        slots: of each worker.
    """
    bars = tuple(
        Bar(one.worker.partition("#")[0], one.slot, one.start_s, one.end_s, ACTIVITIES[one.role], one.uid)
        for one in spans(records)
    )
    over = "" if bound is None else f", {found.makespan_s / bound:.2f} x the bound"
    title = f"{name}: {found.makespan_s:.3g} s{over}, bubble {found.bubble:.0%}, tail {found.tail_fraction:.0%}"
    return TimelinePanel(title, slots, bars, found.makespan_s, bound)
