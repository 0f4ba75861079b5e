"""Measures the cost of decoding on this machine with the engine's programs, for `simulate_rollout.py --cost`.

    python scripts/simulate/calibrate_rollout.py --model builtin:tiny --out costs.json

    python scripts/simulate/simulate_rollout.py --trace samples.jsonl --cost costs.json

It times decode segments for several numbers of rows and cache lengths, prefills, and admitted and suspended rows.
Small scheduled rollouts with short segments add the cost between segments, including the scheduler. All constants are
fitted to these times (`cost_fit.py`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from app.records.sample import Prompt
from app.rollout.request import GenerationRequest
from app.rollout.scheduling.metrics import schedule_metrics
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.sequence import RolloutSequence
from app.rollout.slots.slot_engine import SegmentResult
from scripts.bench.forced_rollout import (
    POLICY_VERSION,
    RULES,
    ForcedRollout,
    WatchedEngine,
    open_rollout,
    positive,
    several,
)
from scripts.simulate.cost_fit import CALL, FREE, NAMES, Timed, explained, fit, step_counts
from scripts.simulate.cost_model import CostModel
from scripts.simulate.length_traces import trace_from_records
from scripts.simulate.simulator import SchedulerSimulator
from settings.schema.rollout import PdsrSettings, SegmentSettings

SEED = 99
"""A seed with which no sample ends before its limit."""
STEPS = (8, 40)
"""Number of steps of timed segments."""
EDGE_LENGTHS = (1, 3, 8)
"""Lengths of segments in the rollouts that measure the cost between segments."""
EDGE_TOKENS = 16
"""Tokens of each sample in these rollouts."""


def seconds_of(action: Callable[[], object]) -> float:
    """Returns the seconds until the devices have finished a call."""
    start = time.perf_counter()
    jax.block_until_ready(action())
    return time.perf_counter() - start


class Bench:
    """One engine, which can be put into any state."""

    def __init__(self, rollout: ForcedRollout, engine: WatchedEngine):
        self.rollout = rollout
        self.engine = engine
        self.shapes = engine.shapes
        self._number = 0

    def open(self) -> None:
        request = GenerationRequest(
            group_size=1, max_new_tokens=EDGE_TOKENS, rules=RULES, seed=SEED, policy_version=POLICY_VERSION
        )
        self.engine.open(self.rollout.weights, request, suspends=True)

    def prompt(self, length: int) -> Prompt:
        """Returns a prompt that was not used before."""
        self._number += 1
        ids = np.full(length, 1, np.int32)
        ids[:2] = 1 + self._number % 99, 1 + self._number // 99
        return Prompt(f"calibration-{self._number}", ids, "", None)

    def everything(self) -> Iterator[Timed]:
        """Runs each measurement once."""
        self.open()
        yield from self.prefills()
        yield from self.slots()
        self.engine.close()

    def prefills(self) -> Iterator[Timed]:
        engine = self.engine
        for num_rows in self.shapes.prefill_rows:
            for rung in self.shapes.prompt_buckets:
                prompts = [self.prompt(rung) for _ in range(num_rows)]
                taken = seconds_of(lambda prompts=prompts: (engine.prefill(prompts), engine._cache))
                counts = {"prefill_s": 1, "prefill_token_s": num_rows * rung}
                yield Timed(f"prefill {num_rows} x {rung}", counts, taken)

    def slots(self) -> Iterator[Timed]:
        """Times segments with short and long caches, and from all rows to the fewest."""
        engine, slots, full = self.engine, self.shapes.num_slots, self.shapes.max_row_length
        length = self.shapes.prompt_buckets[0]
        prompt = self.prompt(length)
        rows = [
            RolloutSequence(prompt, i, max_new_tokens=full - length, noise_step=POLICY_VERSION) for i in range(slots)
        ]
        seconds_of(lambda: (engine.prefill([prompt]), engine._cache))
        for part in (rows[:1], rows[1:]):
            taken = seconds_of(lambda part=part: (engine.admit(part), engine._cache))
            yield Timed(f"admit {len(part)}", {"admit_s": 1, "admit_row_s": len(part)}, taken)
        for part in (0, 1 / 3, 2 / 3):
            while rows[0].num_tokens < part * (full - length):
                self._decode(max(STEPS))
            yield from self.decoding()
        for count in (1, 2):
            taken = seconds_of(lambda count=count: (self._move(count), engine._cache))
            moved = count * (length + rows[0].num_tokens)
            yield Timed(f"move {count}", {"move_s": count, "move_token_s": moved}, taken)
        for size in reversed(self.shapes.batch_buckets[:-1]):
            engine.suspend(engine.active_rows[size:])
            yield from self.decoding()

    def _move(self, count: int) -> None:
        self.engine.admit(self.engine.suspend(self.engine.active_rows[:count]))

    def decoding(self) -> Iterator[Timed]:
        for most in STEPS:
            row = self.engine.active_rows[0]
            length = len(row.prompt.token_ids) + row.num_tokens
            start = time.perf_counter()
            ran = self._decode(most)
            taken = time.perf_counter() - start
            counts = step_counts(ran.steps, rows=ran.num_rows, cache_length=length + (ran.steps - 1) / 2)
            yield Timed(f"decode {ran.steps} steps, {ran.num_rows} rows of {length}", {**counts, CALL: 1}, taken)

    def _decode(self, most: int) -> SegmentResult:
        self.engine.start_segment(length=most)
        ran = self.engine.finish_segment()
        ran.collect()
        return ran


def edges(rollout: ForcedRollout) -> Iterator[Timed]:
    """Times rollouts on the first worker alone, whose costs the virtual clock counts."""
    prompts = rollout.prompts[:2]
    for length in EDGE_LENGTHS:
        rule = SegmentSettings(min=length, max=length)
        made = rollout.workers("adaptive", rule=rule, num_workers=1)
        made.generate(
            rollout.weights,
            prompts,
            GenerationRequest(
                group_size=rollout.slots[0],
                max_new_tokens=EDGE_TOKENS,
                rules=RULES,
                seed=SEED,
                policy_version=POLICY_VERSION,
            ),
        )
        trace, specs = trace_from_records(made.records), rollout.specs(1)

        def paid(cost: CostModel, trace=trace, specs=specs, rule=rule) -> float:
            scheduler = Scheduler("adaptive", pdsr=PdsrSettings(), segment=rule)
            return schedule_metrics(
                SchedulerSimulator(scheduler, trace, specs, cost, max_new=EDGE_TOKENS).run()
            ).makespan_s

        # With one worker no command depends on costs, so that the makespan is a sum of them.
        counts = {name: paid(replace(FREE, **{name: 1.0})) for name in NAMES}
        # A makespan is never quite 0.
        counts = {name: count for name, count in counts.items() if count > 0.5}
        yield Timed(f"rollout in segments of {length}", counts, schedule_metrics(made.records).makespan_s)


def calibrate(rollout: ForcedRollout, *, repeats: int, rehearsals: int = 1) -> tuple[CostModel, list[Timed]]:
    """Returns the fitted constants, and the medians to which they are fitted.

    Args:
        rehearsals: rounds before, which touch memory for the first time.
    """
    bench = Bench(rollout, rollout.engines[0])
    taken: dict[str, list[Timed]] = {}
    for number in range(rehearsals + repeats):
        for one in [*bench.everything(), *edges(rollout)]:
            if number >= rehearsals:
                taken.setdefault(one.what, []).append(one)
    medians = [ones[0]._replace(seconds=statistics.median(one.seconds for one in ones)) for ones in taken.values()]
    return fit(medians), medians


def show(cost: CostModel, measured: list[Timed]) -> None:
    for one in measured:
        print(f"{one.what:<44} {1e3 * one.seconds:9.3f} ms   fitted / measured {explained(one, cost):.2f}")
    print(json.dumps(cost.to_json(), indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny", help="as `model.path`")
    parser.add_argument("--slots", type=several, default=8)
    parser.add_argument("--longest", type=positive, default=512, help="tokens that a sample may have")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--out", type=Path, required=True, help="what `simulate_rollout.py --cost` takes")
    options = parser.parse_args()
    lengths = [[options.longest] * 2]
    rollout = open_rollout(
        options.model,
        num_prompts=2,
        lengths=lengths,
        longest=options.longest,
        slots=[options.slots],
        rule=SegmentSettings(),
    )
    print(f"compiled in {rollout.compile():.1f} s", flush=True)
    cost, measured = calibrate(rollout, repeats=options.repeats)
    show(cost, measured)
    options.out.write_text(json.dumps(cost.to_json(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
