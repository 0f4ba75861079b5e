"""Settings -> how the samples of a pass are cut into micro-batches; wired once for each role and for the update."""

from __future__ import annotations

from typing import NamedTuple

from app.batching.micro_batch_plan import TokenBudget, choose_row_length
from app.batching.micro_batcher import FixedRowBatcher, PackedRowBatcher
from app.model.architecture import Architecture
from app.model.flops import forward_flops
from settings import Settings
from settings.schema.score import ForwardRole
from settings.schema.settings import AlgorithmSettings, CriticSettings


class MaxLengths(NamedTuple):
    """What rows must be able to hold, in tokens."""

    sample: int
    group: int = 0
    """A prompt with all its completions; 0 where that is not known."""

    @classmethod
    def from_settings(cls, settings: Settings) -> MaxLengths:
        """What a run can make."""
        prompt, completion = settings.data.max_prompt_length, settings.rollout.max_new_tokens
        return cls(prompt + completion, prompt + settings.rollout.group_size * completion)

    def with_extra_tokens(self, count: int, *, group_size: int) -> MaxLengths:
        """The same, each sample longer by `count`."""
        return MaxLengths(self.sample + count, self.group + count * group_size if self.group else 0)


def num_bootstrap_tokens(settings: Settings, role: str) -> int:
    """What a role reads of a sample that was cut beyond its own tokens: the critic the value behind its last."""
    return 1 if role == "critic" and settings.algorithm.bootstrap_truncated else 0


def make_score_batcher(
    settings: Settings, role: ForwardRole, architecture: Architecture, max_lengths: MaxLengths
) -> FixedRowBatcher | PackedRowBatcher:
    """How the samples that a role scores are cut."""
    scope = settings.score.for_role(role)
    behind = num_bootstrap_tokens(settings, role)
    max_lengths = max_lengths.with_extra_tokens(behind, group_size=settings.rollout.group_size)
    if scope.max_tokens_per_device is None:
        work = forward_flops(architecture)
        return FixedRowBatcher(scope.rows_per_device, trim_tail=scope.strategy == "loop", sequence_cost=work)
    return _make_packed_rows(settings, architecture, max_lengths, max_tokens_per_device=scope.max_tokens_per_device)


def make_update_batcher(
    settings: Settings, scope: AlgorithmSettings | CriticSettings, architecture: Architecture, max_lengths: MaxLengths
) -> FixedRowBatcher | PackedRowBatcher:
    """How the samples of an optimizer step are cut for the network whose settings `scope` are."""
    if scope.max_tokens_per_device is None:
        return FixedRowBatcher(scope.rows_per_device, trim_tail=False, sequence_cost=forward_flops(architecture))
    return _make_packed_rows(settings, architecture, max_lengths, max_tokens_per_device=scope.max_tokens_per_device)


def _make_packed_rows(
    settings: Settings, architecture: Architecture, max_lengths: MaxLengths, *, max_tokens_per_device: int
) -> PackedRowBatcher:
    batching = settings.batching
    budget = TokenBudget(
        max_tokens_per_device=max_tokens_per_device,
        row_length=choose_row_length(
            max_tokens_per_device,
            max_lengths.sample,
            max_group_tokens=max_lengths.group if batching.share_prompts else 0,
        ),
        share_prompts=batching.share_prompts,
        packing=batching.packing,
        balance=settings.algorithm.balance_batch,
        min_num_micro_batches=batching.min_num_micro_batches,
        num_micro_batches_divisible_by=batching.num_micro_batches_divisible_by,
    )
    return PackedRowBatcher(budget, forward_flops(architecture))
