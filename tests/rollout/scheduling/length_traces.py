"""Lengths of samples: drawn from distributions, or read from the events of a rollout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from app.records.sample import DROPPED_PREFIX
from app.rollout.scheduling.protocol import Answered, EventRecord, NewSample, RowReport, SegmentEnded, Submitted


class TraceTurn(NamedTuple):
    """A turn that an environment answers."""

    end: int
    """Number of completion tokens at its end."""
    observation: int
    """Number of tokens that the answer adds."""
    latency_s: float
    finish: str | None = None
    """Finish reason, if the sample ends with the answer."""


class TraceSample(NamedTuple):
    """One sample and its final length."""

    uid: str
    prompt: str
    index: int
    length: int
    """Number of completion tokens, with those of observations."""
    prompt_length: int = 128
    turns: tuple[TraceTurn, ...] = ()
    """Turns in order, each with tokens of its own. The last tokens of a sample need no answer."""


Trace = Sequence[TraceSample]


def new_samples(trace: Trace, *, max_new: int) -> tuple[NewSample, ...]:
    return tuple(NewSample(one.uid, one.prompt, one.index, one.prompt_length, max_new) for one in trace)


def log_normal(
    rng: np.random.Generator, *, prompts: int, group: int, mean: float, sigma: float, correlation: float, max_new: int
) -> Trace:
    """Draws log length = mu + sigma (sqrt(r) z_prompt + sqrt(1 - r) z_sample), with correlation r in a group.

    `mean` is the mean length before lengths are limited to `max_new`.
    """
    shared = rng.standard_normal((prompts, 1))
    own = rng.standard_normal((prompts, group))
    logs = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    return _make_trace(mean * np.exp(sigma * logs - sigma**2 / 2), max_new)


def equal(*, prompts: int, group: int, length: int) -> Trace:
    return _make_trace(np.full((prompts, group), length), length)


def bimodal(rng: np.random.Generator, *, prompts: int, group: int, short: int, long: int, share: float) -> Trace:
    """Draws whole prompts of long samples and others of short ones."""
    is_long = rng.random((prompts, 1)) < share
    return _make_trace(np.where(is_long, long, short) * np.ones((1, group)), long)


def one_giant(*, prompts: int, group: int, length: int, giant: int) -> Trace:
    """Draws lengths of which the very last is far longer than all others."""
    lengths = np.full((prompts, group), length)
    lengths[-1, -1] = giant
    return _make_trace(lengths, giant)


def drift(
    rng: np.random.Generator, *, prompts: int, group: int, mean: float, sigma: float, correlation: float, max_new: int
) -> Trace:
    """Draws lengths whose mean doubles half-way."""
    trace = log_normal(
        rng, prompts=prompts, group=group, mean=mean, sigma=sigma, correlation=correlation, max_new=max_new
    )
    half = len(trace) // 2
    return [*trace[:half], *(one._replace(length=min(2 * one.length, max_new)) for one in trace[half:])]


def with_turns(trace: Trace, *, turn: int, observation: int, latency_s: float) -> Trace:
    """Returns the samples with turns of so many tokens, which are all answered but the last."""

    def turns(length: int) -> tuple[TraceTurn, ...]:
        ends = range(turn, length - observation, turn + observation)
        return tuple(TraceTurn(end, observation, latency_s) for end in ends)

    return [one._replace(turns=turns(one.length)) for one in trace]


def ascending(trace: Trace) -> Trace:
    """Returns the lengths in ascending order without equal siblings: the worst order for a first-come schedule."""
    lengths = sorted(one.length for one in trace)
    by_index = sorted(range(len(trace)), key=lambda i: (trace[i].index, i))
    order = np.argsort(by_index)
    return [one._replace(length=lengths[place]) for one, place in zip(trace, order, strict=True)]


def _make_trace(lengths: np.ndarray, max_new: int) -> Trace:
    whole = np.clip(np.rint(lengths), 1, max_new).astype(int)
    return [
        TraceSample(f"p{prompt}/s{index}", f"p{prompt}", index, int(length))
        for prompt, of_prompt in enumerate(whole)
        for index, length in enumerate(of_prompt)
    ]


def trace_from_records(records: Iterable[EventRecord]) -> Trace:
    """Returns the lengths of a finished rollout, in the order of submission, without dropped samples."""
    samples: dict[str, NewSample] = {}
    reports: dict[str, RowReport] = {}
    for event, _ in records:
        if isinstance(event, Submitted):
            samples |= {one.uid: one for one in event.samples}
        elif isinstance(event, SegmentEnded | Answered):
            reports |= {row.uid: row for row in event.rows}
    return [
        TraceSample(one.uid, one.prompt, one.index, reports[uid].num_tokens, one.prompt_length)
        for uid, one in samples.items()
        if not str(reports[uid].finish).startswith(DROPPED_PREFIX)
    ]
