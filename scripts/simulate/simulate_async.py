"""Steps per minute with `rollout.devices` against a synchronous run, for slices that are not there: estimates.

    python scripts/simulate/simulate_async.py [--steps 40] [--staleness 1] [--out FILE.json]

The scheduler generates on the virtual clock with the costs of `compile_costs.py`, one worker a chip. A step of training
takes as many passes of `algorithm.max_tokens_per_device` tokens as its tokens fill, and an optimizer step, of the
durations in `scripts/bench/results/compiled_presets.json`. New weights are gathered on the chips that train, and sent
from there to each worker. Rewards, evaluations and checkpoints take no time. The synchronous run generates and trains
on all chips in turn, with the same workers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from app.mesh.chips import TPU_CHIPS
from app.records.text_format import format_percent, format_table
from app.rollout.scheduling.metrics import ScheduleMetricsTracker
from app.rollout.scheduling.scheduler import Scheduler
from scripts.simulate.cost_model import CostModel
from scripts.simulate.length_traces import Trace, log_normal
from scripts.simulate.simulate_rollout import TPU_COSTS, worker_specs
from scripts.simulate.simulator import SchedulerSimulator, SimulatedWorkerSpec
from settings import load
from settings.schema.rollout import PdsrSettings, SegmentSettings

PRESETS = Path(__file__).parents[1] / "bench" / "results" / "compiled_presets.json"
RESULTS = Path(__file__).parent / "results" / "async_generation.json"
MACHINES = {
    "Qwen2.5-1.5B on v5e-16": ("gsm8k_qwen2_5_1_5b_v5e_8", "Qwen2.5-1.5B on v5e-8", 1.54e9),
    "Qwen2.5-3B on v6e-16": ("gsm8k_qwen2_5_3b_v6e_8", "Qwen2.5-3B on v6e-8", 3.09e9),
}
"""Preset with the durations of training, machine with the costs of generation, and number of weights."""
NUM_CHIPS, CHIPS_PER_HOST = 16, 4
SHARES = (0.25, 0.5, 0.75)
PROMPTS, GROUP, SLOTS = 64, 8, 64
"""Of a step over all hosts, and of each worker."""
PROMPT_LENGTH, MEAN, SIGMA, CORRELATION, MAX_NEW = 128, 400, 0.8, 0.5, 2048
WEIGHT_BYTES = 2
WARMUP_STEPS = 4


@dataclass(frozen=True)
class Training:
    """Durations of a step of training on some of the chips."""

    preset: str
    num_weights: float
    num_chips: int
    workers_per_trainer: float
    """Workers that receive their weights from one chip that trains; 0 if all chips do both."""

    def seconds(self, lengths: Trace) -> float:
        """Returns the duration of a step that learns from samples of these lengths, up to the new weights' arrival."""
        prompts = {one.prompt: one.prompt_length for one in lengths}
        tokens = sum(prompts.values()) + sum(one.length for one in lengths)
        passes = math.ceil(tokens / (self.num_chips * self._quota))
        return passes * self._program_s["gradients"] + self._program_s["optimizer"] + self.publish_s

    @cached_property
    def _quota(self) -> int:
        """Tokens of a pass on each chip."""
        quota = load(self.preset, [], {}).settings.algorithm.max_tokens_per_device
        assert quota is not None
        return quota

    @cached_property
    def _program_s(self) -> dict[str, float]:
        programs = json.loads(PRESETS.read_text(encoding="utf-8"))["presets"][self.preset]["programs"]
        return {name: programs[f"update/{name}"]["estimated_s"] for name in ("gradients", "optimizer")}

    @property
    def publish_s(self) -> float:
        chip = TPU_CHIPS["v6e" if "v6e" in self.preset else "v5e"]
        num_bytes = self.num_weights * WEIGHT_BYTES
        return num_bytes / chip.ring_bytes_per_s + self.workers_per_trainer * num_bytes / chip.link_bytes_per_s


@dataclass(frozen=True)
class Pace:
    """Of a run, after the first steps."""

    step_s: float
    training_bubble: float
    """Share of the time in which the chips that train wait for samples; in a synchronous run, generation included."""
    generation_bubble: float
    """Share of slot time in which no row decoded."""

    @property
    def steps_per_minute(self) -> float:
        return 60 / self.step_s


def rounds(seed: int = 0) -> Iterator[Trace]:
    """Yields the samples of each round, under uids of their own."""
    rng = np.random.default_rng(seed)
    number = 0
    while True:
        trace = log_normal(
            rng, prompts=PROMPTS, group=GROUP, mean=MEAN, sigma=SIGMA, correlation=CORRELATION, max_new=MAX_NEW
        )
        yield [one._replace(uid=f"{one.uid}@{number}", prompt=f"{one.prompt}@{number}") for one in trace]
        number += 1


def workers_of(num_chips: int) -> list[SimulatedWorkerSpec]:
    """Returns one worker a chip, a quarter of them heavy."""
    return worker_specs([SLOTS] * num_chips, max_prompt_length=PROMPT_LENGTH, max_new=MAX_NEW)


class Pipeline:
    """Training and generation at the same time, with the rules of `AsyncRolloutSource` and `RoundExecutor`."""

    def __init__(self, training: Training, num_workers: int, cost: CostModel, *, staleness: int):
        self._training, self._staleness = training, staleness
        self._rounds = rounds()
        self._scheduler = Scheduler("adaptive", pdsr=PdsrSettings(), segment=SegmentSettings())
        self._simulator = SchedulerSimulator(
            self._scheduler, [], workers_of(num_workers), cost, max_new=MAX_NEW, num_submissions=0
        )
        self._waiting: deque[Trace] = deque()
        self._in_flight: deque[Trace] = deque()
        self._num_pending = 0
        """Rounds that are requested and not yet taken."""

    def run(self, num_steps: int) -> Pace:
        now, starts, waits = 0.0, list[float](), list[float]()
        self._request(self._staleness + 1, now)
        while len(starts) < num_steps:
            began_wait = now
            now = max(now, self._finish_round())
            taken = self._in_flight.popleft()
            waits.append(now - began_wait)
            starts.append(now)
            self._num_pending -= 1
            self._request(self._staleness, now)
            now += self._training.seconds(taken)
            self._advance(until=now)
            self._request(self._staleness + 1, now)
        measured_s = starts[-1] - starts[WARMUP_STEPS]
        return Pace(
            step_s=measured_s / (num_steps - 1 - WARMUP_STEPS),
            training_bubble=sum(waits[WARMUP_STEPS + 1 :]) / measured_s,
            generation_bubble=self._bubble(),
        )

    def _bubble(self) -> float:
        tracker = ScheduleMetricsTracker()
        for record in self._simulator.records:
            tracker.add(record)
        return tracker.compute().bubble

    def _request(self, max_pending: int, now: float) -> None:
        while self._num_pending < max_pending:
            self._waiting.append(next(self._rounds))
            self._num_pending += 1
        self._submit(now)

    def _submit(self, now: float) -> None:
        """Submits the next rounds once no sample of an earlier one waits."""
        while self._waiting and self._scheduler.samples.num_waiting == 0:
            trace = self._waiting.popleft()
            self._in_flight.append(trace)
            self._simulator.submit(trace, at=now)
            while trace[0].uid not in self._scheduler.samples:
                self._simulator.advance()

    def _advance(self, *, until: float) -> None:
        while (at := self._simulator.next_at) <= until:
            self._simulator.advance()
            self._submit(at)

    def _finish_round(self) -> float:
        """Runs until the oldest round is complete, and returns the time; 0 if it was before."""
        at = 0.0
        while not all(self._scheduler.samples[one.uid].finish is not None for one in self._in_flight[0]):
            at = self._simulator.next_at
            self._simulator.advance()
            self._submit(at)
        return at


def synchronous(training: Training, cost: CostModel, num_steps: int) -> Pace:
    seconds, generating, busy = [], 0.0, 0.0
    for trace, _ in zip(rounds(), range(num_steps), strict=False):
        scheduler = Scheduler("adaptive", pdsr=PdsrSettings(), segment=SegmentSettings())
        simulator = SchedulerSimulator(scheduler, trace, workers_of(NUM_CHIPS), cost, max_new=MAX_NEW)
        tracker = ScheduleMetricsTracker()
        for record in simulator.run():
            tracker.add(record)
        found = tracker.compute()
        generating += found.makespan_s
        busy += found.makespan_s * (1 - found.bubble)
        seconds.append(found.makespan_s + training.seconds(trace))
    step_s = statistics.mean(seconds)
    return Pace(step_s, generating / num_steps / step_s, 1 - busy / num_steps / step_s)


def paces(machine: str, *, num_steps: int, staleness: int) -> dict[str, Pace]:
    """Returns the pace of a synchronous run, and of each share of the chips that generate."""
    preset, costs, num_weights = MACHINES[machine]
    cost = CostModel.from_json(json.loads(TPU_COSTS.read_text(encoding="utf-8"))[costs]["cost"])
    found = {"synchronous": synchronous(Training(preset, num_weights, NUM_CHIPS, 0), cost, num_steps)}
    for share in SHARES:
        generating = int(share * CHIPS_PER_HOST)
        training = CHIPS_PER_HOST - generating
        hosts = NUM_CHIPS // CHIPS_PER_HOST
        of_step = Training(preset, num_weights, hosts * training, generating / training)
        pipeline = Pipeline(of_step, hosts * generating, cost, staleness=staleness)
        found[f"rollout.devices: {share:g}"] = pipeline.run(num_steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help=f"of each run; the first {WARMUP_STEPS} do not count")
    parser.add_argument("--staleness", type=int, default=1, help="as `rollout.max_staleness`")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    record: dict[str, Any] = {"steps": options.steps, "max_staleness": options.staleness}
    for machine in MACHINES:
        found = paces(machine, num_steps=options.steps, staleness=options.staleness)
        base = found["synchronous"].step_s
        record[machine] = {name: vars(pace) | {"x_synchronous": base / pace.step_s} for name, pace in found.items()}
        rows = [
            [
                *(name, f"{pace.step_s:.2f} s", f"{pace.steps_per_minute:.1f}", f"{base / pace.step_s:.2f}"),
                *(format_percent(pace.training_bubble), format_percent(pace.generation_bubble)),
            ]
            for name, pace in found.items()
        ]
        head = (machine, "a step", "steps a minute", "x synchronous", "training waits", "slots empty")
        print(format_table(rows, header=head), end="\n\n", flush=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
