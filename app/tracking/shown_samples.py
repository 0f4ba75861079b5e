"""A few samples of a step as text for the console of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.records.sample import Messages, Sample
from app.records.text_format import to_printable

NUM_GROUPS = 2
"""Groups shown per step, with two samples each: more would push the progress off the screen."""
PROMPT_CHARACTERS, COMPLETION_CHARACTERS, NAME_CHARACTERS = 160, 320, 40
"""Maximum lengths of texts; the whole samples are in rollouts/."""


def sample_lines(samples: Sequence[Sample], *, step: int) -> list[str]:
    """Returns the best and the worst sample of the groups with the largest reward std, the first groups in a tie."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    selected = sorted(groups.values(), key=lambda group: -np.std([*map(_reward_or_zero, group)]))[:NUM_GROUPS]
    lines = [f"completions of step {step}"] if selected else []
    for group in selected:
        best, worst = max(group, key=_reward_or_zero), min(group, key=_reward_or_zero)
        answer = truncate_middle(best.prompt.answer or "–", limit=NAME_CHARACTERS)
        lines.append(f"  {truncate_middle(_prompt_text(best.prompt.source), limit=PROMPT_CHARACTERS)}  [{answer}]")
        lines += [f"    {_to_text(sample)}" for sample in ([best] if best is worst else [best, worst])]
    return lines


def _reward_or_zero(sample: Sample) -> float:
    return sample.reward if sample.reward is not None else 0.0


def _to_text(sample: Sample) -> str:
    written = sample.advantages[sample.mask] if sample.advantages is not None else np.empty(0)
    numbers = {"reward": sample.reward, **(sample.rewards or {}), "advantage": written.mean() if len(written) else None}
    figures = (
        f"{truncate_middle(name, limit=NAME_CHARACTERS)} {'–' if value is None else f'{value:.4g}'}"
        for name, value in numbers.items()
    )
    end = truncate_middle(sample.finish_reason, limit=NAME_CHARACTERS)
    return f"{', '.join(figures)}, {end}: {truncate_middle(sample.completion, limit=COMPLETION_CHARACTERS)}"


def _prompt_text(source: str | Messages) -> str:
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
