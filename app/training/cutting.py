"""Settings -> how the samples of a pass are cut into micro-batches; wired once for each role and for the update."""

from __future__ import annotations

from app.batching.micro_batches import FixedRows, PackedRows
from app.batching.plan import TokenBudget, row_length
from app.policy.architecture import Architecture
from app.policy.flops import forward_flops
from settings import Settings
from settings.schema import ScoredRole


def longest_sample(settings: Settings) -> int:
    """Tokens of the longest sample that a run can make."""
    return settings.data.max_prompt_length + settings.rollout.max_new_tokens


def wire_role(
    settings: Settings, role: ScoredRole, architecture: Architecture, *, longest: int
) -> FixedRows | PackedRows:
    """How the samples that a role scores are cut; none of them has more than `longest` tokens."""
    scope = settings.score.of(role)
    if scope.max_tokens_per_device is None:
        return FixedRows(scope.rows_per_device, trim_tail=scope.strategy == "loop")
    return _packed(settings, architecture, quota=scope.max_tokens_per_device, longest=longest)


def wire_update(
    settings: Settings, architecture: Architecture, *, longest: int | None = None
) -> FixedRows | PackedRows:
    """How the samples of an optimizer step are cut; none has more than `longest` tokens, by default a run's longest."""
    algorithm = settings.algorithm
    if algorithm.max_tokens_per_device is None:
        return FixedRows(algorithm.rows_per_device, trim_tail=False)
    longest = longest or longest_sample(settings)
    return _packed(settings, architecture, quota=algorithm.max_tokens_per_device, longest=longest)


def _packed(settings: Settings, architecture: Architecture, *, quota: int, longest: int) -> PackedRows:
    batching = settings.batching
    budget = TokenBudget(
        max_tokens_per_device=quota,
        row_length=row_length(quota, longest),
        share_prompts=batching.share_prompts,
        packing=batching.packing,
        balance=settings.algorithm.balance_batch,
        min_num_micro_batches=batching.min_num_micro_batches,
        num_micro_batches_divisible_by=batching.num_micro_batches_divisible_by,
    )
    return PackedRows(budget, forward_flops(architecture))
