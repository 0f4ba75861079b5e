"""The settings of scoring: how the samples of each role are cut into micro-batches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.section import Section

ScoredRole = Literal["policy", "reference"]
"""Whose logprobs a sample may be given."""

MAX_QUOTA = 2**24
"""Tokens on one device; beyond this a quota is a slip of the pen."""


class MicroBatches(Section):
    """How samples are cut for a forward pass: dynamically, under a token quota, or into fixed rows.

    A null is settled by `settings.micro_batching`. After that `dynamic` is a bool, and either `max_tokens_per_device`
    is set and the last two are null, or `strategy` is set, `rows_per_device` too unless that is `off`, and the quota null.
    """

    dynamic: bool | None = Field(
        default=None,
        description="Pack samples into rows up to a token quota (true), or one sample a row (false). Null: as the other "
        "three say, true where they are silent; a role's null takes what `score` says. False only to compare or debug.",
    )
    max_tokens_per_device: int | None = Field(
        default=None,
        ge=1,
        le=MAX_QUOTA,
        description="Token quota of a micro-batch on each device; chooses dynamic. `algorithm.max_tokens_per_device` "
        "when null. Scoring keeps nothing for a gradient: raise it where memory is left, lower it when it runs out.",
    )
    rows_per_device: int | None = Field(
        default=None,
        ge=1,
        description="Samples of a fixed micro-batch on each device; chooses fixed. 8 when null. Lower it when memory "
        "runs out.",
    )
    strategy: Literal["off", "loop", "scan"] | None = Field(
        default=None,
        description="Chooses fixed: one pass over all samples (off), micro-batches one after another with a shorter "
        "last one (loop), or all in one compiled scan (scan: one compilation whatever the count). loop when null.",
    )


class Reference(MicroBatches):
    offload: bool = Field(
        default=False,
        description="Keep the reference's weights in host memory between scoring calls: saves its share of device "
        "memory, costs a transfer a step.",
    )


class Score(MicroBatches):
    policy: MicroBatches = MicroBatches()
    reference: Reference = Reference()

    def of(self, role: ScoredRole) -> MicroBatches:
        """The role's own micro-batches; once loaded, with all that it inherits."""
        return getattr(self, role)
