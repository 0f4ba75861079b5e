"""Selects the saved samples, and the fields of each, for the viewer page."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from app.records.jsonl import read_jsonl_tolerant
from app.records.sample import DROPPED_PREFIX, message_text
from app.records.sample_json import EPISODE
from app.records.shared_rows import SharedRows
from app.records.typed_values import to_text
from app.report.metrics_history import finite_metric, is_number
from settings.errors import InputError

DEFAULT_NUM_SAMPLES = 400
"""Number of samples shown by default. They make a page of about a megabyte, which a phone opens quickly."""
EVAL_SHARE = 0.25
"""Fraction of the shown samples that come from evaluations."""
MIN_FILES = 8
"""Minimum number of sample files to read, spread over the run; more are read only if needed to fill the page."""
MAX_CHARACTERS = 20_000


@dataclass
class ViewerContent:
    """The content of the page, and counts of what it omits."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    """Groups of samples of one prompt, from one step or from all evaluations."""
    num_shown: int = 0
    num_read: int = 0
    num_files: int = 0
    num_unopened: int = 0
    damaged: list[str] = field(default_factory=list)
    """Error messages for skipped lines."""

    def add(self, kind: str, samples: Sequence[SavedSample]) -> None:
        first = samples[0]
        self.num_shown += len(samples)
        self.groups.append(
            {
                "kind": kind,
                "name": first.prompt_uid,
                "prompt": _truncate(first.prompt),
                "answer": first.answer,
                "samples": [sample.fields for sample in samples],
            }
        )


class SavedSample(NamedTuple):
    """A saved sample: the values by which it is selected, and its fields in the page."""

    step: int
    prompt_uid: str
    group: str
    prompt: str
    answer: str | None
    reward: float
    """The reward; 0 without one."""
    fields: Mapping[str, Any]


def build_viewer(rollouts: Mapping[int, Path], evaluations: Mapping[int, Path], *, num_samples: int) -> ViewerContent:
    """Selects at most `num_samples` of the saved samples, in whole groups as far as possible.

    Rollouts: the groups whose rewards differ most, from steps spread evenly over the run, newest first.
    Evaluations: the same prompts in every evaluation, starting with those whose reward changed most from first to last.
    """
    viewer = ViewerContent(num_files=len(rollouts) + len(evaluations))
    kept_for_evaluations = int(num_samples * (EVAL_SHARE if rollouts else 1)) if evaluations else 0
    if rollouts:
        _add_rollouts(viewer, rollouts, num_samples - kept_for_evaluations)
    if evaluations:
        _add_evaluations(viewer, evaluations, num_samples - viewer.num_shown)
    return viewer


def _add_rollouts(viewer: ViewerContent, files: Mapping[int, Path], quota: int) -> None:
    by_step = _read_files(viewer, files, quota)

    def spread(group: Sequence[SavedSample]) -> float:
        return float(np.std([sample.reward for sample in group]))

    ranked = [
        sorted(_group_by(by_step[step], lambda s: s.group), key=spread, reverse=True) for step in reversed(by_step)
    ]
    # The first group of each step, then the second of each, and so on.
    in_turn = (group for row in itertools.zip_longest(*ranked) for group in row if group is not None)
    for group in sorted(_take_until_quota(in_turn, quota), key=lambda group: -group[0].step):
        viewer.add("rollout", group)


def _add_evaluations(viewer: ViewerContent, files: Mapping[int, Path], quota: int) -> None:
    by_step = _read_files(viewer, files, quota)
    prompts = _group_by(itertools.chain.from_iterable(by_step.values()), lambda s: s.prompt_uid)
    prompts.sort(key=lambda prompt: (-abs(prompt[-1].reward - prompt[0].reward), prompt[-1].reward))
    for prompt in _take_until_quota(prompts, quota):
        viewer.add("evaluation", prompt)


def _read_files(viewer: ViewerContent, files: Mapping[int, Path], quota: int) -> dict[int, list[SavedSample]]:
    """Maps steps to the samples of enough files to fill the quota; the files are spread evenly over the run."""
    steps = sorted(files)
    newest = _read_samples(viewer, steps[-1], files[steps[-1]])
    count = min(max(MIN_FILES, -(-quota // max(len(newest), 1))), len(steps))
    places = np.linspace(0, len(steps) - 1, count).round().astype(int)
    *earlier, last = [steps[place] for place in dict.fromkeys(places.tolist())]
    viewer.num_unopened += len(files) - len(earlier) - 1
    return {step: _read_samples(viewer, step, files[step]) for step in earlier} | {last: newest}


def _group_by(samples: Iterable[SavedSample], key_of: Callable[[SavedSample], str]) -> list[list[SavedSample]]:
    groups: dict[str, list[SavedSample]] = {}
    for sample in samples:
        groups.setdefault(key_of(sample), []).append(sample)
    return list(groups.values())


def _take_until_quota(groups: Iterable[list[SavedSample]], quota: int) -> Iterator[list[SavedSample]]:
    """Yields groups until the quota is used up; the last one may be shortened."""
    for group in groups:
        if quota <= 0:
            return
        yield group[:quota]
        quota -= len(group)


def _read_samples(viewer: ViewerContent, step: int, path: Path) -> list[SavedSample]:
    """Reads the samples of a file; records and skips lines that cannot be read."""
    samples, rows = [], SharedRows()
    try:
        for line, record in read_jsonl_tolerant(path):
            try:
                if isinstance(record, InputError):
                    raise record
                whole = record
                # If its line is damaged, the page omits the reference answer.
                with suppress(InputError):
                    whole = rows.restore(record, where=f"{path}:{line}")
                samples.append(_sample(whole, step=step, where=f"{path}:{line}"))
            except InputError as error:
                viewer.damaged.append(str(error))
    except InputError as error:  # the whole file is unreadable
        viewer.damaged.append(str(error))
    viewer.num_read += len(samples)
    return samples


def _sample(record: Mapping[str, Any], *, step: int, where: str) -> SavedSample:
    """Parses a record, even with nulls among its numbers, so that the samples of a diverged model can be viewed."""
    for name in ("uid", "completion"):
        if not isinstance(record.get(name), str):
            raise InputError(f"{where}: {name}: expected text, got {record.get(name)!r:.40}")
    ids, rewards, answer = (record.get(name) for name in ("completion_token_ids", "rewards", "answer"))
    ids, rewards = ids if isinstance(ids, list) else None, rewards if isinstance(rewards, dict) else {}
    advantages, finish = record.get("advantages"), str(record.get("finish_reason", ""))
    advantages = [v if is_number(v) else None for v in advantages] if isinstance(advantages, list) else []
    episode = _episode(record, advantages)
    is_dropped, is_truncated = finish.startswith(DROPPED_PREFIX), finish == "length"
    reward = finite_metric(record, "reward")
    fields = {
        "step": step,
        "uid": record["uid"],
        "completion": _truncate(record["completion"]),
        **episode,
        "finish": finish,
        "end": "dropped" if is_dropped else "truncated" if is_truncated else "complete",
        "tokens": None if ids is None else len(ids),
        "reward": _rounded(reward),
        "rewards": {name: _rounded(finite_metric(rewards, name)) for name in rewards},
        "advantage": _rounded(advantages[0]) if len(advantages) else None,
    }
    prompt, answer = _prompt_text(record.get("prompt")), None if answer is None else _truncate(to_text(answer))
    prompt_uid = record["uid"].rpartition("/s")[0] or record["uid"]
    return SavedSample(step, prompt_uid, str(record.get("group_id")), prompt, answer, reward or 0.0, fields)


def _episode(record: Mapping[str, Any], advantages: Sequence[float | None]) -> dict[str, Any]:
    """Returns the fields of a sample's episode; empty if it has no readable episode."""
    try:
        episode = EPISODE.validate_python(record.get("episode"))
    except ValidationError:
        return {}
    turns = [
        {
            "start": turn.start,
            "end": turn.end,
            "text": _truncate(turn.text),
            "messages": [message | {"content": _truncate(message.get("content", ""))} for message in turn.messages],
            "reward": _rounded(turn.reward),
            "advantage": _rounded(advantages[turn.start]) if turn.start < len(advantages) else None,
            "metrics": {name: _rounded(value) for name, value in turn.metrics.items()},
        }
        for turn in episode.turns
    ]
    scores = {name: _rounded(value) for name, value in episode.scores.items()}
    return {"turns": turns, "episode_end": episode.end, "scores": scores}


def _prompt_text(source: Any) -> str:
    """Returns the prompt as text, without the chat template."""
    if isinstance(source, list):
        return "\n\n".join(f"{m.get('role')}: {message_text(m)}" for m in source if isinstance(m, dict))
    return str(source)


def _truncate(text: str) -> str:
    beyond = len(text) - MAX_CHARACTERS
    return text if beyond <= 0 else f"{text[:MAX_CHARACTERS]} … ({beyond:,} more characters)"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 4)
