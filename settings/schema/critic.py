"""Settings of the critic: its checkpoint, learning rate and micro-batches."""

from __future__ import annotations

from pydantic import Field

from settings.schema.score import MAX_TOKENS_PER_DEVICE
from settings.schema.section import Section


class CriticSettings(Section):
    path: str | None = Field(default=None, min_length=1)
    """Checkpoint that the critic starts from, with the policy's tokenizer: a causal language model, whose LM head is
    replaced by a zero value head, or a sequence classifier with one label. `model.path` when null."""
    revision: str | None = None
    """Commit, tag or branch of a hub id in `critic.path`; its newest commit when null."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic's AdamW, whose other settings are those in `optimizer`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Training steps at the start of the run in which only the critic learns."""
    clip_range: float | None = Field(default=0.2, gt=0)
    """Values that move further than this from those before the step's updates give no gradient; null disables this."""
    max_tokens_per_device: int | None = Field(default=32768, ge=1, le=MAX_TOKENS_PER_DEVICE)
    """Token quota of a micro-batch of the critic on each device; selects dynamic micro-batches. It can exceed the
    policy's, because the critic has no logits. Lower it if memory runs out. If neither this nor `rows_per_device` is
    set, `algorithm` selects for the critic, too."""
    rows_per_device: int | None = Field(default=None, ge=1)
    """Samples of a fixed micro-batch of the critic on each device; `algorithm.rows_per_device` when null."""
    lam: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the critic's targets, 1.0 in VAPO; `algorithm.lam` when null."""
