"""What is known and expected about lengths: of a prompt, of a group while it runs, and of all that finished lately."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from app.records.sample import DROPPED_PREFIX
from app.rollout.scheduling.sample_states import SampleEntry


class LengthEstimator:
    """Expectations that follow from token counts alone (but for what `observe` is given as a measure).

    Args:
        window: finished samples that the threshold looks back on.
        history: prompt -> length of its samples in earlier epochs, where known.
        known: uid -> length, for an oracle.
    """

    def __init__(
        self, *, window: int, history: Mapping[str, float] | None = None, known_lengths: Mapping[str, int] | None = None
    ):
        self.history = dict(history or {})
        self.known_lengths = dict(known_lengths or {})
        self.group_max: dict[str, int] = {}
        """Prompt -> tokens of its longest sample so far, running ones included."""
        self.group_measure: dict[str, float] = {}
        """Prompt -> the longest measure so far of its samples, in the unit of the threshold."""
        self.measures: deque[float] = deque(maxlen=window)
        self.num_finished = 0
        self._sum_finished = 0

    def observe(self, entry: SampleEntry, *, measure: float) -> bool:
        """Learns from a committed row; True where its group has become longer. A dropped one teaches nothing.

        `measure` is what the threshold is in, tokens or seconds, and counts once the sample is complete.
        """
        if entry.finish is not None and entry.finish.startswith(DROPPED_PREFIX):
            # Of a first sample that never was: its siblings are as unknown as before.
            if self.group_max.get(entry.prompt) == 0:
                del self.group_max[entry.prompt]
            return False
        if entry.finish is not None:
            self.measures.append(measure)
            self.num_finished += 1
            self._sum_finished += entry.num_tokens
        self.group_measure[entry.prompt] = max(measure, self.group_measure.get(entry.prompt, 0.0))
        if entry.num_tokens <= self.group_max.get(entry.prompt, -1):
            return False
        self.group_max[entry.prompt] = entry.num_tokens
        return True

    def start_probe(self, prompt: str) -> None:
        """A first sample of the prompt runs now, and will say how long its samples are."""
        self.group_max.setdefault(prompt, 0)

    def finish_prompt(self, prompt: str, *, mean: float | None) -> None:
        """All of the prompt's samples have ended and are forgotten: from now on they are its history.

        Args:
            mean: their length; None where all were dropped.
        """
        if mean is not None:
            self.history[prompt] = mean
        self.group_max.pop(prompt, None)
        self.group_measure.pop(prompt, None)

    def has_estimate(self, prompt: str) -> bool:
        """Whether anything says how long the prompt's samples are."""
        return prompt in self.history or prompt in self.group_max

    def estimate(self, entry: SampleEntry) -> float:
        """max(history of the prompt, running maximum of its group, own length so far), in tokens."""
        if entry.uid in self.known_lengths:
            return self.known_lengths[entry.uid]
        return max(self.history.get(entry.prompt, 0), self.group_max.get(entry.prompt, 0), entry.num_tokens)

    def mean_length(self, *, default: float) -> float:
        """Of the finished samples, at least 1."""
        return max(self._sum_finished / self.num_finished, 1.0) if self.num_finished else default

    def threshold(self, running: Iterable[float], *, percentile: float, min_finished: int) -> float | None:
        """The percentile of the window; None before enough samples have finished to tell.

        `running` are the measures so far of samples that still run.
        """
        if len(self.measures) < min_finished:
            return None
        found = censored_quantile(self.measures, running, percentile / 100)
        return None if math.isinf(found) else found

    def to_json(self) -> dict[str, Any]:
        return {
            "history": dict(self.history),
            "known": dict(self.known_lengths),
            "group_max": dict(self.group_max),
            "group_measure": dict(self.group_measure),
            "measures": list(self.measures),
            "window": self.measures.maxlen,
            "num_finished": self.num_finished,
            "sum_finished": self._sum_finished,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LengthEstimator:
        lengths = cls(window=values["window"], history=values["history"], known_lengths=values["known"])
        lengths.group_max = dict(values["group_max"])
        lengths.group_measure = dict(values["group_measure"])
        lengths.measures.extend(values["measures"])
        lengths.num_finished, lengths._sum_finished = values["num_finished"], values["sum_finished"]
        return lengths


def censored_quantile(finished: Iterable[float], running: Iterable[float], quantile: float) -> float:
    """The quantile where running samples say only that they are longer than they are now.

    The smallest t with S(t) = prod_{t_i <= t} (1 - d_i / n_i) <= 1 - quantile, with d_i the samples that finished at
    t_i and n_i those that were as long at least. Infinite where too many still run to tell.

    Finished samples alone are the short ones at the start of a step, and their quantile would be too low.
    Source: E. L. Kaplan, P. Meier, "Nonparametric Estimation from Incomplete Observations", 1958.
    """
    # At equal lengths a finished sample comes first: a running one is longer than it is now.
    lengths = sorted([(length, 0) for length in finished] + [(length, 1) for length in running])
    surviving = 1.0
    for i, (length, runs) in enumerate(lengths):
        if not runs:
            surviving *= 1 - 1 / (len(lengths) - i)
            if surviving <= 1 - quantile + 1e-12:
                return length
    return math.inf
