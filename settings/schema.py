"""Every setting of the program: its name, type, default, bounds and meaning.

One class per section, in the order a step uses them; those of reward and score are in modules of their own. Types are
strict: no setting takes a boolean for a number, `1e3` for an integer or a quoted number for a number. Checks that need
two fields live in `settings.checks`; checks that need a model file or a device live with whoever opens it.
This module imports neither jax nor numpy: `--print-config` and `--help` must answer at once.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from settings.reward_section import Reward
from settings.rollout_section import MAX_SLOTS, Segment
from settings.score_section import MAX_QUOTA, SCORED_ROLES, Score, ScoredRole
from settings.section import Section

MAX_NUM_MICRO_BATCHES = 4096
"""That somebody may ask for: empty ones are computed, too."""
WITH_CRITIC = frozenset({"gae", "vtrace"})
"""Values of `algorithm.estimator` that need a second network."""
HISTORIC_PROMPT_ALLOWANCE = 128
"""The historic runner's `max_length_total` left this many tokens for the prompt."""


def _run_name(value: str) -> str:
    if len(value) > 100 or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError("expected at most 100 letters, digits, `.`, `_`, `-`, starting with a letter or digit")
    return value


def _mesh_shape(value: str) -> str:
    """`auto`, or sizes of dp, fsdp, tp; whether the devices divide so is for `app.mesh` to say."""
    if value == "auto":
        return value
    sizes = value.replace(" ", "").split(",")
    if len(sizes) != 3 or not all(re.fullmatch(r"-1|[1-9][0-9]{0,5}", size) for size in sizes):
        raise ValueError("expected `auto` or three sizes `dp,fsdp,tp`, each at least 1 or -1, as in `1,-1,1`")
    if sizes.count("-1") > 1:
        raise ValueError("expected at most one -1: it takes the devices that the other sizes leave")
    return ",".join(sizes)


def _host_and_port(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"\S+:[0-9]{1,5}", value):
        raise ValueError("expected `host:port`, as in `10.0.0.2:8476`, or `auto`")
    return value


class Run(Section):
    name: Annotated[str, AfterValidator(_run_name)] | None = Field(
        default=None, description="Names the run directory. Derived when null: `<config>-seed<seed>`."
    )
    dir: str = Field(default="runs", min_length=1, description="Folder that holds the run directories.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Root of all randomness: data order and sampling noise.")
    steps: int = Field(default=100, ge=1, description="Training steps: rollout, reward, score, advantage, update.")


class Model(Section):
    path: str = Field(
        default="builtin:tiny",
        min_length=1,
        description="Hugging Face directory, hub id, `.gguf` file, or `builtin:tiny`.",
    )
    revision: str | None = Field(
        default=None,
        description="Commit, tag or branch of a hub id; its newest commit when null. A resumed run keeps its commit.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Compute type. Weights, optimizer, softmax and losses stay float32."
    )
    remat: Literal["none", "minimal", "block"] = Field(
        default="minimal",
        description="What the backward pass recomputes: nothing; all but the products with weights; whole blocks. "
        "Each takes less memory than the one before.",
    )
    logits_chunk: int = Field(
        default=1024,
        ge=1,
        description="Tokens of each device that pass the LM head at once when scoring and training. Lower it when "
        "logits (this x vocabulary x 4 bytes) fill the memory.",
    )


class Data(Section):
    source: str = Field(
        default="builtin:arithmetic",
        min_length=1,
        description="`builtin:arithmetic`, `hf:<hub id>[:<config>]`, or a .jsonl / .parquet file.",
    )
    split: str = Field(default="train", description="Split of a hub data set or of the generator.")
    revision: str | None = Field(default=None, description="Commit of a hub data set; its newest when null.")
    eval_source: str | None = Field(
        default=None,
        description="Where evaluation prompts come from. Derived when null: `data.source`; required beside a file.",
    )
    eval_split: str | None = Field(default=None, description="`test` when null; not used for a file.")
    prompt_column: str | None = Field(
        default=None, description="Found among prompt, question, problem, messages when null."
    )
    answer_column: str | None = Field(default=None, description="Found among answer, ground_truth, solution when null.")
    system_prompt: str | None = Field(default=None, description="System message put before every prompt.")
    max_prompt_length: int = Field(default=128, ge=1, description="Tokens, chat template included.")
    overlong_prompts: Literal["drop", "error", "truncate_left"] = Field(
        default="drop", description="What happens to longer prompts. Counted and reported either way."
    )
    shuffle: bool = Field(default=True, description="A new order every epoch, decided by `run.seed`.")
    difficulty: Annotated[tuple[Annotated[int, Field(ge=1, le=6)], ...], Field(min_length=1, strict=False)] = Field(
        default=(1, 2),
        description="Levels of the arithmetic generator: level n asks for numbers of up to n digits.",
    )
    operators: Annotated[tuple[Literal["+", "-", "*"], ...], Field(min_length=1, strict=False)] = Field(
        default=("+",), description="Operators of the arithmetic generator."
    )
    num_problems: int = Field(
        default=20_000,
        ge=1,
        le=1_000_000,
        description="Rows the arithmetic generator makes for training (fewer where fewer exist).",
    )


class Rollout(Section):
    prompts_per_step: int = Field(default=8, ge=1, description="Prompts of a step, per host.")
    group_size: int = Field(default=8, ge=1, description="Samples per prompt.")
    max_new_tokens: int = Field(default=64, ge=1, description="Longest completion, in tokens.")
    max_length_total: int | None = Field(
        default=None,
        ge=2,
        description="Prompt + completion, in tokens; max_new_tokens + max(128, max_prompt_length) when null.",
    )
    prefill_length_min: int = Field(default=16, ge=1, description="Smallest prefill bucket, in tokens.")
    temperature: float = Field(default=1.0, ge=0, description="0 = greedy (refused in training).")
    top_k: int = Field(default=0, ge=0, description="Keep the k likeliest tokens; 0 = all.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Keep the likeliest tokens that hold this mass; 1 = all.")
    min_p: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Keep tokens at least this likely relative to the likeliest; 0 = all.",
    )
    slots: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SLOTS,
        description="Samples that a host decodes at once: whenever one is done, the next waiting one takes its slot. "
        "All of a rollout at once, until the longest is done, when null. Lower it when caches fill the memory.",
    )
    mode: Literal["exact", "fast"] = Field(
        default="fast",
        description="With slots: caches and batches as large as they need to be (fast), or always of one size in "
        "float32 (exact), so that no sample depends, bit for bit, on when it was generated and beside which others.",
    )
    segment: Segment = Segment()


class Batching(Section):
    share_prompts: bool = Field(
        default=True,
        description="Pack the prompt of a group once, with its completions behind it: the same numbers from fewer "
        "tokens. False only to compare.",
    )
    packing: Literal["best_fit", "karmarkar_karp"] = Field(
        default="best_fit",
        description="How samples find their rows: the fullest row that still has room, which packs tighter, or verl's "
        "largest differencing, which evens out the rows.",
    )
    min_num_micro_batches: int = Field(
        default=1,
        ge=1,
        le=MAX_NUM_MICRO_BATCHES,
        description="Fewest dynamic micro-batches of a pass; more than needed are filled up with empty rows. Raise it "
        "only to see that nothing depends on it.",
    )
    num_micro_batches_divisible_by: int = Field(
        default=1,
        ge=1,
        le=MAX_NUM_MICRO_BATCHES,
        description="Dynamic micro-batches of a pass are rounded up to a multiple of this, as pipelines ask for.",
    )


class Algorithm(Section):
    name: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gspo", "dapo", "cispo", "ppo"] = Field(
        default="grpo",
        description="A paper: decides what is left null of `estimator`, `ratio_level`, `clip`, `clip_low`, "
        "`clip_high`, `loss_aggregation`, `kl_in` and `filter`, nothing else.",
    )
    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gae", "vtrace"] | None = Field(
        default=None,
        description="Where advantages come from: siblings compared as in GRPO, Dr. GRPO or RLOO, the discounted "
        "rewards of each token, GAE with a critic, or V-trace, which also corrects the critic's targets for a sampler "
        "that is not the policy. Derived when null, as the next seven.",
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
        description="Where the penalty goes. Derived when null and beta > 0: `reward` for rloo and "
        "reinforce_plus_plus, `loss` for the others. In the reward it is summed over the sample, before samples are "
        "compared, or stays at its token, where tokens are credited.",
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
        "rewards are all equal. Derived when null: zero_variance for dapo, none for the others.",
    )
    max_rounds: int = Field(
        default=10,
        ge=1,
        le=1000,
        description="Rollouts of a step, the first included, while a filter leaves fewer groups than "
        "`rollout.prompts_per_step`. After the last, dropped groups fill up, out of the loss.",
    )
    epochs: int = Field(default=1, ge=1, description="Passes over each rollout.")
    mini_batch_prompts: int | None = Field(
        default=None,
        ge=1,
        description="Prompts of one optimizer step, per host; all of the step's when null.",
    )
    dynamic_microbatch: bool | None = Field(
        default=None,
        description="Packed rows under a token quota (true), or fixed rows of one sample (false); gradients accumulate "
        "either way. When null: as the next two say, true where they are silent.",
    )
    max_tokens_per_device: int | None = Field(
        default=16384,
        ge=1,
        le=MAX_QUOTA,
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
        description="Draw the mini-batches of every epoch anew from the step's groups, by `run.seed`, step and epoch. "
        "Derived when null: true with a critic, else false.",
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
        description="V-trace's rho: what a token weighs at most, by how much likelier the policy makes it than the "
        "sampler did.",
    )
    vtrace_max_trace: float = Field(
        default=1.0, gt=0, description="V-trace's c: the same for how far back later surprises reach."
    )
    gae_backend: Literal["auto", "serial", "chunked", "fused"] = Field(
        default="auto", description="How the recurrence of GAE is solved; auto = the fastest here, by measurements."
    )
    gae_chunk_size: int | None = Field(
        default=None, ge=1, description="Tokens of a chunk of `chunked`; null = the fastest here, by measurements."
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


class Critic(Section):
    path: str | None = Field(
        default=None,
        min_length=1,
        description="Checkpoint that the critic of GAE starts from, of the same tokenizer: a causal language model, "
        "whose head gives way to a value head of zeros, or a sequence classifier of one label; `model.path` when null.",
    )
    revision: str | None = Field(
        default=None, description="Commit, tag or branch of a hub id in `critic.path`; its newest commit when null."
    )
    learning_rate: float = Field(
        default=1e-5, gt=0, description="Peak rate of the critic's AdamW; all else of it is as `optimizer` says."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Training steps at the start in which only the critic learns."
    )
    clip_range: float | None = Field(
        default=0.2,
        gt=0,
        description="Values further than this from those scored before the step's updates stop learning; null = off.",
    )
    dynamic_microbatch: bool | None = Field(
        default=None, description="As `algorithm.dynamic_microbatch`, whose choice it takes when null and undecided."
    )
    max_tokens_per_device: int | None = Field(
        default=32768,
        ge=1,
        le=MAX_QUOTA,
        description="Token quota of an update micro-batch of the critic on each device, which holds no logits; chooses "
        "dynamic. Lower it when memory runs out.",
    )
    rows_per_device: int | None = Field(
        default=None,
        ge=1,
        description="Samples of a fixed micro-batch of the critic; those of `algorithm` when null.",
    )
    lam: float | None = Field(
        default=None, ge=0, le=1, description="Lambda of the critic's targets, 1.0 in VAPO; null = `algorithm.lam`."
    )


class Optimizer(Section):
    learning_rate: float = Field(default=1e-6, gt=0, description="Peak rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="After warm-up: flat, or falling so that `final_fraction` comes right after the last step.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up from 0.")
    final_fraction: float = Field(
        default=0.0, ge=0, le=1, description="Rate at the end of linear / cosine, as part of the peak."
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of AdamW's mean of gradients.")
    beta2: float = Field(
        default=0.999, ge=0, lt=1, description="Decay of AdamW's mean of squares; lower it for runs of few steps."
    )
    epsilon: float = Field(default=1e-8, gt=0, description="Added to the root of that mean.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled; matrices only.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Global-norm clip.")
    max_nonfinite_steps: int = Field(
        default=3,
        ge=1,
        description="Abort after this many optimizer steps in a row with a NaN or infinite gradient.",
    )


class Mesh(Section):
    shape: Annotated[str, AfterValidator(_mesh_shape)] = Field(
        default="auto",
        description="`dp,fsdp,tp`, -1 takes what is left; `auto`: dp across hosts, fsdp inside one.",
    )
    cpu_devices: int | None = Field(default=None, ge=1, le=64, description="Virtual devices of a CPU host.")
    coordinator_address: Annotated[str, AfterValidator(_host_and_port)] | None = Field(
        default=None,
        description="`host:port` of process 0, or `auto` where the platform knows its hosts; null: one host.",
    )
    num_processes: int | None = Field(default=None, ge=1, description="Hosts; given with `host:port`.")
    process_id: int | None = Field(default=None, ge=0, description="This host's number, from 0; given with the same.")


class Checkpoint(Section):
    every_steps: int = Field(default=50, ge=1, description="Steps between checkpoints; the last step is always saved.")
    every_minutes: float | None = Field(
        default=None, gt=0, description="Also a checkpoint when the last is so old; null = by steps alone."
    )
    keep: int = Field(default=2, ge=1, description="Newest checkpoints kept; the best one stays beside them.")
    best_metric: str | None = Field(
        default="eval/accuracy",
        description="The checkpoint whose evaluation is best by this is kept, as checkpoints/best; null = none is.",
    )
    best_mode: Literal["max", "min"] = Field(
        default="max", description="Whether more or less of `best_metric` is better. Of equals the earlier stays."
    )


class Eval(Section):
    every_steps: int = Field(
        default=25, ge=0, description="Also before step 1 and after the last; 0 = no evaluation at all."
    )
    num_prompts: int = Field(default=128, ge=1, description="Held-out prompts, always the same ones.")
    temperature: float = Field(default=0.0, ge=0, description="0 = greedy.")


class Logging(Section):
    wandb_project: str | None = Field(default=None, description="wandb is used only when this is set.")
    wandb_mode: Literal["online", "offline", "disabled"] = Field(
        default="online", description="Offline is taken instead of online when no key is known."
    )
    profile_steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = Field(
        default=(),
        description="Steps of which `jax.profiler` writes a trace to profile/, as in [3, 5]. They run slower.",
    )
    save_rollouts: bool = Field(default=True, description="Write every step's samples to rollouts/.")
    completions_every_steps: int = Field(
        default=25, ge=0, description="Show some completions after step 1 and every so many steps; 0 = never."
    )
    report: bool = Field(
        default=True,
        description="Write report.html, rollouts.html and plots/ when the run ends; `grpo report` can, at any time.",
    )


class Settings(BaseSettings):
    """All sections. `settings.load` builds it from its layers; `Settings()` is the defaults alone."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, strict=True)

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    batching: Batching = Batching()
    score: Score = Score()
    algorithm: Algorithm = Algorithm()
    critic: Critic = Critic()
    optimizer: Optimizer = Optimizer()
    mesh: Mesh = Mesh()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    logging: Logging = Logging()

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps of one pass over a step's prompts."""
        step = self.rollout.prompts_per_step
        return step // (self.algorithm.mini_batch_prompts or step)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.num_mini_batches * self.algorithm.epochs

    @property
    def has_critic(self) -> bool:
        """A second network learns the values that advantages are estimated from."""
        return self.algorithm.estimator in WITH_CRITIC

    @property
    def policy_updates(self) -> int:
        """Optimizer steps of the policy in the whole run."""
        warmup = self.critic.warmup_steps if self.has_critic else 0
        return (self.run.steps - warmup) * self.updates_per_step

    @property
    def packs_rows(self) -> bool:
        """Whether samples of a step share rows, in the update or in the scoring of a role."""
        return bool(self.algorithm.dynamic_microbatch or any(self.score.of(role).dynamic for role in self.scored_roles))

    @property
    def scored_roles(self) -> tuple[ScoredRole, ...]:
        """Whose logprobs or values a step takes before its updates.

        The policy's where several updates follow or rewards or values are corrected by them, the reference's for KL.
        """
        policy = self.updates_per_step > 1 or self.algorithm.kl_in_reward or self.algorithm.estimator == "vtrace"
        reference = self.algorithm.beta > 0
        needed = {"policy": policy, "reference": reference, "critic": self.has_critic}
        return tuple(role for role in SCORED_ROLES if needed[role])

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing ambient: `settings.layers` reads the environment, by names that are ours."""
        return (init_settings,)
