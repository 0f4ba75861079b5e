"""A few samples of a step, as a table for a terminal or for wandb."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.records.sample import Messages, Sample
from app.records.text_format import to_printable

NUM_GROUPS = 2
"""Groups shown per step, with two samples each: more would push the progress off the screen."""


@dataclass(frozen=True, slots=True)
class CompletionsTable:
    """Samples of a step, grouped by prompt, the best first."""

    step: int
    reward_names: tuple[str, ...]
    groups: tuple[tuple[tuple[Any, ...], ...], ...]
    """The samples of each prompt: prompt, text of the last turn, a value for each reward, total reward, advantage,
    reference answer and finish reason. A number is None until it has been computed."""


def completions_table(samples: Sequence[Sample], *, step: int) -> CompletionsTable:
    """Returns the best and the worst sample of the groups with the largest reward std, the first groups in a tie."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    selected = sorted(groups.values(), key=lambda group: -np.std([*map(_reward_or_zero, group)]))[:NUM_GROUPS]
    names = tuple({name: None for sample in samples for name in sample.rewards or {}})
    rows = []
    for group in selected:
        best, worst = max(group, key=_reward_or_zero), min(group, key=_reward_or_zero)
        rows.append(tuple(_to_row(sample, names) for sample in ([best] if best is worst else [best, worst])))
    return CompletionsTable(step, names, tuple(rows))


def _reward_or_zero(sample: Sample) -> float:
    return sample.reward if sample.reward is not None else 0.0


def _to_row(sample: Sample, names: Iterable[str]) -> tuple[Any, ...]:
    rewards = [(sample.rewards or {}).get(name) for name in names]
    written = sample.advantages[sample.mask] if sample.advantages is not None else np.empty(0)
    advantage = float(written.mean()) if len(written) else None
    prompt, answer = prompt_text(sample.prompt.source), sample.prompt.answer
    return (prompt, sample.completion, *rewards, sample.reward, advantage, answer, sample.finish_reason)


def prompt_text(source: str | Messages) -> str:
    """Returns the text of a prompt, or of the last message of a chat."""
    if isinstance(source, str):
        return source
    return str(source[-1].get("content", "")) if source and isinstance(source[-1], dict) else ""


def truncate_middle(text: str, *, limit: int) -> str:
    """Returns a text as one printable line, shortened in the middle to about `limit` characters."""
    if len(text) > limit:
        head = limit * 2 // 3
        text = f"{text[:head]} … {text[-(limit - head) :]}"
    return to_printable(text)
