"""The notices at launch: settings without effect, and others that a user may not have meant.

A setting has no effect if no estimator, correction, adapters or environment that reads it is used. It is not refused,
because `--set algorithm.name=grpo` may override the algorithm of a preset with such settings.
"""

from __future__ import annotations

from collections.abc import Callable

from settings.loading.fields import FIELDS, value_of
from settings.loading.printing import MICRO_BATCH_TWINS
from settings.loading.resolve import Resolved
from settings.schema.settings import Settings

LEARNING_RATE, RANK = "optimizer.learning_rate", "model.lora.rank"
CRITIC_FIELDS = tuple(field for field in FIELDS if field.startswith("critic.") and field != "critic.lam")
FIELDS_OF_SOURCE = ("env.weight", "env.credit", "env.turn_discount")
FIELDS_OF_ENVIRONMENTS = tuple(
    field
    for field in FIELDS
    if field.startswith("env.") and field not in ("env.source", "env.tools", *FIELDS_OF_SOURCE)
)
USAGE_CONDITIONS: tuple[tuple[str, Callable[[Settings], bool], tuple[str, ...]], ...] = (
    (
        "algorithm.estimator gae or reinforce_plus_plus or vtrace",
        lambda s: s.has_critic or s.algorithm.estimator == "reinforce_plus_plus",
        ("algorithm.gamma",),
    ),
    # Training computes GAE on the host; only the command has this choice.
    ("grpo gae --backend chunked", lambda s: False, ("algorithm.gae_chunk_size",)),
    (
        "algorithm.estimator gae or vtrace",
        lambda s: s.has_critic,
        ("algorithm.lam", "algorithm.length_adaptive_lam", "algorithm.bootstrap_truncated", *CRITIC_FIELDS),
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
        f"{RANK} of 1 or more",
        lambda s: bool(s.model.lora.rank),
        ("model.lora.alpha", "model.lora.targets", "model.lora.quantize_base"),
    ),
    # With adapters, the reference weights are the policy's frozen weights, which training needs on the devices.
    (f"{RANK} null", lambda s: not s.model.lora.rank, ("score.reference.offload",)),
    ("data.chat_template model", lambda s: s.data.chat_template == "model", ("data.chat_template_kwargs",)),
    ("env.source or env.tools", lambda s: s.env.is_used, FIELDS_OF_ENVIRONMENTS),
    ("env.source", lambda s: s.env.source is not None, FIELDS_OF_SOURCE),
    ("env.credit turn", lambda s: s.env.credit == "turn" or s.env.source is None, ("env.turn_discount",)),
)
"""A condition as worded in notices, whether it is met, and the settings that have no effect otherwise."""


def launch_notices(resolved: Resolved) -> tuple[str, ...]:
    """Returns the notices at launch: algorithm, unused settings, learning rate, reproducibility, data."""
    lines = [] if resolved.algorithm_changes is None else [resolved.algorithm_changes]
    for condition, is_met, fields in USAGE_CONDITIONS:
        if not is_met(resolved.settings) and (unused := [field for field in fields if _is_set(resolved, field)]):
            lines.append(f"no effect without {condition}: {', '.join(map(resolved.describe, unused))}")
    if resolved.settings.model.lora.rank and resolved.provenance[LEARNING_RATE] == "default":
        lines.append(
            f"{resolved.describe(LEARNING_RATE)} suits training all weights and is too low for adapters "
            f"({resolved.describe(RANK)}); 10 to 100 times that is usual"
        )
    if resolved.settings.env.is_used and resolved.settings.rollout.mode == "fast":
        lines.append(
            "rollout.mode: fast: with an environment, the times of its answers decide roundings, so that samples and "
            "metrics are not reproducible bit for bit; they are with rollout.mode: exact"
        )
    data = resolved.settings.data
    if data.eval_source == data.source and (not data.has_splits or data.eval_split == data.split):
        lines.append("data.eval_source is data.source: evaluations use prompts of the training, not held-out ones")
    return tuple(lines)


def unused_adapter_notices(resolved: Resolved) -> tuple[str, ...]:
    """Returns the notice of a command that ignores the configured adapters."""
    if not resolved.settings.model.lora.rank:
        return ()
    return (f"{resolved.describe(RANK)} has no effect here: model.path is loaded without adapters",)


def _is_set(resolved: Resolved, field: str) -> bool:
    """Returns whether somebody set the field to another value than the default."""
    value, origin = value_of(resolved.settings, field), resolved.provenance[field]
    # The micro-batches of the critic are the policy's unless they were set.
    twin = MICRO_BATCH_TWINS.get(field)
    is_inherited = twin and (value_of(resolved.settings, twin), resolved.provenance[twin]) == (value, origin)
    return origin not in ("default", "derived") and value != FIELDS[field].default and not is_inherited
