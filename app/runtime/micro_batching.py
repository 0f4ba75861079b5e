"""Settings -> how the samples of a pass are cut into micro-batches; wired once for each role and for the update."""

from __future__ import annotations

from typing import NamedTuple

from app.batching.micro_batch_plan import TokenBudget, row_length
from app.batching.micro_batcher import FixedRows, PackedRows
from app.model.architecture import Architecture
from app.model.flops import forward_flops
from settings import Settings
from settings.schema.score import ForwardRole
from settings.schema.settings import Algorithm, Critic


class Longest(NamedTuple):
    """What rows must be able to hold, in tokens."""

    sample: int
    group: int = 0
    """A prompt with all its completions; 0 where that is not known."""

    @classmethod
    def of(cls, settings: Settings) -> Longest:
        """What a run can make."""
        prompt, completion = settings.data.max_prompt_length, settings.rollout.max_new_tokens
        return cls(prompt + completion, prompt + settings.rollout.group_size * completion)

    def with_tokens_behind(self, count: int, *, group_size: int) -> Longest:
        """The same, each sample longer by `count`."""
        return Longest(self.sample + count, self.group + count * group_size if self.group else 0)


def num_tokens_behind(settings: Settings, role: str) -> int:
    """What a role reads of a sample that was cut beyond its own tokens: the critic the value behind its last."""
    return 1 if role == "critic" and settings.algorithm.bootstrap_truncated else 0


def wire_role(
    settings: Settings, role: ForwardRole, architecture: Architecture, longest: Longest
) -> FixedRows | PackedRows:
    """How the samples that a role scores are cut."""
    scope = settings.score.of(role)
    behind = num_tokens_behind(settings, role)
    longest = longest.with_tokens_behind(behind, group_size=settings.rollout.group_size)
    if scope.max_tokens_per_device is None:
        work = forward_flops(architecture)
        return FixedRows(scope.rows_per_device, trim_tail=scope.strategy == "loop", work=work)
    return _packed(settings, architecture, longest, quota=scope.max_tokens_per_device)


def wire_update(
    settings: Settings, scope: Algorithm | Critic, architecture: Architecture, longest: Longest
) -> FixedRows | PackedRows:
    """How the samples of an optimizer step are cut for the network whose settings `scope` are."""
    if scope.max_tokens_per_device is None:
        return FixedRows(scope.rows_per_device, trim_tail=False, work=forward_flops(architecture))
    return _packed(settings, architecture, longest, quota=scope.max_tokens_per_device)


def _packed(settings: Settings, architecture: Architecture, longest: Longest, *, quota: int) -> PackedRows:
    batching = settings.batching
    budget = TokenBudget(
        max_tokens_per_device=quota,
        row_length=row_length(quota, longest.sample, longest_group=longest.group if batching.share_prompts else 0),
        share_prompts=batching.share_prompts,
        packing=batching.packing,
        balance=settings.algorithm.balance_batch,
        min_num_micro_batches=batching.min_num_micro_batches,
        num_micro_batches_divisible_by=batching.num_micro_batches_divisible_by,
    )
    return PackedRows(budget, forward_flops(architecture))
