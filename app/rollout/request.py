"""The request that a caller passes to a generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.model.architecture import RouteShape
from app.rollout.sampling.token_sampling import SamplingRules


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What to generate for each prompt: number of samples, maximum length, stop strings, sampling rules and seed."""

    rules: SamplingRules
    seed: int
    """Seed of the run."""
    policy_version: int
    """Version of the weights. It is part of the PRNG keys, so that a prompt gives new samples at every step."""
    group_size: int
    """Number of samples per prompt."""
    max_new_tokens: int | Sequence[int]
    """Maximum number of completion tokens: one number for all samples, or one per sample in order."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; see `app.rollout.sequence.stop_length`."""
    first_group_id: int = 0
    """Group id of the first prompt."""
    route_shape: RouteShape | None = None
    """Numbers of layers and of experts per token in the recorded routes; None = no routes are recorded."""
    is_evaluation: bool = False
    """Whether this is an evaluation, so that the lengths of its samples do not influence the schedule of training."""
