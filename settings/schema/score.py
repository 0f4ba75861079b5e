"""The settings of scoring: how the samples of each role are cut into micro-batches."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from settings.schema.section import Section

ScoredRole = Literal["policy", "reference", "critic"]
"""Whose logprobs a sample may be given, and whose values."""

SCORED_ROLES: tuple[ScoredRole, ...] = get_args(ScoredRole)

ForwardRole = Literal[ScoredRole, "reward"]
"""Whose forward passes are cut by settings of their own."""

MAX_TOKENS_PER_DEVICE = 2**24
"""Tokens on one device; beyond this a quota is a slip of the pen."""


class MicroBatchSettings(Section):
    """How samples are cut for a forward pass: dynamically, under a token quota, or into fixed rows.

    `settings.loading.micro_batching` settles what is null. Dynamic then has its quota alone; fixed has a strategy, and
    `rows_per_device` unless that is `off`.
    """

    dynamic: bool | None = Field(
        default=None,
        description="Packed rows under a token quota (true), or fixed rows of one sample (false). When null: as the "
        "next three say; where they are silent that of `score`, then true.",
    )
    max_tokens_per_device: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TOKENS_PER_DEVICE,
        description="Token quota of a micro-batch on each device; chooses dynamic. When null: that of `score`, then of "
        "`algorithm`. Scoring keeps nothing for a gradient: where memory is left it may be larger than the update's.",
    )
    rows_per_device: int | None = Field(
        default=None,
        ge=1,
        description="Samples of a fixed micro-batch on each device; chooses fixed. When null: that of `score`, then 8. "
        "Lower it when memory runs out.",
    )
    strategy: Literal["off", "loop", "scan"] | None = Field(
        default=None,
        description="Chooses fixed: one pass over all samples (off), micro-batches one after another with a shorter "
        "last one (loop), or full ones in one compiled scan (scan). When null: that of `score`, then loop.",
    )


class ReferenceSettings(MicroBatchSettings):
    offload: bool = Field(
        default=False,
        description="Keep the reference's weights in host memory between scoring calls: for device memory that is too "
        "small for both models, at the cost of a transfer each time.",
    )


class ScoreSettings(MicroBatchSettings):
    policy: MicroBatchSettings = MicroBatchSettings()
    reference: ReferenceSettings = ReferenceSettings()
    critic: MicroBatchSettings = MicroBatchSettings()
    reward: MicroBatchSettings = MicroBatchSettings()

    def for_role(self, role: ForwardRole) -> MicroBatchSettings:
        """The role's own micro-batches; once loaded, with all that it inherits."""
        return getattr(self, role)
