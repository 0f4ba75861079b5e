"""Makes the notices at launch about settings that have no effect or may be a mistake.

A setting has no effect if the estimator, scheduler or model that reads it is not in use. Such settings are not refused:
they may be in a file whose algorithm `--set algorithm.name=grpo` overrides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from settings.loading.fields import FIELDS, value_of
from settings.loading.printing import MICRO_BATCH_TWINS
from settings.loading.resolve import Resolved
from settings.schema.algorithm import ForwardRole, MicroBatchSettings
from settings.schema.reward import CALLABLE_PREFIX
from settings.schema.settings import MODEL_DEFAULTS, Settings

LEARNING_RATE, RANK = "optimizer.learning_rate", "model.lora.rank"
CRITIC_FIELDS = tuple(field for field in FIELDS if field.startswith("critic.") and field != "critic.lam")
FIELDS_OF_SOURCE = ("env.weight", "env.credit", "env.turn_discount")
FIELDS_OF_ENVIRONMENTS = tuple(
    field
    for field in FIELDS
    if field.startswith("env.") and field not in ("env.source", "env.tools", *FIELDS_OF_SOURCE)
)
FIELDS_OF_SCORING = tuple(field for field in FIELDS if field.startswith("score.") and field.count(".") == 1)
FIELDS_OF_ARITHMETIC = ("data.difficulty", "data.operators", "data.num_problems")
FIELDS_OF_PDSR_V1 = ("rollout.pdsr.heavy_percent", "rollout.pdsr.probe_limit_tokens", "rollout.pdsr.on_fast_limit")
WITH_SPLITS, ARITHMETIC = ("builtin:", "hf:"), "builtin:arithmetic"
SCHEDULERS = "rollout.scheduler {} and rollout.placement island"

SECTIONS_OF_ROLLOUTS = ("rollout.", "env.", "plugins.", "data.chat_template")
SECTIONS_OF_REWARDS = ("reward.", "plugins.", "score.reward.")
"""Prefixes of the settings that commands other than `grpo train` read when they compute rewards."""


UsageCondition = tuple[str, Callable[[Settings], bool], tuple[str, ...]]
"""A condition as words for notices and as a predicate, and the settings that have no effect unless it is true."""


def _micro_batches_of(role: ForwardRole) -> tuple[str, ...]:
    return tuple(f"score.{role}.{part}" for part in MicroBatchSettings.model_fields)


def _has_scheduler(names: str) -> Callable[[Settings], bool]:
    """Returns a predicate: whether workers use one of the schedulers in `names`, such as `pdsr_v1 or pdsr_v2`."""
    return lambda s: s.rollout.has_workers and str(s.rollout.scheduler) in re.findall(r"\w+", names)


def _read_by_schedulers(names: str, *fields: str) -> UsageCondition:
    return SCHEDULERS.format(names), _has_scheduler(names), fields


def _uses_segment_rule(s: Settings) -> bool:
    """Returns whether segments can end before their rows finish; with `sync`, only if samples have several turns."""
    return not (s.rollout.has_workers and s.rollout.scheduler == "sync") or s.env.is_used


def _held_out_source(s: Settings) -> str:
    """Returns the source of the evaluation prompts; an empty string without evaluations."""
    return (s.data.eval_source or s.data.sources[0].source) if s.eval.every_steps else ""


def _sources(s: Settings) -> list[str]:
    return [*(one.source for one in s.data.sources), _held_out_source(s)]


def _plug_ins(s: Settings) -> list[str]:
    """Returns the reward functions that run in plug-in processes: the user's and `math_verify`."""
    return [one.function or one.name for one in s.reward.functions if one.function or one.name == "math_verify"]


SAMPLING_CONDITION: UsageCondition = (
    "sampled completions (another algorithm.name than sft)",
    lambda s: not s.is_supervised,
    (
        *("algorithm.ratio_level", "algorithm.clip", "algorithm.clip_low", "algorithm.clip_high"),
        *("algorithm.dual_clip", "algorithm.beta", "algorithm.kl_in", "algorithm.kl_estimator", "algorithm.kl_target"),
        *("algorithm.entropy_coef", "algorithm.filter", "algorithm.correction", "algorithm.whiten_advantages"),
        *("algorithm.reward_normalization", "algorithm.mask_truncated", "reward.overlong_buffer"),
        *("rollout.routing_replay", "logging.save_rollouts", "logging.completions_every_steps"),
        *("rollout.temperature", "rollout.top_k", "rollout.top_p", "rollout.min_p"),
    ),
)
"""This condition is tested only for training; other commands sample completions even if `algorithm.name` is `sft`."""

USAGE_CONDITIONS: tuple[UsageCondition, ...] = (
    # Data and evaluations.
    (
        "data.source that is built in or on the hub",
        lambda s: any(one.source.startswith(WITH_SPLITS) and one.split is None for one in s.data.sources),
        ("data.split",),
    ),
    (
        "data in files or on the hub",
        lambda s: any(source and not source.startswith("builtin:") for source in _sources(s)),
        ("data.prompt_column", "data.answer_column"),
    ),
    (f"{ARITHMETIC} as data.source or data.eval_source", lambda s: ARITHMETIC in _sources(s), FIELDS_OF_ARITHMETIC),
    ("data.curriculum none", lambda s: s.data.curriculum == "none", ("data.shuffle",)),
    ("data.chat_template model", lambda s: s.data.chat_template == "model", ("data.chat_template_kwargs",)),
    (
        "eval.every_steps above 0",
        lambda s: s.eval.every_steps > 0,
        ("data.eval_source", "data.eval_split", "eval.num_prompts", "eval.num_samples", "eval.temperature"),
    ),
    (
        "evaluation data that is built in or on the hub",
        lambda s: not _held_out_source(s) or _held_out_source(s).startswith(WITH_SPLITS),
        ("data.eval_split",),
    ),
    (
        "logging.wandb_project",
        lambda s: s.logging.wandb_project is not None or s.logging.wandb_mode == "disabled",
        ("logging.wandb_mode",),
    ),
    # Rollouts.
    (
        SCHEDULERS.format("set"),
        lambda s: s.rollout.has_workers,
        ("rollout.workers.fast.count", "rollout.workers.heavy.count"),
    ),
    *(
        (
            f"{SCHEDULERS.format('set')}, and rollout.workers.{kind}.count of 1 or more",
            lambda s, kind=kind: s.rollout.has_workers and getattr(s.rollout.workers, kind).count > 0,
            tuple(field for field in FIELDS if field.startswith(f"rollout.workers.{kind}.") and field[-6:] != ".count"),
        )
        for kind in ("fast", "heavy")
    ),
    *(
        (
            f"rollout.ray.address, and rollout.workers.{kind}.count of 1 or more",
            lambda s, kind=kind: s.rollout.uses_ray and getattr(s.rollout.workers, kind).count > 0,
            (f"rollout.ray.{kind}_resources",),
        )
        for kind in ("fast", "heavy")
    ),
    ("another rollout.scheduler than sync", _uses_segment_rule, ("rollout.segment.min",)),
    (
        SCHEDULERS.format("pdsr_v1, pdsr_v2 or adaptive"),
        lambda s: s.rollout.has_workers and _uses_segment_rule(s),
        ("rollout.pdsr.window",),
    ),
    _read_by_schedulers("pdsr_v1, pdsr_v2 or adaptive", "rollout.pdsr.unit"),
    _read_by_schedulers("pdsr_v1", *FIELDS_OF_PDSR_V1),
    _read_by_schedulers("pdsr_v1 or pdsr_v2", "rollout.pdsr.fast_limit_tokens"),
    (
        f"rollout.pdsr.unit seconds, {SCHEDULERS.format('pdsr_v1 or pdsr_v2')}",
        lambda s: s.rollout.pdsr.unit == "seconds" and _has_scheduler("pdsr_v1 or pdsr_v2")(s),
        ("rollout.pdsr.fast_limit_s",),
    ),
    _read_by_schedulers("pdsr_v2 or adaptive", "rollout.pdsr.percentile"),
    ("env.source or env.tools", lambda s: s.env.is_used, FIELDS_OF_ENVIRONMENTS),
    ("env.source", lambda s: s.env.source is not None, FIELDS_OF_SOURCE),
    ("env.credit turn", lambda s: s.env.credit == "turn" or s.env.source is None, ("env.turn_discount",)),
    # Rewards.
    ("reward.model", lambda s: s.reward.model is not None, ("reward.model_weight", *_micro_batches_of("reward"))),
    ("reward.overlong_buffer", lambda s: s.reward.overlong_buffer is not None, ("reward.overlong_penalty",)),
    ("a reward function in Python", lambda s: bool(_plug_ins(s)), ("reward.batch_size",)),
    (
        "a reward function in a file or module, env.source or env.tools",
        lambda s: s.env.is_used or any(not one.startswith(CALLABLE_PREFIX) for one in _plug_ins(s)),
        ("plugins.workers", "plugins.timeout_s", "plugins.memory_mib", "plugins.env_vars"),
    ),
    # Scoring. The policy is scored for several updates, for a KL penalty in rewards or advantages, and for V-trace.
    (
        "several optimizer steps in a training step, algorithm.kl_in reward or advantage, or estimator vtrace",
        lambda s: "policy" in s.scored_roles,
        _micro_batches_of("policy"),
    ),
    (
        "algorithm.beta above 0",
        lambda s: s.algorithm.beta > 0,
        (
            *("algorithm.kl_in", "algorithm.kl_estimator", "reference.path", "reference.revision"),
            *(*_micro_batches_of("reference"), "score.reference.offload"),
        ),
    ),
    ("a scored role or reward.model", lambda s: bool(s.scored_roles or s.reward.model), FIELDS_OF_SCORING),
    # With adapters, the policy's start is its frozen weights, which training needs on the devices.
    (
        f"{RANK} null or reference.path",
        lambda s: not s.model.lora.rank or s.reference.path is not None,
        ("score.reference.offload",),
    ),
    # Algorithm, critic and optimizer.
    ("algorithm.mask_truncated false", lambda s: not s.algorithm.mask_truncated, ("algorithm.bootstrap_truncated",)),
    ("algorithm.filter zero_variance", lambda s: s.algorithm.filter != "none", ("algorithm.max_rounds",)),
    (
        "token quotas for micro-batches",
        lambda s: any(value_of(s, field) for field in FIELDS if field.endswith("max_tokens_per_device")),
        ("algorithm.balance_batch",),
    ),
    ("algorithm.mini_batch_prompts", lambda s: s.num_mini_batches > 1, ("algorithm.shuffle",)),
    (
        "algorithm.estimator gae or reinforce_plus_plus or vtrace",
        lambda s: s.has_critic or s.algorithm.estimator == "reinforce_plus_plus",
        ("algorithm.gamma",),
    ),
    # Training computes GAE on the host; only the command can choose a backend.
    ("grpo gae --backend chunked", lambda s: False, ("algorithm.gae_chunk_size",)),
    (
        "algorithm.estimator gae or vtrace",
        lambda s: s.has_critic,
        (
            *("algorithm.lam", "algorithm.length_adaptive_lam", "algorithm.bootstrap_truncated"),
            *(*CRITIC_FIELDS, *_micro_batches_of("critic")),
        ),
    ),
    # V-trace uses one lambda for advantages and targets.
    ("algorithm.estimator gae", lambda s: s.algorithm.estimator == "gae", ("critic.lam",)),
    (
        "algorithm.correction mask or truncate",
        lambda s: s.algorithm.correction != "none",
        ("algorithm.correction_level", "algorithm.correction_max", "algorithm.correction_veto"),
    ),
    ("algorithm.correction mask", lambda s: s.algorithm.correction == "mask", ("algorithm.correction_min",)),
    (
        "optimizer.schedule linear or cosine",
        lambda s: s.optimizer.schedule != "constant",
        ("optimizer.final_fraction",),
    ),
    (
        f"{RANK} of 1 or more",
        lambda s: bool(s.model.lora.rank),
        ("model.lora.alpha", "model.lora.targets", "model.lora.quantize_base"),
    ),
)


def launch_notices(resolved: Resolved) -> tuple[str, ...]:
    """Returns the notices of a launch about algorithm, unused settings, learning rate, reproducibility and data."""
    lines = [] if resolved.algorithm_changes is None else [resolved.algorithm_changes]
    if defaults := [name for name in MODEL_DEFAULTS if resolved.provenance[name] == "derived"]:
        values = ", ".join(f"{name} {value_of(resolved.settings, name)}" for name in defaults)
        lines.append(f"defaults for models that are not built in: {values}")
    lines += unused_setting_notices(resolved, conditions=(*USAGE_CONDITIONS, SAMPLING_CONDITION))
    if resolved.settings.model.lora.rank and resolved.provenance[LEARNING_RATE] == "default":
        lines.append(
            f"{resolved.describe(LEARNING_RATE)} suits training all weights and is too low for adapters "
            f"({resolved.describe(RANK)}); 10 to 100 times as much is usual"
        )
    if resolved.settings.env.is_used and resolved.settings.rollout.mode == "fast":
        lines.append(
            "rollout.mode: fast: with an environment, rounding depends on when it answers, so samples and metrics "
            "are not bitwise reproducible; set rollout.mode: exact if they must be"
        )
    data = resolved.settings.data
    if data.eval_source == data.source and (not data.has_splits or data.eval_split == data.split):
        lines.append("data.eval_source is data.source: evaluations use training prompts, not held-out ones")
    return tuple(lines)


def unused_setting_notices(
    resolved: Resolved, sections: tuple[str, ...] = ("",), *, conditions: Sequence[UsageCondition] = USAGE_CONDITIONS
) -> tuple[str, ...]:
    """Returns a notice for each unmet condition, naming the user's settings that have no effect without it.

    Args:
        sections: prefixes of the settings that the command reads.
        conditions: the conditions to test.
    """
    lines = []
    for condition, is_met, fields in conditions:
        named = [field for field in fields if field.startswith(sections) and _is_set(resolved, field)]
        if named and not is_met(resolved.settings):
            lines.append(f"no effect without {condition}: {', '.join(map(resolved.describe, named))}")
    return tuple(lines)


def unused_adapter_notices(resolved: Resolved) -> tuple[str, ...]:
    """Returns a notice that the command ignores `model.lora`; empty if no adapters are configured."""
    if not resolved.settings.model.lora.rank:
        return ()
    return (f"{resolved.describe(RANK)} has no effect here: model.path is loaded without adapters",)


def _is_set(resolved: Resolved, field: str) -> bool:
    """Returns whether the user set the field to a value other than the default."""
    value, origin = value_of(resolved.settings, field), resolved.provenance[field]
    return field in resolved.given and origin != "derived" and value not in _values_if_unset(resolved.settings, field)


def _values_if_unset(settings: Settings, field: str) -> list[Any]:
    """Returns the values that a field may have in `settings.yaml` if the user has not set it."""
    unset = [FIELDS[field].default]
    if (twin := MICRO_BATCH_TWINS.get(field)) is not None:
        unset.append(value_of(settings, twin))
    derived = {"score.dynamic": [True], "algorithm.shuffle": [settings.has_critic], "algorithm.filter": ["none"]}
    derived |= {"algorithm.correction": ["none"], "algorithm.whiten_advantages": [False]}
    return unset + derived.get(field, [])
