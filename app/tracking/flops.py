"""FLOPs of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from app.batching.micro_batch_plan import SequenceCost, SequenceLengths
from app.mesh.chips import TPU_CHIPS
from app.model.decoder import Decoder, DecoderDefinition
from app.model.flops import forward_flops, lm_head_flops, token_flops
from app.runtime.reward_model import RewardModelSpec
from app.runtime.session import Session
from settings import Settings
from settings.schema.algorithm import AlgorithmSettings, CriticSettings
from settings.schema.score import ForwardRole

PEAK_FLOPS = {
    **{chip.device_kind: chip.flops for chip in TPU_CHIPS.values()},
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
"""Dense bfloat16 peak of one device in FLOP/s, by prefix of its device kind. Source: the vendors' data sheets."""


class NetworkPass(NamedTuple):
    """The FLOPs of a network's passes over the samples of a step."""

    sequence_flops: SequenceCost
    """Lengths in tokens -> FLOPs of the blocks for a sequence of each length."""
    head_flops: int
    """FLOPs of the LM head for a completion token; 0 for the single output of critic and reward model."""
    shares_prompts: bool
    """Whether a prompt is computed once for all its samples."""

    def total(self, lengths: SequenceLengths) -> float:
        """Returns the FLOPs over all samples."""
        prompts = self.sequence_flops(lengths.prompts)
        completions = self.sequence_flops(lengths.totals) - prompts + self.head_flops * lengths.completions
        if self.shares_prompts:
            prompts = prompts[np.unique(lengths.prompt_indices, return_index=True)[1]]
        # The sum over a step of a large model exceeds int64.
        return float(prompts.sum(dtype=np.float64) + completions.sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class StepFlops:
    """The network passes over the samples of a step."""

    rollout: NetworkPass
    passes: tuple[NetworkPass, ...]
    """Scoring and updates."""
    reward_model: NetworkPass | None = None

    def total(
        self, *, sampled: SequenceLengths | None, learned: SequenceLengths, rewarded: Sequence[SequenceLengths] = ()
    ) -> float:
        """Returns the FLOPs that a step needs; neither padding nor recomputation counts.

        Source: Chowdhery et al. 2022 (PaLM), appendix B, with the visible pairs of causal attention only.

        Args:
            sampled: lengths of the samples of all rounds, over all hosts; None if none were generated.
            learned: lengths of the samples used for scoring and updates.
            rewarded: lengths of the conversations of each pass of the reward model.
        """
        flops = sum(one.total(learned) for one in self.passes)
        if sampled is not None:
            flops += self.rollout.total(sampled)
        if self.reward_model is not None:
            flops += sum(self.reward_model.total(lengths) for lengths in rewarded)
        return flops


def make_step_flops(
    settings: Settings, session: Session, reward_model: RewardModelSpec | None, *, trains_policy: bool = True
) -> StepFlops:
    """Returns the passes of a step through policy, reference, critic and reward model."""
    policy = session.model_spec.policy_definition
    critic = session.scoring.critic and session.scoring.critic.spec.definition
    networks: Mapping[ForwardRole, DecoderDefinition | None] = {
        "policy": policy,
        "reference": session.model_spec.definition,
        "critic": critic,
        "reward": reward_model and reward_model.definition,
    }

    def scoring(role: ForwardRole) -> NetworkPass:
        definition = networks[role]
        assert definition is not None
        return network_pass(definition, shares_prompts=settings.score.for_role(role).max_tokens_per_device is not None)

    def updating(definition: DecoderDefinition, scope: AlgorithmSettings | CriticSettings) -> NetworkPass:
        shares_prompts = scope.max_tokens_per_device is not None
        return network_pass(definition, shares_prompts=shares_prompts, updates=settings.algorithm.epochs)

    updates = [updating(policy, settings.algorithm)] if trains_policy else []
    updates += [updating(critic, settings.critic)] if critic else []
    return StepFlops(
        rollout=network_pass(session.to_decode_weights.definition, shares_prompts=True),
        passes=(*map(scoring, settings.scored_roles), *updates),
        reward_model=scoring("reward") if reward_model else None,
    )


def network_pass(definition: DecoderDefinition, *, shares_prompts: bool, updates: int = 0) -> NetworkPass:
    """Returns the FLOPs of a forward pass: those by which batches are balanced, plus adapters and LM head.

    Backward costs twice as much, but of frozen matrices, which need no gradient of their own, as much as forward.

    Args:
        updates: number of passes forward and backward in place of one forward pass.
    """
    blocks, has_adapters = forward_flops(definition.architecture), definition.lora is not None
    adapters = 2 * definition.num_trainable if has_adapters else 0
    frozen = token_flops(definition.architecture) if has_adapters else 0
    head = lm_head_flops(definition.architecture) if definition.network_class is Decoder else 0

    def flops(lengths: np.ndarray) -> Int64[np.ndarray, "N"]:
        forward = blocks(lengths) + adapters * lengths
        return updates * (3 * forward - frozen * lengths) if updates else forward

    of_head = updates * (2 if has_adapters else 3) * head if updates else head
    return NetworkPass(flops, of_head, shares_prompts)
