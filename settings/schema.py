"""Every setting of the program: its name, type, default, bounds and meaning.

One class per section, in the order a step uses them; those of LoRA, reward, score, algorithm, critic, mesh and watchdog
are in modules of their own. Types are strict: no setting takes a boolean for a number, `1e3` for an integer or a quoted
number for a number. Checks that need two fields live in `settings.checks`; checks that need a model file or a device
live with whoever opens it.
This module imports neither jax nor numpy: `--print-config` and `--help` must answer at once.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from settings.algorithm_section import WITH_CRITIC, Algorithm
from settings.critic_section import Critic
from settings.lora_section import LoRA
from settings.mesh_section import Mesh
from settings.reward_section import Reward
from settings.rollout_section import MAX_SLOTS, MAX_STALENESS, DecodeLayout, Pdsr, RayPool, Segment, Workers
from settings.score_section import SCORED_ROLES, Score, ScoredRole
from settings.section import Section
from settings.watchdog_section import Watchdog

MAX_NUM_MICRO_BATCHES = 4096
"""That somebody may ask for: empty ones are computed, too."""
HISTORIC_PROMPT_ALLOWANCE = 128
"""The historic runner's `max_length_total` left this many tokens for the prompt."""


def _run_name(value: str) -> str:
    if len(value) > 100 or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError("expected at most 100 letters, digits, `.`, `_`, `-`, starting with a letter or digit")
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
    lora: LoRA = LoRA()


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
        description="With slots or workers: caches and batches as large as they need to be (fast), or always of one "
        "size in float32 (exact), so that no sample depends, bit for bit, on when it was generated and beside which "
        "others.",
    )
    scheduler: Literal["sync", "pdsr_v1", "pdsr_v2", "adaptive"] | None = Field(
        default=None,
        description="Who decides what the workers of `rollout.workers` do: a batch to its end, P-DSR of either "
        "version, or longest expected first. No workers when null: all samples at once, or through `rollout.slots`.",
    )
    placement: Literal["island", "global"] = Field(
        default="island",
        description="Each host generates on its own devices and waits for no other meanwhile (island), or all hosts "
        "generate one batch on all devices, without slots or workers (global). On one host they differ only with the "
        "scheduler sync: workers, or one batch.",
    )
    decode_layout: DecodeLayout = Field(
        default="gathered",
        description="Weights while tokens are drawn: whole on every device but for tp (gathered), or still split over "
        "fsdp, which holds less and moves all weights between the devices for every token.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=MAX_STALENESS,
        description="Optimizer steps by which the policy that drew a token may be older than the one that learns from "
        "it; 0 = on policy: generation waits for training and training for generation. Above 0 generation never "
        "waits, with `rollout.scheduler` only, and a resumed run repeats itself no more. Training alone reads it.",
    )
    pool: Literal["local", "ray"] = Field(
        default="local",
        description="Where the workers of `rollout.workers` run: on this host's devices, or each in a Ray actor of "
        "`rollout.ray`, on other machines or in processes here.",
    )
    segment: Segment = Segment()
    pdsr: Pdsr = Pdsr()
    workers: Workers = Workers()
    ray: RayPool = RayPool()

    @property
    def has_workers(self) -> bool:
        """Workers on devices of their own, rather than one batch or one queue over all of a host's or of all hosts'."""
        return self.scheduler is not None and self.placement == "island"


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
    num_prompts: int | None = Field(
        default=128, ge=1, description="Held-out prompts, always the same ones; null = the whole data set."
    )
    num_samples: int = Field(
        default=1,
        ge=1,
        description="Samples of each prompt. More than one also measure pass@k and maj@k, at a temperature above 0.",
    )
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
    watchdog: Watchdog = Watchdog()
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
    def offloads_reference(self) -> bool:
        """Its weights wait in the hosts' memory; with adapters they are the policy's own, which every pass needs."""
        return "reference" in self.scored_roles and self.score.reference.offload and not self.model.lora.rank

    @property
    def policy_updates(self) -> int:
        """Optimizer steps of the policy in the whole run."""
        warmup = self.critic.warmup_steps if self.has_critic else 0
        return (self.run.steps - warmup) * self.updates_per_step

    @property
    def packs_rows(self) -> bool:
        """Whether samples of a step share rows, in an update or in the scoring of a role."""
        updated = [self.algorithm, self.critic] if self.has_critic else [self.algorithm]
        scored = [self.score.of(role) for role in self.scored_roles]
        return any(one.dynamic_microbatch for one in updated) or any(one.dynamic for one in scored)

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
