"""Estimates the size of a run's sample files from records of its own prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from app.records.jsonl import to_json_line
from app.records.sample import Prompt, Sample
from app.records.sample_json import sample_to_record
from app.records.shared_rows import share_rows
from app.records.text_format import format_bytes
from settings import Settings

MAX_PROMPTS = 64
"""Maximum number of prompts whose records are measured; they are spread evenly over the data."""
TOKEN_TEXT, TOKEN_ID = "word", 50_000
"""A token of typical length, as text and as an id."""


@dataclass(frozen=True)
class SampleFileSize:
    """Bytes of a run's sample files if all completions have `rollout.max_new_tokens` tokens."""

    step: int
    """Bytes of one training step's samples; 0 if samples are not saved."""
    evaluation: int
    """Bytes of one evaluation's samples."""
    total: int

    def to_text(self) -> str:
        parts = {"a step": self.step, "an evaluation": self.evaluation}
        return (
            f"up to {format_bytes(self.total)} for samples "
            f"({', '.join(f'{format_bytes(size)} {name}' for name, size in parts.items() if size)})"
        )


def estimate_sample_files(
    settings: Settings, prompts: Sequence[Prompt], held_out: Sequence[Prompt], *, num_hosts: int
) -> SampleFileSize:
    """Estimates the size of a run's sample files, not counting observations of environments.

    Args:
        prompts: prompts of the training data, at least one.
        held_out: prompts of an evaluation; empty without evaluations.
    """
    every, steps, rollout = settings.eval.every_steps, settings.run.steps, settings.rollout
    logprobs = [f"{role}_logprobs" for role in settings.scored_roles if role != "critic"]
    sampled = ["kept_mass_logs"] if rollout.top_k or rollout.top_p < 1 or rollout.min_p else []
    of_critic = ["values", "returns"] if settings.has_critic else []
    fields, num_tokens = [*sampled, *logprobs, *of_critic, "advantages"], rollout.max_new_tokens
    step = evaluation = 0
    if settings.logging.save_rollouts and not settings.is_supervised:
        groups = rollout.prompts_per_step * num_hosts
        step = round(groups * _group_bytes(prompts, rollout.group_size, num_tokens, fields))
    if every and held_out:
        evaluation = round(len(held_out) * _group_bytes(held_out, settings.eval.num_samples, num_tokens, []))
    # One before step 1, and one after the last.
    num_evaluations = 1 + -(-steps // every) if every else 0
    return SampleFileSize(step, evaluation, step * steps + evaluation * num_evaluations)


def _group_bytes(prompts: Sequence[Prompt], group_size: int, num_tokens: int, fields: Sequence[str]) -> float:
    """Returns the mean size in bytes of a prompt's samples; `fields` are per-token fields besides behavior_logprobs."""
    numbers = np.random.default_rng(0).normal(size=num_tokens).astype(np.float32)
    sample = Sample(
        prompt=prompts[0],
        sample_index=0,
        group_id=0,
        completion_ids=np.full(num_tokens, TOKEN_ID, np.int32),
        completion=TOKEN_TEXT * num_tokens,
        behavior_logprobs=numbers,
        finish_reason="length",
        policy_version=0,
    )
    scored = dict.fromkeys(fields, numbers.tolist())
    measured = prompts[:: -(-len(prompts) // MAX_PROMPTS)]
    # All samples of a prompt but the first have the same size.
    drawn = (replace(sample, prompt=prompt, sample_index=index) for prompt in measured for index in (0, 1))
    records = share_rows(sample_to_record(one) | scored for one in drawn)
    sizes = [len(to_json_line(record, "an estimate")) for record in records]
    return (sum(sizes[::2]) + (group_size - 1) * sum(sizes[1::2])) / len(measured)
