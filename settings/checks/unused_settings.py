"""The notices at launch: settings without effect, and others that a user may not have meant.

A setting has no effect if no estimator, correction, adapters or environment that reads it is used. It is not refused,
because `--set algorithm.name=grpo` may override the algorithm of a preset with such settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from settings.loading.fields import FIELDS, value_of
from settings.loading.printing import MICRO_BATCH_TWINS
from settings.loading.resolve import Resolved
from settings.schema.algorithm import CRITIC_ESTIMATORS
from settings.schema.plugins import EnvironmentSettings
from settings.schema.settings import Settings

ESTIMATOR, CORRECTION, RANK = "algorithm.estimator", "algorithm.correction", "model.lora.rank"
LEARNING_RATE = "optimizer.learning_rate"
OF_ENVIRONMENT_ALONE = ("weight", "credit", "turn_discount")
"""Fields of `env` for the rewards of `env.source`."""


class UsageCondition(NamedTuple):
    text: str
    """The condition as worded in notices."""
    is_met: Callable[[Settings], bool]
    fields: tuple[str, ...]
    """Settings that have no effect otherwise."""


def _condition(setting: str, values: set[str] | frozenset[str], *fields: str) -> UsageCondition:
    text = f"{setting} {' or '.join(sorted(values))}"
    return UsageCondition(text, lambda settings: value_of(settings, setting) in values, fields)


USAGE_CONDITIONS = (
    _condition(ESTIMATOR, CRITIC_ESTIMATORS | {"reinforce_plus_plus"}, "algorithm.gamma"),
    # Training computes GAE on the host; only the command has this choice.
    UsageCondition("grpo gae --backend chunked", lambda _: False, ("algorithm.gae_chunk_size",)),
    _condition(
        ESTIMATOR,
        CRITIC_ESTIMATORS,
        *("algorithm.lam", "algorithm.length_adaptive_lam", "algorithm.bootstrap_truncated"),
        *(field for field in FIELDS if field.startswith("critic.") and field != "critic.lam"),
    ),
    # V-trace uses one lambda for advantages and targets.
    _condition(ESTIMATOR, {"gae"}, "critic.lam"),
    _condition(
        CORRECTION,
        {"truncate", "mask"},
        *("algorithm.correction_level", "algorithm.correction_max", "algorithm.correction_veto"),
    ),
    _condition(CORRECTION, {"mask"}, "algorithm.correction_min"),
    UsageCondition(
        f"{RANK} of 1 or more",
        lambda settings: bool(settings.model.lora.rank),
        ("model.lora.alpha", "model.lora.targets", "model.lora.quantize_base"),
    ),
    # With adapters, the reference weights are the policy's frozen weights, which training needs on the devices.
    UsageCondition(f"{RANK} null", lambda settings: not settings.model.lora.rank, ("score.reference.offload",)),
    UsageCondition(
        "env.source or env.tools",
        lambda settings: settings.env.is_used,
        tuple(
            f"env.{name}"
            for name in EnvironmentSettings.model_fields
            if name not in ("source", "tools", *OF_ENVIRONMENT_ALONE)
        ),
    ),
    UsageCondition(
        "env.source",
        lambda settings: settings.env.source is not None,
        tuple(f"env.{name}" for name in OF_ENVIRONMENT_ALONE),
    ),
    UsageCondition(
        "env.credit turn",
        lambda settings: settings.env.credit == "turn" or settings.env.source is None,
        ("env.turn_discount",),
    ),
)


def launch_notices(resolved: Resolved) -> tuple[str, ...]:
    """Returns the notices at launch: algorithm, unused settings, learning rate, reproducibility, data."""
    lines = [] if resolved.algorithm_changes is None else [resolved.algorithm_changes]
    for condition in USAGE_CONDITIONS:
        if not condition.is_met(resolved.settings) and (fields := [*_set_fields(resolved, condition.fields)]):
            lines.append(f"no effect without {condition.text}: {', '.join(map(resolved.describe, fields))}")
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


def _set_fields(resolved: Resolved, fields: tuple[str, ...]) -> Iterator[str]:
    """Yields the fields that somebody set to another value than the default."""

    def entry(field: str) -> tuple[Any, str]:
        return value_of(resolved.settings, field), resolved.provenance[field]

    for field in fields:
        value, origin = entry(field)
        # The micro-batches of the critic are the policy's unless they were set.
        is_inherited = field in MICRO_BATCH_TWINS and entry(MICRO_BATCH_TWINS[field]) == (value, origin)
        if origin not in ("default", "derived") and value != FIELDS[field].default and not is_inherited:
            yield field
