"""Estimates the lengths of samples from other samples of the same prompt and from recently finished samples."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from app.records.sample import DROPPED_PREFIX
from app.rollout.scheduling.sample_states import SampleEntry


class FinishedLength(NamedTuple):
    """The length of a finished sample."""

    num_tokens: int
    seconds: float | None
    """Decoding time; None if `rollout.pdsr.unit` is `tokens`, so that a repeated run has the same statistics."""


@dataclass(frozen=True)
class LearnedLengths:
    """Length statistics of earlier schedules, used by the next schedule."""

    prompts: Mapping[str, float]
    """Prompt -> mean length of its latest samples, in tokens."""
    finished: tuple[FinishedLength, ...]
    """Recently finished samples, oldest first."""

    def about(self, prompts: Iterable[str]) -> LearnedLengths:
        """Returns a copy with all finished samples, but the mean lengths of only these prompts."""
        return LearnedLengths({uid: self.prompts[uid] for uid in prompts if uid in self.prompts}, self.finished)

    def updated(self, newer: LearnedLengths, *, window: int | None = None) -> LearnedLengths:
        """Returns these statistics merged with newer ones.

        Args:
            window: maximum number of finished samples; None = no limit. If `newer` has more, evenly spaced samples are
                kept: short samples finish first, so the last ones would be the longest.
        """
        finished = newer.finished
        if window is not None and len(finished) > window:
            finished = tuple(finished[i * len(finished) // window] for i in range(window))
        both = (*self.finished, *finished)
        return LearnedLengths({**self.prompts, **newer.prompts}, both if window is None else both[-window:])

    @classmethod
    def of_hosts(cls, parts: Iterable[LearnedLengths]) -> LearnedLengths:
        """Merges statistics that several hosts collected at the same time; finished samples are interleaved."""
        parts = list(parts)
        prompts = {uid: mean for part in parts for uid, mean in part.prompts.items()}
        in_turn = itertools.zip_longest(*(part.finished for part in parts))
        return cls(prompts, tuple(one for turn in in_turn for one in turn if one is not None))

    def to_json(self) -> dict[str, Any]:
        return {"prompts": self.prompts, "finished": self.finished}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> LearnedLengths:
        return cls(dict(fields["prompts"]), tuple(FinishedLength(*one) for one in fields["finished"]))


NOTHING_LEARNED = LearnedLengths({}, ())


class LengthEstimator:
    """Estimates lengths from the progress of samples and from earlier schedules.

    Args:
        window: number of recently finished samples that determine the threshold and the mean length.
        unit: unit of the threshold and of the lengths that are compared with it.
    """

    def __init__(
        self,
        *,
        window: int,
        unit: Literal["tokens", "seconds"] = "tokens",
        learned: LearnedLengths = NOTHING_LEARNED,
    ):
        self.unit = unit
        self.history = dict(learned.prompts)
        self.group_max: dict[str, int] = {}
        """Prompt -> number of tokens in its longest sample so far, including running ones."""
        self.group_measure: dict[str, float] = {}
        """Prompt -> largest `measure` of its samples so far."""
        self.finished: deque[FinishedLength] = deque(learned.finished, maxlen=window)
        """The window of recently finished samples, oldest first."""
        self.new_finished: list[FinishedLength] = []
        """All samples that have finished since the last `take_finished`."""
        self.num_finished = 0
        """Number of samples that have finished in this schedule."""

    def measure(self, entry: SampleEntry) -> float:
        """Returns the length of a sample so far, in `unit`."""
        return entry.seconds if self.unit == "seconds" else entry.num_tokens

    def observe(self, entry: SampleEntry) -> bool:
        """Learns from a committed row unless it was dropped; returns whether its group's maximum length has grown."""
        if entry.finish is not None and entry.finish.startswith(DROPPED_PREFIX):
            # A dropped probe gives no length, so the prompt has no estimate.
            if self.group_max.get(entry.prompt) == 0:
                del self.group_max[entry.prompt]
            return False
        if entry.finish is not None:
            seconds = entry.seconds if self.unit == "seconds" else None
            self.new_finished.append(FinishedLength(entry.num_tokens, seconds))
            self.finished.append(self.new_finished[-1])
            self.num_finished += 1
        self.group_measure[entry.prompt] = max(self.measure(entry), self.group_measure.get(entry.prompt, 0.0))
        if entry.num_tokens <= self.group_max.get(entry.prompt, -1):
            return False
        self.group_max[entry.prompt] = entry.num_tokens
        return True

    def start_probe(self, prompt: str) -> None:
        """Records that the prompt's first sample is running and will give a length estimate."""
        self.group_max.setdefault(prompt, 0)

    def finish_prompt(self, prompt: str, *, mean: float | None) -> None:
        """Keeps only the mean length of a prompt, as history, once all its samples are released.

        Args:
            mean: mean length of its samples; None if all were dropped.
        """
        if mean is not None:
            self.history[prompt] = mean
        self.group_max.pop(prompt, None)
        self.group_measure.pop(prompt, None)

    def has_estimate(self, prompt: str) -> bool:
        """Returns whether the prompt has a length estimate, or a running probe that will give one."""
        return prompt in self.history or prompt in self.group_max

    def estimate(self, entry: SampleEntry) -> float:
        """Returns max(mean length in the prompt's history, longest sample of its group so far, this sample so far)."""
        return max(self.history.get(entry.prompt, 0), self.group_max.get(entry.prompt, 0), entry.num_tokens)

    def mean_length(self, *, default: float) -> float:
        """Returns the mean length of samples in the window, at least 1 token; `default` if the window is empty."""
        if not self.finished:
            return default
        return max(sum(one.num_tokens for one in self.finished) / len(self.finished), 1.0)

    def take_finished(self) -> tuple[FinishedLength, ...]:
        """Returns the samples that have finished since the last call."""
        taken, self.new_finished = tuple(self.new_finished), []
        return taken

    def threshold(self, running: Iterable[float], *, percentile: float, min_finished: int) -> float | None:
        """Returns a percentile of the lengths in the window; None if too few samples have finished to determine it.

        Args:
            running: current lengths of samples that are still running, in `unit`.
            min_finished: minimum number of finished samples.
        """
        measures = [one.seconds if self.unit == "seconds" else one.num_tokens for one in self.finished]
        finished = [measure for measure in measures if measure is not None]
        if len(finished) < min_finished:
            return None
        threshold = censored_quantile(finished, running, percentile / 100)
        return None if math.isinf(threshold) else threshold


def censored_quantile(finished: Iterable[float], running: Iterable[float], quantile: float) -> float:
    """Returns the Kaplan-Meier quantile of lengths, with running samples as right-censored observations.

    It is the smallest t with S(t) = prod_{t_i <= t} (1 - d_i / n_i) <= 1 - quantile, where d_i samples finished at t_i
    and n_i samples are at least as long. It is infinite if too many samples are still running.

    At the start of a step, mostly short samples have finished, and their quantile alone would be too low. Source: E. L.
    Kaplan, P. Meier, "Nonparametric Estimation from Incomplete Observations", 1958.
    """
    # At equal lengths, a finished sample comes first, because a running one will become longer.
    lengths = sorted([(length, 0) for length in finished] + [(length, 1) for length in running])
    surviving = 1.0
    for i, (length, runs) in enumerate(lengths):
        if not runs:
            surviving *= 1 - 1 / (len(lengths) - i)
            if surviving <= 1 - quantile + 1e-12:
                return length
    return math.inf
