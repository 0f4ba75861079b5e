"""The settings of the algorithm: where advantages come from, what the loss is, and how a step is cut into updates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.schema.score import MAX_TOKENS_PER_DEVICE
from settings.schema.section import Section

CRITIC_ESTIMATORS = frozenset({"gae", "vtrace"})
"""Values of `algorithm.estimator` that need a second network."""


class AlgorithmSettings(Section):
    name: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gspo", "dapo", "cispo", "ppo"] = Field(
        default="grpo",
        description="A paper: decides what is left null of `estimator`, `ratio_level`, `clip`, `clip_low`, "
        "`clip_high`, `loss_aggregation`, `kl_in`, `filter`, `whiten_advantages` and `shuffle`, nothing else.",
    )
    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gae", "vtrace"] | None = Field(
        default=None,
        description="Where advantages come from: siblings compared as in GRPO, Dr. GRPO or RLOO, the discounted "
        "rewards of each token, GAE with a critic, or V-trace, which is GAE where the values behind a token and the "
        "critic's targets are corrected for a sampler that is not the policy. Derived when null, as the next seven.",
    )
    ratio_level: Literal["token", "sequence"] | None = Field(
        default=None,
        description="Probability ratio of each token, or for all tokens of a sample the geometric mean of theirs.",
    )
    clip: Literal["ppo", "cispo"] | None = Field(
        default=None,
        description="What lies outside the clip: no gradient (ppo), or one whose weight is the clipped ratio (cispo).",
    )
    beta: float = Field(default=0.0, ge=0, description="Weight of the KL penalty; 0 = no reference model in memory.")
    kl_in: Literal["loss", "reward"] | None = Field(
        default=None,
        description="Where the penalty goes. Derived when null and beta > 0: `reward` for rloo, "
        "reinforce_plus_plus and ppo, `loss` for the others. In the reward it is summed over the sample, before "
        "samples are compared, or stays at its token, where tokens are credited.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None,
        description="Schulman's estimators of KL(policy || reference). Derived when null and beta > 0: k3 in the loss, "
        "k1 in the reward.",
    )
    clip_low: float | None = Field(
        default=None,
        gt=0,
        description="Ratio is clipped below 1 - clip_low; 1 or more, with `clip: cispo` alone, is no bound. Derived "
        "when null: 0.2, 3e-4 for gspo, 10 for cispo.",
    )
    clip_high: float | None = Field(
        default=None,
        gt=0,
        description="Ratio is clipped above 1 + clip_high. Derived when null: 0.2, 0.28 for dapo, 4e-4 for gspo.",
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="Ratio above which tokens with a negative advantage stop counting, 3.0 is usual; null = off.",
    )
    entropy_coef: float = Field(
        default=0.0, ge=0, description="Weight of an entropy bonus, aggregated like the loss; 0 = off."
    )
    loss_aggregation: (
        Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant-length"] | None
    ) = Field(
        default=None,
        description="Mean over all tokens; mean over samples of their own means, sums, or sums divided by "
        "`rollout.max_new_tokens`. Derived when null: constant-length for dr_grpo, "
        "sequence-mean-token-sum for rloo, sequence-mean-token-mean for gspo, token-mean for the others.",
    )
    filter: Literal["none", "zero_variance"] | None = Field(
        default=None,
        description="Groups left out of the step, and replaced by those of the next prompts: none, or those whose "
        "rewards are all equal. Derived when null: zero_variance for dapo and cispo, none for the others.",
    )
    max_rounds: int = Field(
        default=10,
        ge=1,
        le=1000,
        description="Rollouts of a step, the first included, while a filter leaves fewer groups than "
        "`rollout.prompts_per_step`. After the last, dropped groups fill up, out of the loss.",
    )
    correction: Literal["none", "truncate", "mask"] | None = Field(
        default=None,
        description="What a token's surrogate weighs by w, how much likelier the policy before the step makes it than "
        "its sampler did: 1 (none), w up to `correction_max` (truncate), or w between both bounds and else 0 (mask). "
        "Tokens of weight 0 still count in the loss's means; KL penalty and entropy bonus are not weighed. Derived "
        "when null: truncate where `rollout.max_staleness` > 0, else none.",
    )
    correction_level: Literal["token", "sequence", "geometric"] | None = Field(
        default=None,
        description="Whose w it is: the token's own, or for all tokens of a sample the product (sequence) or the "
        "geometric mean of theirs. Derived when null: geometric for `ratio_level: sequence`, else token.",
    )
    correction_max: float = Field(default=2.0, ge=1, description="Largest w that counts as it is.")
    correction_min: float = Field(
        default=0.5, ge=0, le=1, description="Smallest w that counts as it is, for `correction: mask`."
    )
    correction_veto: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="A sample with a token whose own w is below this weighs 0; 0 = off. Derived when null: 1e-4.",
    )
    epochs: int = Field(default=1, ge=1, description="Passes over each rollout.")
    mini_batch_prompts: int | None = Field(
        default=None,
        ge=1,
        description="Prompts of one optimizer step, per host; all of the step's when null. Each of K optimizer "
        "steps has one of every K prompts that follow each other.",
    )
    dynamic_microbatch: bool | None = Field(
        default=None,
        description="Packed rows under a token quota (true), or fixed rows of one sample (false); gradients accumulate "
        "either way. When null: as the next two say, true where they are silent.",
    )
    max_tokens_per_device: int | None = Field(
        default=16384,
        ge=1,
        le=MAX_TOKENS_PER_DEVICE,
        description="Token quota of an update micro-batch on each device, at least one whole sample; chooses dynamic. "
        "Lower it when memory runs out, raise it while devices are idle. Scoring takes it, too, unless told otherwise.",
    )
    rows_per_device: int | None = Field(
        default=None,
        ge=1,
        description="Samples of a fixed update micro-batch on each device, of which an optimizer step has a whole "
        "number; chooses fixed. Derived when that is chosen otherwise: 8. Lower it when memory runs out.",
    )
    shuffle: bool | None = Field(
        default=None,
        description="Draw anew in every epoch which of K prompts goes to which optimizer step, by `run.seed`, step and "
        "epoch. Derived when null: true with a critic, else false.",
    )
    balance_batch: bool = Field(
        default=True,
        description="Deal packed rows to the devices so that their FLOPs are even; mini-batches keep their samples. "
        "False only to compare.",
    )

    gamma: float = Field(
        default=1.0, ge=0, le=1, description="Discount of rewards by token, for estimators that credit each token."
    )
    lam: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="Lambda of GAE: 1 trusts the rewards that came, 0 the critic's values of the next token.",
    )
    length_adaptive_lam: float | None = Field(
        default=None,
        gt=0,
        description="VAPO's alpha, 0.05 there: instead of `lam`, advantages take lambda 1 - 1 / (alpha x trainable "
        "tokens of the sample), at least 0; null = off.",
    )
    mask_mode: Literal["skip", "through", "zero"] = Field(
        default="skip",
        description="What GAE does at tokens that the policy did not write: pass over them, take them as any step, or "
        "as a step of reward 0 and value 0.",
    )
    bootstrap_truncated: bool = Field(
        default=False,
        description="A sample cut at `rollout.max_new_tokens` goes on with the critic's value behind its last token; "
        "false: it ends there with 0, like one that stopped.",
    )
    vtrace_max_ratio: float = Field(
        default=1.0,
        gt=0,
        description="V-trace's rho: what a token weighs at most in the critic's targets, by how much likelier the "
        "policy makes it than the sampler did. In the policy's loss `correction` weighs it.",
    )
    vtrace_max_trace: float = Field(
        default=1.0,
        gt=0,
        description="V-trace's c: the same for how far back later surprises reach; at most `vtrace_max_ratio`.",
    )
    gae_backend: Literal["auto", "serial", "chunked", "fused"] = Field(
        default="auto", description="How the recurrence of GAE is solved; auto = the fastest here, by measurements."
    )
    gae_chunk_size: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Tokens of a chunk, where `chunked` runs; null = the fastest here, by measurements.",
    )
    whiten_advantages: bool | None = Field(
        default=None,
        description="Bring the advantages of a step's tokens, over all hosts, to mean 0 and variance 1. Derived when "
        "null: true for estimators that credit each token, false for those that compare siblings.",
    )
    kl_target: float | None = Field(
        default=None,
        gt=0,
        description="Nats per token at which the KL in the reward is held: `beta`, at first, is adapted after every "
        "step; null = fixed `beta`.",
    )
    kl_horizon: int = Field(
        default=10000, ge=1, description="Samples over which an adapted `beta` changes by at most about 20 %."
    )

    @property
    def kl_in_reward(self) -> bool:
        """Samples are compared by rewards from which a KL penalty has been taken."""
        return self.beta > 0 and self.kl_in == "reward"
