"""The longest rows of a run's networks, which the attention of its devices must be able to compute."""

from __future__ import annotations

from typing import Any

import jax

from app.batching.micro_batch_shapes import bucket_length
from app.batching.micro_batcher import PackedRowBatcher
from app.model.architecture import Architecture
from app.model.attention.packed import architecture_blocking
from app.runtime.micro_batching import MaxLengths, make_score_batcher, make_update_batcher, num_bootstrap_tokens
from app.runtime.reward_model import NetworkSpec, make_reward_batcher
from app.runtime.scoring import ScoringSession
from settings import Settings
from settings.schema.score import ScoredRole


def attention_rows(
    settings: Settings, session: ScoringSession, reward_model: NetworkSpec | None
) -> list[tuple[Architecture, int]]:
    """Returns the networks that update and score in a run, each with the tokens of its longest rows.

    A reward model without a token budget is assumed to read conversations as long as the policy's samples.
    """
    longest = MaxLengths.from_settings(settings)
    updated: list[tuple[ScoredRole, Any]] = [("policy", settings.algorithm)]
    if settings.has_critic:
        updated.append(("critic", settings.critic))
    passes = []
    for role, scope in updated:
        network = session.architecture_of(role)
        passes.append((network, make_update_batcher(settings, scope, network, longest), longest.sample))
    for role in settings.scored_roles:
        network, num_tokens = session.architecture_of(role), longest.sample + num_bootstrap_tokens(settings, role)
        passes.append((network, make_score_batcher(settings, role, network, longest), num_tokens))
    if reward_model is not None:
        network = reward_model.architecture
        passes.append((network, make_reward_batcher(settings, network), longest.sample + 1))
    return [
        (
            network,
            batcher.budget.row_length if isinstance(batcher, PackedRowBatcher) else bucket_length(num_tokens),
        )
        for network, batcher, num_tokens in passes
    ]


def check_attention_rows(settings: Settings, session: ScoringSession, reward_model: NetworkSpec | None) -> None:
    """Raises InputError if `model.attention` needs a kernel that cannot hold the longest rows of a run."""
    with jax.set_mesh(session.mesh):
        for network, num_tokens in attention_rows(settings, session, reward_model):
            architecture_blocking(network, num_tokens, settings.model.dtype)
