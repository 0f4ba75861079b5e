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
    epochs = settings.algorithm.epochs
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
        return forward_pass(definition, shares_prompts=settings.score.for_role(role).max_tokens_per_device is not None)

    def updating(definition: DecoderDefinition, scope: AlgorithmSettings | CriticSettings) -> NetworkPass:
        return update_passes(definition, epochs, shares_prompts=scope.max_tokens_per_device is not None)

    updates = [updating(policy, settings.algorithm)] if trains_policy else []
    updates += [updating(critic, settings.critic)] if critic else []
    return StepFlops(
        rollout=forward_pass(session.to_decode_weights.definition, shares_prompts=True),
        passes=(*map(scoring, settings.scored_roles), *updates),
        reward_model=scoring("reward") if reward_model else None,
    )


def forward_pass(definition: DecoderDefinition, *, shares_prompts: bool) -> NetworkPass:
    """Returns the FLOPs of a forward pass: those by which batches are balanced, plus adapters and LM head."""
    blocks = forward_flops(definition.architecture)
    adapters = 0 if definition.lora is None else 2 * definition.num_trainable
    head = lm_head_flops(definition.architecture) if definition.network_class is Decoder else 0

    def flops(lengths: np.ndarray) -> Int64[np.ndarray, "N"]:
        return blocks(lengths) + adapters * lengths

    return NetworkPass(flops, head, shares_prompts)


def update_passes(definition: DecoderDefinition, epochs: int, *, shares_prompts: bool) -> NetworkPass:
    """Returns the FLOPs of `epochs` passes forward and backward, which costs twice as much.

    Frozen matrices need no gradient of their own: backward costs them as much as forward.
    """
    forward = forward_pass(definition, shares_prompts=shares_prompts)
    frozen = 0 if definition.lora is None else token_flops(definition.architecture)
    frozen_head = 0 if definition.lora is None else forward.head_flops

    def flops(lengths: np.ndarray) -> Int64[np.ndarray, "N"]:
        return epochs * (3 * forward.sequence_flops(lengths) - frozen * lengths)

    return NetworkPass(flops, epochs * (3 * forward.head_flops - frozen_head), shares_prompts)
