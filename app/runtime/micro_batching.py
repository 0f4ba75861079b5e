"""Builds the batchers of scoring passes and of the update from the settings."""

from __future__ import annotations

from typing import NamedTuple

from app.batching.micro_batch_plan import TokenBudget, choose_row_length
from app.batching.micro_batcher import FixedRowBatcher, PackedRowBatcher
from app.model.architecture import Architecture
from app.model.flops import forward_flops
from settings import Settings
from settings.schema.algorithm import AlgorithmSettings, CriticSettings
from settings.schema.score import ForwardRole, MicroBatchSettings


class MaxLengths(NamedTuple):
    """The longest sample and group that rows must hold, in tokens."""

    sample: int
    group: int = 0
    """Tokens of a prompt with all its completions; 0 if unknown."""

    @classmethod
    def from_settings(cls, settings: Settings) -> MaxLengths:
        """Returns the largest lengths that a run can produce."""
        prompt, completion = settings.data.max_prompt_length, settings.rollout.max_new_tokens
        return cls(prompt + completion, prompt + settings.rollout.group_size * completion)

    def with_extra_tokens(self, count: int, *, group_size: int) -> MaxLengths:
        """Returns the lengths with `count` more tokens per sample."""
        return MaxLengths(self.sample + count, self.group + count * group_size if self.group else 0)


def num_bootstrap_tokens(settings: Settings, role: str) -> int:
    """Returns the number of extra tokens a role reads after a truncated sample: 1 for the critic's bootstrap value."""
    return 1 if role == "critic" and settings.algorithm.bootstrap_truncated else 0


def make_score_batcher(
    settings: Settings, role: ForwardRole, architecture: Architecture, max_lengths: MaxLengths
) -> FixedRowBatcher | PackedRowBatcher:
    """Returns the batcher of a role's scoring pass."""
    scope = settings.score.for_role(role)
    extra_tokens = num_bootstrap_tokens(settings, role)
    max_lengths = max_lengths.with_extra_tokens(extra_tokens, group_size=settings.rollout.group_size)
    if scope.max_tokens_per_device is None:
        cost = forward_flops(architecture)
        return FixedRowBatcher(scope.rows_per_device, trim_tail=not settings.score.is_scanned(role), sequence_cost=cost)
    return _make_packed_rows(settings, architecture, max_lengths, max_tokens_per_device=scope.max_tokens_per_device)


def make_update_batcher(
    settings: Settings,
    scope: AlgorithmSettings | CriticSettings | MicroBatchSettings,
    architecture: Architecture,
    max_lengths: MaxLengths,
) -> FixedRowBatcher | PackedRowBatcher:
    """Returns the batcher of an optimizer step for the network that `scope` configures."""
    if scope.max_tokens_per_device is None:
        return FixedRowBatcher(scope.rows_per_device, trim_tail=False, sequence_cost=forward_flops(architecture))
    return _make_packed_rows(settings, architecture, max_lengths, max_tokens_per_device=scope.max_tokens_per_device)


def _make_packed_rows(
    settings: Settings, architecture: Architecture, max_lengths: MaxLengths, *, max_tokens_per_device: int
) -> PackedRowBatcher:
    budget = TokenBudget(
        max_tokens_per_device=max_tokens_per_device,
        row_length=choose_row_length(
            max_tokens_per_device,
            max_lengths.sample,
            max_group_tokens=max_lengths.group,
        ),
        share_prompts=True,
        balance=settings.algorithm.balance_batch,
    )
    return PackedRowBatcher(budget, forward_flops(architecture))
