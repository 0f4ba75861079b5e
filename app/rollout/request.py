"""The record of what a caller asks generation for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.rollout.sampling import SamplingRules


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """How many samples of each prompt are drawn, how long they may become, by which rules and with which noise."""

    rules: SamplingRules
    seed: int
    """Seed of the run."""
    policy_version: int
    """Version of the weights. It keys the noise, so that the same prompt gives new samples at every training step."""
    group_size: int
    """Samples per prompt."""
    max_new_tokens: int | Sequence[int]
    """Largest number of completion tokens: one for all samples, or one for each sample in order."""
    first_group_id: int = 0
    """Group id of the first prompt."""
