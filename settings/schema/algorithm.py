"""Settings of learning: the algorithm and its loss, the critic, the optimizer, and scoring."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from settings.schema.section import LocalPath, Section, validate_plugin

ScoredRole = Literal["policy", "reference", "critic"]
"""Roles whose logprobs (policy, reference) or values (critic) scoring adds to samples."""

SCORED_ROLES: tuple[ScoredRole, ...] = get_args(ScoredRole)

ForwardRole = Literal[ScoredRole, "reward"]
"""Roles with their own micro-batch settings."""

MAX_TOKENS_PER_DEVICE = 2**24
"""Upper bound of token quotas, to catch typos."""
BUILT_IN_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus", "gae", "vtrace")
"""Built-in values of `algorithm.estimator`; others name a plug-in."""
CRITIC_ESTIMATORS = frozenset({"gae", "vtrace"})
"""Values of `algorithm.estimator` that need a critic."""
VERL_AGGREGATIONS = {
    "seq-mean-token-mean": "sequence-mean-token-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
    "seq-mean-token-sum-norm": "constant-length",
}
"""Maps values of verl's `loss_agg_mode` to the names of `algorithm.loss_aggregation`."""


class AlgorithmSettings(Section):
    name: Literal[
        "grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus", "gspo", "dapo", "cispo", "ppo", "distill", "sft"
    ] = "grpo"
    """Published algorithm, which determines `estimator`, `ratio_level`, `clip`, `clip_low`, `clip_high`,
    `loss_aggregation`, `kl_in`, `filter`, `whiten_advantages` and `shuffle` where they are null. `distill` is on-policy
    distillation from the teacher `reference.path`, with `beta` 1 unless set. `sft` (supervised fine-tuning)
    samples nothing and minimizes the cross-entropy of the completions in `data.source`."""
    estimator: Annotated[str, AfterValidator(partial(validate_plugin, built_in=BUILT_IN_ESTIMATORS))] | None = None
    """Advantage estimator. grpo, dr_grpo, rloo and maxrl compare the samples of a prompt; maxrl needs rewards of at
    least 0. reinforce_plus_plus discounts rewards per token. gae uses a critic; vtrace is GAE with values and targets
    corrected for off-policy samples. `path/to/file.py:function` or `module:function` is a plug-in that returns one
    number per sample or per token. If null, it follows from `algorithm.name`."""
    reward_normalization: Literal["sum_first", "each_first"] = "sum_first"
    """How estimators that compare samples of a prompt combine several rewards. `sum_first` compares the samples'
    weighted sums of rewards. `each_first` (GDPO) compares the values of each reward function, then sums the weighted
    advantages and divides them by their standard deviation over the step, so that a reward with a high variance does
    not drown the others."""
    ratio_level: Literal["token", "sequence"] | None = None
    """Level of the probability ratio between the policies after and before the update: one ratio per token (token), or
    the geometric mean over the tokens of a sample (sequence). If null, it follows from `algorithm.name`."""
    clip: Literal["ppo", "cispo"] | None = None
    """Gradient of tokens whose probability ratio is outside the clip range: zero if the advantage would move the ratio
    farther out (ppo), or weighted by the clipped ratio (cispo). If null, it follows from `algorithm.name`."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty against the reference model. 0 disables the penalty and keeps no reference model in
    memory."""
    kl_in: Literal["loss", "reward", "advantage"] | None = None
    """Where the KL penalty is applied: in the loss, subtracted from the reward (per sample, or per token if the
    estimator credits each token), or subtracted from the advantage of each token. If null and `algorithm.beta` is above
    0, it is `reward` for rloo, reinforce_plus_plus and ppo, `advantage` for distill, and `loss` for the others."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of KL(policy ‖ reference), as defined by Schulman (k1, k2 or k3). If null and `algorithm.beta` is above
    0, it is k3 in the loss and k1 elsewhere."""
    clip_low: float | None = Field(default=None, gt=0)
    """Probability ratios are clipped to at least 1 - clip_low. Values of 1 or more disable this bound and need
    `algorithm.clip: cispo`. If null, it is 3e-4 for gspo, 10 for cispo and 0.2 for the others."""
    clip_high: float | None = Field(default=None, gt=0)
    """Probability ratios are clipped to at most 1 + clip_high. With `algorithm.clip: cispo`, TRL's `epsilon_high` is 1
    + clip_high, so its value of 5 is 4 here. If null, it is 0.28 for dapo, 4e-4 for gspo and 0.2 for the others."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Tokens with a negative advantage and a probability ratio above this value give no gradient; 3.0 is usual. Null
    disables this."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, which is aggregated like the loss; 0 disables it. Raise it if the entropy of the
    policy collapses."""
    loss_aggregation: Annotated[
        Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant-length"] | None,
        BeforeValidator(lambda value: VERL_AGGREGATIONS.get(value, value) if isinstance(value, str) else value),
    ] = None
    """How the losses of tokens are combined: their mean over all tokens (token-mean), or the mean over samples of each
    sample's token mean (sequence-mean-token-mean), token sum (sequence-mean-token-sum), or token sum divided by
    `rollout.max_new_tokens` (constant-length). verl's names are also accepted. If null, it is constant-length for
    dr_grpo, sequence-mean-token-sum for rloo, sequence-mean-token-mean for gspo, and token-mean for the others."""
    filter: Literal["none", "zero_variance"] | None = None
    """Dynamic sampling: `zero_variance` drops groups whose rewards are all equal and replaces them with groups of the
    next prompts. If null, it is zero_variance for dapo and cispo, and none for the others."""
    mask_truncated: bool = False
    """Excludes truncated samples from the loss, its denominators and the statistics of their groups, whether
    `rollout.max_new_tokens`, a limit in `env` or the environment truncated them. `reward/mean` still counts them."""
    max_rounds: int = Field(default=10, ge=1, le=1000)
    """Maximum number of rounds of generation per step, including the first, if `algorithm.filter` keeps fewer groups
    than `rollout.prompts_per_step`. After the last round, dropped groups fill the batch but do not count in the
    loss."""
    correction: Literal["none", "truncate", "mask"] | None = None
    """Importance-sampling correction of off-policy tokens. The loss of a token is multiplied by its weight w, the
    probability under the policy before the update divided by the sampler's probability: `truncate` limits w to
    correction_max, `mask` replaces a w outside [correction_min, correction_max] with 0 but still counts the token in
    the loss's denominators, and `none` uses 1. If null, it is truncate if `rollout.max_staleness` is above 0 or
    `rollout.weights` or `rollout.kv_cache` is set, and none otherwise."""
    correction_level: Literal["token", "sequence", "geometric"] | None = None
    """Level of the importance weight of `algorithm.correction`: one per token (token), or one per sample, which is the
    product (sequence) or the geometric mean (geometric) over its tokens. If null, it is geometric with
    `algorithm.ratio_level: sequence`, and token otherwise."""
    correction_max: float = Field(default=2.0, ge=1)
    """Upper bound on the importance weight of `algorithm.correction`."""
    correction_min: float = Field(default=0.5, ge=0, le=1)
    """Lower bound on the importance weight of `algorithm.correction`; only `mask` uses it."""
    correction_veto: float | None = Field(default=None, ge=0, lt=1)
    """A sample with a token whose importance weight is below this value gets weight 0; a value of 0 disables this. If
    null, it is 1e-4 if `algorithm.correction` is enabled."""
    epochs: int = Field(default=1, ge=1)
    """Number of passes over the samples of each rollout. More passes learn more from each sample, but are less
    on-policy."""
    mini_batch_prompts: int | None = Field(default=None, ge=1)
    """Number of prompts per optimizer step on each host; with K optimizer steps, each uses one of every K consecutive
    prompts. If null, one optimizer step uses all prompts of the training step."""
    dynamic_microbatch: bool | None = None
    """Whether micro-batches of the update are dynamic (true: rows packed up to a token quota) or fixed (false: an equal
    number of samples each). Gradients are accumulated either way. If null, it is true unless
    `algorithm.rows_per_device` is set."""
    max_tokens_per_device: int | None = Field(default=16384, ge=1, le=MAX_TOKENS_PER_DEVICE)
    """Maximum number of tokens of an update micro-batch on each device, at least as many as in the longest sample;
    setting it selects dynamic micro-batches. Lower it if memory runs out. Scoring uses it too unless
    `score.max_tokens_per_device` is set."""
    rows_per_device: int | None = Field(default=None, ge=1)
    """Number of samples of a fixed update micro-batch on each device; setting it selects fixed micro-batches. Lower it
    if memory runs out. If null, it is 8 with fixed micro-batches."""
    shuffle: bool | None = None
    """Whether every epoch assigns prompts to optimizer steps in a new random order, determined by `run.seed`, step and
    epoch. If null, it is true with a critic and false otherwise."""
    balance_batch: bool = True
    """Distributes packed rows so that the devices' FLOPs are about equal; mini-batches keep their samples. Set it to
    false only for comparison."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount factor per token, for estimators that credit each token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Lambda of GAE. With 1, returns are discounted sums of observed rewards; with 0, they are the reward of a token
    plus the discounted value of the next token from the critic."""
    length_adaptive_lam: float | None = Field(default=None, gt=0)
    """Alpha of VAPO's length-adaptive GAE, 0.05 in the paper: the advantages of a sample with n trainable tokens use
    lambda = max(0, 1 - 1 / (alpha n)) instead of `algorithm.lam`. Null disables this."""
    bootstrap_truncated: bool = False
    """Adds the critic's value after the last token to the return of samples that were truncated by
    `rollout.max_new_tokens`, a limit in `env` or the environment. If false, that value is 0, as for finished
    samples."""
    gae_chunk_size: int | None = Field(default=None, ge=1, le=4096)
    """Number of tokens per chunk of `grpo gae --backend chunked`, 128 if null. The numpy backend, which training uses,
    ignores it."""
    whiten_advantages: bool | None = None
    """Normalizes the advantages of a step's tokens, over all hosts, to mean 0 and variance 1. If null, it is true for
    gae, vtrace and reinforce_plus_plus, and false for other estimators."""
    kl_target: float | None = Field(default=None, gt=0)
    """Target KL, in nats per token, of the penalty in the reward: `algorithm.beta` is the initial weight and is adapted
    after every step, by at most about 20 % over 10,000 samples. Null keeps the weight fixed."""

    @property
    def has_custom_estimator(self) -> bool:
        """Whether a plug-in computes the advantages."""
        return self.estimator is not None and self.estimator not in BUILT_IN_ESTIMATORS

    @property
    def kl_in_reward(self) -> bool:
        """Whether a KL penalty is subtracted from the rewards before advantages are computed."""
        return self.beta > 0 and self.kl_in == "reward"

    @property
    def kl_in_advantage(self) -> bool:
        """Whether a KL penalty is subtracted from the advantages of tokens."""
        return self.beta > 0 and self.kl_in == "advantage"

    @property
    def penalizes_samples(self) -> bool:
        """Whether a KL penalty is in rewards or advantages, for which the policy is scored before the updates."""
        return self.kl_in_reward or self.kl_in_advantage


class ReferenceSettings(Section):
    path: LocalPath | None = Field(default=None, min_length=1)
    """Teacher: another model as the reference of the KL penalty, in one of the forms of `model.path`. It may be of any
    family and size but must have the policy's tokenizer; extra rows of its vocabulary are left out before the softmax.
    If null, the reference is `model.path`, from which the policy starts."""
    revision: str | None = Field(default=None, min_length=1)
    """Commit, tag or branch of a teacher on the hub. It can also follow an `@` in `reference.path`."""

    @property
    def source(self) -> str | None:
        """The teacher's `path@revision`; None without a teacher."""
        return self.path if self.revision is None else f"{self.path}@{self.revision}"


class CriticSettings(Section):
    path: LocalPath | None = Field(default=None, min_length=1)
    """Checkpoint that the critic starts from, with the policy's tokenizer: a causal language model, whose LM head is
    replaced by a zero value head, or a sequence classifier with one label. If null, it is `model.path`."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic's AdamW, which otherwise uses the settings in `optimizer`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of training steps at the start of the run in which only the critic learns."""
    clip_range: float | None = Field(default=0.2, gt=0)
    """PPO's value clipping: a token's loss is the larger of the squared errors of its value and of the value clipped to
    at most this distance from the value at the start of the step. Null disables it."""
    max_tokens_per_device: int | None = Field(default=32768, ge=1, le=MAX_TOKENS_PER_DEVICE)
    """Maximum number of tokens of a critic's micro-batch on each device; setting it selects dynamic micro-batches. It
    can exceed `algorithm.max_tokens_per_device`, because the critic has no logits; lower it if memory runs out. If
    neither this nor `critic.rows_per_device` is set, `algorithm` decides whether micro-batches are dynamic or fixed."""
    rows_per_device: int | None = Field(default=None, ge=1)
    """Number of samples of a critic's fixed micro-batch on each device; setting it selects fixed micro-batches. If
    null, it is `algorithm.rows_per_device`, unless `critic.max_tokens_per_device` is set."""
    lam: float | None = Field(default=None, ge=0, le=1)
    """Lambda of GAE for the critic's targets, 1.0 in VAPO. If null, it is `algorithm.lam`."""


class OptimizerSettings(Section):
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW. Lower it if the KL or the gradient norm rises; LoRA adapters need 10 to 100 times as
    much as whole models."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes after warm-up: it stays at its peak (constant), or falls linearly (linear) or along
    a cosine (cosine) to `optimizer.final_fraction` of the peak right after the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps over which the learning rate rises linearly to its peak."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of linear or cosine decay, as a fraction of `optimizer.learning_rate`."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment, the running mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of AdamW's second moment, the running mean of squared gradients. Lower it for runs of few steps."""
    first_moment: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which AdamW's first moment is stored; bfloat16 saves 2 of the 8 bytes of moments per weight."""
    second_moment: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which AdamW's second moment is stored; bfloat16 saves 2 of the 8 bytes of moments per weight. It needs
    `optimizer.beta2` of at most 0.95, because with a slower decay the change of one update is lost in rounding."""
    offload: bool = False
    """Keeps AdamW's moments in pinned host memory and moves them to the device and back, layer by layer, in each
    update. Set it to true if device memory runs out; updates then take longer. It has no benefit on CPUs."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Constant that AdamW adds to the square root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW, applied to matrices only, except the frozen router of a mixture of experts."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum global norm of the gradient of an optimizer step; a larger gradient is scaled down to it."""


class MicroBatchSettings(Section):
    """The micro-batches of a role: dynamic under a token quota, or with a fixed number of samples.

    `settings.loading.micro_batching` fills in null values. After that, only the quota is set for dynamic micro-batches,
    only `rows_per_device` for fixed ones, and neither with `score.strategy: off`.
    """

    max_tokens_per_device: int | None = Field(default=None, ge=1, le=MAX_TOKENS_PER_DEVICE)
    """Maximum number of tokens of a micro-batch on each device when this model scores samples; setting it selects
    dynamic micro-batches. If null, it is inherited from `score`, unless `rows_per_device` is set. Lower it if memory
    runs out."""
    rows_per_device: int | None = Field(default=None, ge=1)
    """Number of samples of a fixed micro-batch on each device when this model scores samples; setting it selects fixed
    micro-batches. If null, it is inherited from `score`, unless `max_tokens_per_device` is set. Lower it if memory runs
    out."""


class ReferenceScoreSettings(MicroBatchSettings):
    offload: bool = False
    """Keeps the reference model's weights in host memory between scoring passes. Set it to true if the policy and the
    reference model do not both fit in device memory; each pass then transfers the weights."""


class ScoreSettings(Section):
    dynamic: bool | None = None
    """Whether micro-batches of scoring are dynamic (true: rows packed up to a token quota) or fixed (false: an equal
    number of samples each). If null, it is true unless `score.rows_per_device` or `score.strategy` is set."""
    max_tokens_per_device: int | None = Field(default=None, ge=1, le=MAX_TOKENS_PER_DEVICE)
    """Maximum number of tokens of a scoring micro-batch on each device; setting it selects dynamic micro-batches. If
    null, it is inherited from `algorithm`. It may exceed `algorithm.max_tokens_per_device`, because scoring stores no
    activations for gradients."""
    rows_per_device: int | None = Field(default=None, ge=1)
    """Number of samples of a fixed scoring micro-batch on each device; setting it selects fixed micro-batches. Lower it
    if memory runs out. If null, it is 8 with `score.strategy` loop or scan."""
    strategy: Literal["off", "loop", "scan"] | None = None
    """Selects fixed micro-batches for every scored model (policy, reference, critic, reward model) without its own
    token quota: one pass over all samples (off), a loop over micro-batches with a shorter last one (loop), or one
    compiled scan over full ones (scan). If null, it is loop with fixed micro-batches."""
    policy: MicroBatchSettings = MicroBatchSettings()
    reference: ReferenceScoreSettings = ReferenceScoreSettings()
    critic: MicroBatchSettings = MicroBatchSettings()
    reward: MicroBatchSettings = MicroBatchSettings()

    def for_role(self, role: ForwardRole) -> MicroBatchSettings:
        """Returns the micro-batch settings of a role; `settings.load` has filled in inherited values."""
        return getattr(self, role)

    def is_scanned(self, role: ForwardRole) -> bool:
        """Returns whether one compiled scan computes all micro-batches of a role."""
        return self.strategy == "scan" and self.for_role(role).rows_per_device is not None
