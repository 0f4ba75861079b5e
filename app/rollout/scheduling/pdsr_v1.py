"""The policy P-DSR v1 (probe-based dynamic segment rollout).

Runs one probe sample of each prompt, ranks the prompts by the lengths of their probes, then routes all other samples.
"""

from __future__ import annotations

import math
from typing import ClassVar, cast

from app.rollout.scheduling.protocol import SampleRole, Suspend
from app.rollout.scheduling.sample_states import SampleEntry
from app.rollout.scheduling.scheduling_policy import (
    Probes,
    RowLimit,
    SchedulingContext,
    SchedulingPolicy,
    WorkerState,
    running_rows,
)


class PdsrV1Policy(SchedulingPolicy):
    """Runs probes on fast workers. A batch consists of the prompts submitted before its last probe was measured.

    The `heavy_percent` of a batch's prompts with the longest probes are heavy, and so are all prompts whose probes
    exceeded their limit. Such probes move to heavy workers; other samples over the fast limit move there as well, or
    are truncated.

    Once the window has enough samples, a batch does not wait for probes above its (100 - `heavy_percent`)th percentile:
    their prompts are certain to be heavy. Prompts known from an earlier epoch are classified by the same threshold.
    """

    name = "pdsr_v1"
    served_by: ClassVar = {"probe": "fast", "fast": "fast", "heavy": "heavy"}

    def __init__(self, context: SchedulingContext):
        super().__init__(context)
        self._probes = Probes(context)
        self._batch: dict[str, float | None] = {}
        """Prompt -> measured length of its probe; infinite if it exceeded the limit, None while it is running."""

    @property
    def percentile(self) -> float:
        return 100 - self.context.pdsr.heavy_percent

    def add(self, entry: SampleEntry) -> None:
        if not self._probes.admit_or_hold_back(entry):
            return
        if self._probes.is_probe(entry):
            self._batch[entry.prompt] = None
            self.queues["probe"].put(entry.uid, 0, entry.number)
        else:
            self.queues[self._probes.verdicts[entry.prompt]].put(entry.uid, 0, entry.number)

    def observe(self, entry: SampleEntry, *, grew: bool) -> None:
        if not self._is_running_probe(entry):
            return
        measure, threshold = self.context.lengths.measure(entry), self.context.threshold
        if entry.finish is not None:
            self._record_probe(entry, measure)
        elif threshold is not None and measure > threshold:
            self._record_probe(entry, math.inf)

    def _is_running_probe(self, entry: SampleEntry) -> bool:
        return self._probes.is_probe(entry) and self._batch.get(entry.prompt, math.inf) is None

    def _record_probe(self, entry: SampleEntry, measure: float) -> None:
        self._batch[entry.prompt] = measure
        lengths = {prompt: length for prompt, length in self._batch.items() if length is not None}
        if len(lengths) < len(self._batch):
            return
        num_heavy = math.ceil(self.context.pdsr.heavy_percent / 100 * len(lengths))
        ranked = sorted(lengths, key=lambda prompt: -lengths[prompt])
        for rank, prompt in enumerate(ranked):
            verdict = "heavy" if rank < num_heavy or math.isinf(lengths[prompt]) else "fast"
            for uid in self._probes.set_verdict(prompt, verdict):
                self.queues[verdict].put(uid, 0, self.context.samples[uid].number)
        self._batch = {}

    def may_release(self) -> bool:
        """Returns whether the end of a single row may complete the batch.

        It may if only one probe is unmeasured, or if the other probes may pass the threshold in the meantime.
        """
        num_unmeasured = sum(length is None for length in self._batch.values())
        is_near = num_unmeasured == 1 or (num_unmeasured > 1 and self.context.threshold is not None)
        return is_near and bool(self._probes.held_back)

    def evictions(self, worker: WorkerState) -> list[Suspend]:
        if self.context.serves(worker, "heavy"):
            return []
        gone = []
        for entry in running_rows(self.context, worker):
            if self._is_running_probe(entry):
                if self.context.is_over_limit(entry, self.context.probe_limit):
                    self._record_probe(entry, math.inf)
                    gone.append(Suspend(worker.name, entry.uid, "probe limit"))
            elif self.context.is_over_limit(entry, self.context.fast_limit):
                truncates = self.context.pdsr.on_fast_limit == "truncate" and self._queue_for_sample(entry) == "fast"
                gone.append(Suspend(worker.name, entry.uid, "truncated" if truncates else "breaker"))
        return gone

    def limit(self, entry: SampleEntry, worker: WorkerState) -> RowLimit | None:
        if self.context.serves(worker, "heavy"):
            return None
        return self.context.probe_limit if self._is_running_probe(entry) else self.context.fast_limit

    def requeue(self, entry: SampleEntry) -> None:
        if self._is_running_probe(entry) and self.context.outgrows(entry, "fast"):
            self._record_probe(entry, math.inf)
        self.queues[self._queue_for_sample(entry)].put(entry.uid, -1, entry.number)

    def _queue_for_sample(self, entry: SampleEntry) -> SampleRole:
        if self._is_running_probe(entry):
            return "probe"
        if entry.moves or self._probes.is_probe(entry) or self.context.outgrows(entry, "fast"):
            return "heavy"
        return self._probes.verdicts[entry.prompt]

    def forget(self, prompt: str) -> None:
        self._probes.forget(prompt)
        self._batch.pop(prompt, None)

    def start(self, entry: SampleEntry, queue: str, worker: WorkerState) -> SampleRole:
        # The queues have the names of roles.
        return cast("SampleRole", queue)
