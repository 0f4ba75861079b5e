"""Builds the batchers of scoring passes and of the update from the settings."""

from __future__ import annotations

from typing import NamedTuple

from app.batching.micro_batch_plan import TokenBudget, choose_row_length
from app.batching.micro_batcher import FixedRowBatcher, PackedRowBatcher
from app.model.architecture import Architecture, forward_flops
from settings import Settings
from settings.schema.algorithm import AlgorithmSettings, CriticSettings, ForwardRole, MicroBatchSettings


class MaxLengths(NamedTuple):
    """Maximum numbers of tokens in a sample and in a group, for which a row must have space."""

    sample: int
    group: int = 0
    """Tokens of a prompt with all its completions; 0 if unknown."""

    @classmethod
    def from_settings(cls, settings: Settings) -> MaxLengths:
        """Returns the largest lengths that a run can produce."""
        prompt, completion = settings.data.max_prompt_length, settings.rollout.max_new_tokens
        return cls(prompt + completion, prompt + settings.rollout.group_size * completion)


def num_bootstrap_tokens(settings: Settings, role: str) -> int:
    """Returns the number of positions added after a truncated sample: 1 for a critic that bootstraps, otherwise 0."""
    return 1 if role == "critic" and settings.algorithm.bootstrap_truncated else 0


def make_score_batcher(
    settings: Settings, role: ForwardRole, architecture: Architecture, max_lengths: MaxLengths
) -> FixedRowBatcher | PackedRowBatcher:
    """Returns the batcher for the scoring pass of a role."""
    scope = settings.score.for_role(role)
    extra = num_bootstrap_tokens(settings, role)
    of_group = max_lengths.group and max_lengths.group + extra * settings.rollout.group_size
    max_lengths = MaxLengths(max_lengths.sample + extra, of_group)
    return make_batcher(settings, scope, architecture, max_lengths, trim_tail=not settings.score.is_scanned(role))


def make_batcher(
    settings: Settings,
    scope: AlgorithmSettings | CriticSettings | MicroBatchSettings,
    architecture: Architecture,
    max_lengths: MaxLengths,
    *,
    trim_tail: bool = False,
) -> FixedRowBatcher | PackedRowBatcher:
    """Returns the batcher of a pass whose settings are `scope`: an update of a network, or scoring.

    Args:
        trim_tail: whether fixed rows may be fewer in the last micro-batch.
    """
    cost, tokens = forward_flops(architecture), scope.max_tokens_per_device
    if tokens is None:
        return FixedRowBatcher(scope.rows_per_device, trim_tail=trim_tail, sequence_cost=cost)
    row_length = choose_row_length(tokens, max_lengths.sample, max_group_tokens=max_lengths.group)
    balance = settings.algorithm.balance_batch
    return PackedRowBatcher(TokenBudget(tokens, row_length, share_prompts=True, balance=balance), cost)
