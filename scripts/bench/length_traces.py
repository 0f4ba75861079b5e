"""How long samples are: drawn from distributions that a schedule must stand, or read from what a run has sampled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.records.jsonl import read_jsonl
from app.records.sample import DROPPED_PREFIX
from app.rollout.scheduling.events import Commit, CommittedRow, EventRecord, Finished, NewSample, Submitted
from scripts.bench.cost_model import SampleLengths
from settings.errors import InputError
from settings.schema.rollout import MAX_TOKENS


class TraceSample(NamedTuple):
    """One sample, and what it will become."""

    uid: str
    prompt: str
    index: int
    length: int
    """Tokens of its completion."""
    prompt_length: int = 128


Trace = Sequence[TraceSample]

MAX_SHOWN_CHARS = 40
"""Characters of a value in an error."""
MAX_DIGITS = len(str(MAX_TOKENS))
"""Of the number of a sample among its siblings."""


def new_samples(trace: Trace, *, max_new: int) -> tuple[NewSample, ...]:
    return tuple(NewSample(one.uid, one.prompt, one.index, one.prompt_length, max_new) for one in trace)


def to_sample_lengths(trace: Trace) -> list[SampleLengths]:
    return [SampleLengths(one.prompt, one.prompt_length, one.length) for one in trace]


def log_normal(
    rng: np.random.Generator, *, prompts: int, group: int, mean: float, sigma: float, correlation: float, max_new: int
) -> Trace:
    """log length = mu + sigma (sqrt(r) z_prompt + sqrt(1 - r) z_sample), with r the correlation inside a group.

    `mean` is that of the lengths before those over `max_new` are cut there.
    """
    shared = rng.standard_normal((prompts, 1))
    own = rng.standard_normal((prompts, group))
    logs = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    return _make_trace(mean * np.exp(sigma * logs - sigma**2 / 2), max_new)


def equal(*, prompts: int, group: int, length: int) -> Trace:
    return _make_trace(np.full((prompts, group), length), length)


def bimodal(rng: np.random.Generator, *, prompts: int, group: int, short: int, long: int, share: float) -> Trace:
    """Whole prompts of long samples, the others short."""
    is_long = rng.random((prompts, 1)) < share
    return _make_trace(np.where(is_long, long, short) * np.ones((1, group)), long)


def one_giant(*, prompts: int, group: int, length: int, giant: int) -> Trace:
    """The very last sample is far longer than all others."""
    lengths = np.full((prompts, group), length)
    lengths[-1, -1] = giant
    return _make_trace(lengths, giant)


def drift(
    rng: np.random.Generator, *, prompts: int, group: int, mean: float, sigma: float, correlation: float, max_new: int
) -> Trace:
    """The mean doubles half-way."""
    trace = log_normal(
        rng, prompts=prompts, group=group, mean=mean, sigma=sigma, correlation=correlation, max_new=max_new
    )
    half = len(trace) // 2
    return [*trace[:half], *(one._replace(length=min(2 * one.length, max_new)) for one in trace[half:])]


def ascending(trace: Trace) -> Trace:
    """The same lengths, longest last and no two siblings alike: the worst order for who takes samples as they come."""
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


def trace_from_records(records: Iterable[EventRecord], *, where: str = "the event log") -> Trace:
    """What samples became, by the event log of a rollout, in the order of their submission; dropped ones are left out.

    Args:
        where: opens every error.

    Raises:
        InputError: the rollout was not finished, or all of its samples were dropped.
    """
    samples: dict[str, NewSample] = {}
    ended: dict[str, CommittedRow] = {}
    is_finished = False
    for event, commands in records:
        if isinstance(event, Submitted):
            samples |= {one.uid: one for one in event.samples}
        committed = itertools.chain.from_iterable(one.rows for one in commands if isinstance(one, Commit))
        ended |= {row.uid: row for row in committed if row.finish is not None}
        is_finished = is_finished or Finished() in commands
    if not is_finished:
        raise InputError(
            f"{where}: the log of a rollout that was not finished: {len(ended)} of its {len(samples)} samples are "
            "done. Start that again, and it goes on from there"
        )
    kept = [(one, ended[uid]) for uid, one in samples.items() if not is_dropped(ended[uid].finish)]
    if not kept:
        raise InputError(f"{where}: the log of a rollout without a sample that was not dropped")
    return [TraceSample(one.uid, one.prompt, one.index, row.num_tokens, one.prompt_length) for one, row in kept]


def is_dropped(finish: object) -> bool:
    return isinstance(finish, str) and finish.startswith(DROPPED_PREFIX)


def read_trace(path: str | Path) -> Trace:
    """Lines of `uid`, `prompt`, `index`, `length` and `prompt_length`, or samples as `grpo rollout` writes them.

    Samples that were dropped are left out.

    Raises:
        InputError: a file or a line that is neither, a uid that comes twice, or no sample at all.
    """
    trace, seen, num_dropped = [], set(), 0
    for number, record in read_jsonl(path):
        if is_dropped(record.get("finish_reason")):
            num_dropped += 1
            continue
        one = _parse_sample(record, f"{path}:{number}")
        if one.uid in seen:
            raise InputError(f"{path}:{number}: uid {one.uid!r} comes a second time")
        seen.add(one.uid)
        trace.append(one)
    if not trace:
        got = f"{num_dropped} that were dropped" if num_dropped else "no line"
        raise InputError(f"{path}: expected a sample on every line, got {got}")
    return trace


def _parse_sample(record: dict[str, Any], where: str) -> TraceSample:
    uid = record.get("uid")
    if not isinstance(uid, str):
        raise InputError(f"{where}: uid: expected a string, got {uid!r}")
    prompt, _, last = uid.rpartition("/s")
    if last.isdecimal() and len(last) > MAX_DIGITS:
        raise InputError(f"{where}: uid: expected at most {MAX_DIGITS} digits behind /s, got {len(last)}")
    if "completion_token_ids" in record:
        return TraceSample(
            uid,
            prompt or uid,
            int(last) if last.isdecimal() else 0,
            _num_token_ids(record, "completion_token_ids", where),
            _num_token_ids(record, "prompt_token_ids", where),
        )
    given = record.get("prompt", prompt or uid)
    if not isinstance(given, str):
        raise InputError(f"{where}: prompt: expected a string, got {given!r}")
    index = _parse_int(record, "index", where, minimum=0, default=int(last) if last.isdecimal() else 0)
    length = _parse_int(record, "length", where, minimum=1, default=None)
    return TraceSample(uid, given, index, length, _parse_int(record, "prompt_length", where, minimum=1, default=128))


def _num_token_ids(record: dict[str, Any], name: str, where: str) -> int:
    ids = record.get(name)
    if not isinstance(ids, list) or not 0 < len(ids) <= MAX_TOKENS:
        got = f"{len(ids)} of them" if isinstance(ids, list) and ids else repr(ids)
        raise InputError(f"{where}: {name}: expected token ids, at most {MAX_TOKENS}, got {got}")
    return len(ids)


def _parse_int(record: dict[str, Any], name: str, where: str, *, minimum: int, default: int | None) -> int:
    value = record.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_TOKENS:
        got = repr(value)
        got = got if len(got) <= MAX_SHOWN_CHARS else f"{got[:MAX_SHOWN_CHARS]}..."
        raise InputError(f"{where}: {name}: expected a whole number from {minimum} to {MAX_TOKENS}, got {got}")
    return value
