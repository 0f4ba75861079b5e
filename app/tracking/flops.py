"""FLOPs of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from app.distributed.collectives import sum_over_hosts
from app.mesh.tpu_chips import TPU_CHIPS
from app.model.decoder import DecoderDefinition
from app.records.sample import Sample
from app.runtime.session import Session
from settings import Settings
from settings.schema.algorithm import AlgorithmSettings
from settings.schema.critic import CriticSettings
from settings.schema.score import ScoredRole

PEAK_FLOPS = {
    **{chip.device_kind: chip.flops for chip in TPU_CHIPS.values()},
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
"""Dense bfloat16 peak of one device in FLOP/s, by prefix of its device kind. Source: the vendors' data sheets."""


class TokenCounts(NamedTuple):
    """Numbers of tokens in samples, over all hosts."""

    prompt: int
    """Prompt tokens, counted once for each sample of the prompt."""
    completion: int

    @classmethod
    def count_over_hosts(cls, *parts: Sequence[Sample]) -> list[TokenCounts]:
        """Counts the tokens of each part; hosts may have different numbers of samples."""
        local = [
            (sum(len(s.prompt.token_ids) for s in part), sum(len(s.completion_ids) for s in part)) for part in parts
        ]
        return [cls(*counts) for counts in sum_over_hosts(np.asarray(local, np.int64)).tolist()]


NO_TOKENS = TokenCounts(0, 0)


class NetworkPass(NamedTuple):
    """One pass of a network over the samples of a step."""

    flops_per_token: int
    shares_prompts: bool
    """Whether a prompt is computed once for all its samples."""


@dataclass(frozen=True, slots=True)
class StepFlops:
    """The network passes over the tokens of a step."""

    group_size: int
    rollout: NetworkPass
    passes: tuple[NetworkPass, ...]
    """Scoring and updates."""

    def total(self, *, sampled: TokenCounts, learned: TokenCounts) -> float:
        """Returns the FLOPs of a step: 2 N per token forward, 6 N forward and backward.

        Source: Chowdhery et al. 2022 (PaLM), appendix B.

        Args:
            sampled: tokens of all rounds.
            learned: tokens of the samples used for scoring and updates.
        """
        return self._flops(self.rollout, sampled) + sum(self._flops(one, learned) for one in self.passes)

    def _flops(self, one: NetworkPass, tokens: TokenCounts) -> float:
        prompt_tokens = tokens.prompt / (self.group_size if one.shares_prompts else 1)
        return one.flops_per_token * (prompt_tokens + tokens.completion)


def make_step_flops(settings: Settings, session: Session, *, trains_policy: bool = True) -> StepFlops:
    """Returns the passes of a step through policy, reference and critic."""
    algorithm, shares = settings.algorithm, settings.batching.share_prompts
    model, policy = session.model_spec.definition, session.model_spec.policy_definition
    critic = session.critic.spec.definition if session.critic else None
    networks: Mapping[ScoredRole, DecoderDefinition | None] = {"policy": policy, "reference": model, "critic": critic}

    def scoring(role: ScoredRole) -> NetworkPass:
        definition = networks[role]
        assert definition is not None
        return NetworkPass(2 * definition.num_parameters, bool(shares and settings.score.for_role(role).dynamic))

    def updating(definition: DecoderDefinition, scope: AlgorithmSettings | CriticSettings) -> NetworkPass:
        # Forward and backward to the inputs through every weight, and backward to the trained weights.
        flops = 4 * definition.num_parameters + 2 * definition.num_trainable
        return NetworkPass(flops * algorithm.epochs, bool(shares and scope.dynamic_microbatch))

    updates = [updating(policy, algorithm)] if trains_policy else []
    updates += [updating(critic, settings.critic)] if critic else []
    return StepFlops(
        group_size=settings.rollout.group_size,
        rollout=NetworkPass(2 * session.engine.definition.num_parameters, shares_prompts=True),
        passes=(*map(scoring, settings.scored_roles), *updates),
    )
