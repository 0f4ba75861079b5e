"""A few samples of a step, as a table for a terminal or for wandb."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from app.records.sample import Messages, Sample
from app.records.text_format import to_printable

NUM_GROUPS = 2
"""Groups shown per step, with two samples each: more would push the progress off the screen."""


@dataclass(frozen=True, slots=True)
class CompletionRow:
    """One sample; a number is None until it has been computed."""

    prompt: str
    completion: str
    """What the policy wrote in its last turn."""
    rewards: tuple[float | None, ...]
    reward: float | None
    advantage: float | None
    answer: str | None
    finish_reason: str
    ends_group: bool
    """Whether the next row belongs to another prompt."""


@dataclass(frozen=True, slots=True)
class CompletionsTable:
    """Samples of a step, grouped by prompt, the best first."""

    step: int
    reward_names: tuple[str, ...]
    rows: tuple[CompletionRow, ...]


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
        chosen = [best] if best is worst else [best, worst]
        rows += [_to_row(sample, names, ends_group=sample is chosen[-1]) for sample in chosen]
    return CompletionsTable(step, names, tuple(rows))


def _reward_or_zero(sample: Sample) -> float:
    return sample.reward if sample.reward is not None else 0.0


def _to_row(sample: Sample, names: Iterable[str], *, ends_group: bool) -> CompletionRow:
    values = sample.rewards or {}
    written = sample.advantages[sample.mask] if sample.advantages is not None else np.empty(0)
    return CompletionRow(
        prompt=prompt_text(sample.prompt.source),
        completion=sample.completion,
        rewards=tuple(values.get(name) for name in names),
        reward=sample.reward,
        advantage=float(written.mean()) if len(written) else None,
        answer=sample.prompt.answer,
        finish_reason=sample.finish_reason,
        ends_group=ends_group,
    )


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
