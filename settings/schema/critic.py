"""The settings of the critic: what it starts from, how fast it learns, and how its samples are cut."""

from __future__ import annotations

from pydantic import Field

from settings.schema.score import MAX_TOKENS_PER_DEVICE
from settings.schema.section import Section


class CriticSettings(Section):
    path: str | None = Field(
        default=None,
        min_length=1,
        description="Checkpoint that the critic of GAE starts from, of the same tokenizer: a causal language model, "
        "whose head gives way to a value head of zeros, or a sequence classifier of one label; `model.path` when null.",
    )
    revision: str | None = Field(
        default=None, description="Commit, tag or branch of a hub id in `critic.path`; its newest commit when null."
    )
    learning_rate: float = Field(
        default=1e-5, gt=0, description="Peak rate of the critic's AdamW; all else of it is as `optimizer` says."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Training steps at the start in which only the critic learns."
    )
    clip_range: float | None = Field(
        default=0.2,
        gt=0,
        description="Values further than this from those scored before the step's updates stop learning; null = off.",
    )
    dynamic_microbatch: bool | None = Field(
        default=None, description="As `algorithm.dynamic_microbatch`, whose choice it takes when null and undecided."
    )
    max_tokens_per_device: int | None = Field(
        default=32768,
        ge=1,
        le=MAX_TOKENS_PER_DEVICE,
        description="Token quota of an update micro-batch of the critic on each device, which holds no logits; chooses "
        "dynamic. Lower it when memory runs out.",
    )
    rows_per_device: int | None = Field(
        default=None,
        ge=1,
        description="Samples of a fixed micro-batch of the critic; those of `algorithm` when null.",
    )
    lam: float | None = Field(
        default=None, ge=0, le=1, description="Lambda of the critic's targets, 1.0 in VAPO; null = `algorithm.lam`."
    )
