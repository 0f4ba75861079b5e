"""The settings of scheduling rollouts: segments, P-DSR and workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.section import Section

MAX_TOKENS = 2**24
"""Of a limit or a budget; beyond this it is a slip of the pen."""
MAX_SLOTS = 2**16


class Segment(Section):
    """How many tokens a worker decodes before it looks up."""

    rule: Literal["auto", "budget", "balance"] = Field(
        default="auto",
        description="Length of a segment: capacity / active rows (budget), or where an edge costs what finished rows "
        "idle (balance); auto is balance while samples wait for slots, else budget.",
    )
    min: int = Field(default=64, ge=1, le=MAX_TOKENS, description="Tokens of a row in a segment, at least.")
    max: int = Field(default=4096, ge=1, le=MAX_TOKENS, description="Tokens of a row in a segment, at most.")
    capacity: int = Field(
        default=8192, ge=1, le=MAX_TOKENS, description="Tokens of all rows in a segment, for the rule budget."
    )
    overhead_steps: float = Field(
        default=0.5,
        gt=0,
        le=1000,
        description="What the edge of a segment costs, in decode steps, for the rule balance.",
    )
