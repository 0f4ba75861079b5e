"""Lengths of samples: drawn from distributions, or read from the samples of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.records.jsonl import read_jsonl
from app.records.sample import DROPPED_PREFIX
from app.rollout.scheduling.protocol import Commit, CommittedRow, EventRecord, NewSample, Submitted
from scripts.simulate.cost_model import SampleLengths
from settings.errors import InputError


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


def to_sample_lengths(trace: Trace) -> list[SampleLengths]:
    return [SampleLengths(one.prompt, one.prompt_length, one.length) for one in trace]


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
    ended: dict[str, CommittedRow] = {}
    for event, commands in records:
        if isinstance(event, Submitted):
            samples |= {one.uid: one for one in event.samples}
        committed = itertools.chain.from_iterable(one.rows for one in commands if isinstance(one, Commit))
        ended |= {row.uid: row for row in committed if row.finish is not None}
    return [
        TraceSample(one.uid, one.prompt, one.index, ended[uid].num_tokens, one.prompt_length)
        for uid, one in samples.items()
        if not str(ended[uid].finish).startswith(DROPPED_PREFIX)
    ]


def read_trace(path: str | Path) -> Trace:
    """Returns the lengths of a file, without dropped samples.

    Lines have `uid`, `length` and optionally `prompt`, `index` and `prompt_length`, or are samples of `grpo rollout`.

    Raises:
        InputError: the file cannot be read, or has no sample.
    """
    trace = []
    for _, record in read_jsonl(path):
        if str(record.get("finish_reason")).startswith(DROPPED_PREFIX):
            continue
        uid = record["uid"]
        prompt, _, number = uid.rpartition("/s")
        index = int(number) if number.isdecimal() else 0
        if "completion_token_ids" in record:
            length, prompt_length = (len(record[name]) for name in ("completion_token_ids", "prompt_token_ids"))
            trace.append(TraceSample(uid, prompt or uid, index, length, prompt_length))
        else:
            sample = TraceSample(uid, record.get("prompt", prompt or uid), record.get("index", index), record["length"])
            trace.append(sample._replace(prompt_length=record.get("prompt_length", sample.prompt_length)))
    if not trace:
        raise InputError(f"{path}: expected a sample on every line, got none that was not dropped")
    return trace
