"""Settings of scoring: the micro-batches of each role."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from settings.schema.section import Section

ScoredRole = Literal["policy", "reference", "critic"]
"""Roles whose logprobs or values are added to samples by scoring."""

SCORED_ROLES: tuple[ScoredRole, ...] = get_args(ScoredRole)

ForwardRole = Literal[ScoredRole, "reward"]
"""Roles with their own micro-batch settings."""

MAX_TOKENS_PER_DEVICE = 2**24
"""Upper bound of token quotas, which catches typing errors."""


class MicroBatchSettings(Section):
    """The micro-batches of a role: dynamic under a token quota, or with a fixed number of samples.

    `settings.loading.micro_batching` fills in null values. After that, dynamic micro-batches have only a quota, and
    fixed ones only `rows_per_device`, or neither if `score.strategy` is `off`.
    """

    max_tokens_per_device: int | None = Field(default=None, ge=1, le=MAX_TOKENS_PER_DEVICE)
    """Token quota of a micro-batch on each device; selects dynamic micro-batches. When null, that of `score`, unless
    `rows_per_device` is set."""
    rows_per_device: int | None = Field(default=None, ge=1)
    """Samples of a fixed micro-batch on each device; selects fixed micro-batches. When null, that of `score`, unless
    `max_tokens_per_device` is set. Lower it if memory runs out."""


class ReferenceSettings(MicroBatchSettings):
    offload: bool = False
    """Keeps the reference model's weights in host memory between scoring passes. Set to true if both models do not fit
    in device memory; each pass then transfers the weights."""


class ScoreSettings(Section):
    dynamic: bool | None = None
    """Micro-batches of packed rows under a token quota (true), or with a fixed number of samples (false). When null, it
    follows from which of the next three settings is set, else true."""
    max_tokens_per_device: int | None = Field(default=None, ge=1, le=MAX_TOKENS_PER_DEVICE)
    """Token quota of a micro-batch on each device; selects dynamic micro-batches. When null, that of `algorithm`. It
    may exceed the update's quota, because scoring stores no activations for gradients."""
    rows_per_device: int | None = Field(default=None, ge=1)
    """Samples of a fixed micro-batch on each device; selects fixed micro-batches. When null, 8 if they are selected
    otherwise. Lower it if memory runs out."""
    strategy: Literal["off", "loop", "scan"] | None = None
    """Selects fixed micro-batches, for every role without a quota of its own: one pass over all samples (off), a loop
    over micro-batches with a shorter last one (loop), or one compiled scan over full ones (scan). When null, loop."""
    policy: MicroBatchSettings = MicroBatchSettings()
    reference: ReferenceSettings = ReferenceSettings()
    critic: MicroBatchSettings = MicroBatchSettings()
    reward: MicroBatchSettings = MicroBatchSettings()

    def for_role(self, role: ForwardRole) -> MicroBatchSettings:
        """Returns the micro-batch settings of a role; after loading, inherited values are filled in."""
        return getattr(self, role)

    def is_scanned(self, role: ForwardRole) -> bool:
        """Returns whether one compiled scan computes all micro-batches of a role."""
        return self.strategy == "scan" and self.for_role(role).rows_per_device is not None
