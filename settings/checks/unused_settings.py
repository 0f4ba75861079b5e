"""Finds settings without effect because no estimator, correction, adapters or environment that reads them is used.

Such a setting is refused if it comes from a later layer than the choice that makes it unused. Otherwise it is only
reported in a notice, as when `--set algorithm.name=grpo` overrides the algorithm of a preset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from settings.loading.fields import FIELDS, value_of
from settings.loading.resolve import Resolved
from settings.schema.algorithm import CRITIC_ESTIMATORS
from settings.schema.environment import EnvironmentSettings
from settings.schema.rollout import ROUNDING_SETTINGS
from settings.schema.settings import Settings

ESTIMATOR, CORRECTION, RANK = "algorithm.estimator", "algorithm.correction", "model.lora.rank"
LEARNING_RATE = "optimizer.learning_rate"
ENVIRONMENT, TOOLS = "env.source", "env.tools"
ENVIRONMENT_ONLY = ("weight", "credit", "turn_discount")
"""Fields of `env` for rewards of `env.source`. Other checks refuse the last two."""


class UsageCondition(NamedTuple):
    setting: str
    """The setting that determines whether the fields are used."""
    is_met: Callable[[Settings], bool]
    text: str
    """The condition as worded in error messages."""
    fields: tuple[str, ...]


def _condition(setting: str, values: set[str] | frozenset[str], *fields: str) -> UsageCondition:
    text = f"{setting} {' or '.join(sorted(values))}"
    return UsageCondition(setting, lambda settings: value_of(settings, setting) in values, text, fields)


USAGE_CONDITIONS = (
    _condition(ESTIMATOR, CRITIC_ESTIMATORS | {"reinforce_plus_plus"}, "algorithm.gamma", "algorithm.gae_chunk_size"),
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
        RANK,
        lambda settings: bool(settings.model.lora.rank),
        f"{RANK} of 1 or more",
        ("model.lora.alpha", "model.lora.targets", "model.lora.quantize_base"),
    ),
    # With adapters, the reference weights are the policy's frozen weights, which training needs on the devices.
    UsageCondition(RANK, lambda settings: not settings.model.lora.rank, f"{RANK} null", ("score.reference.offload",)),
    UsageCondition(
        ENVIRONMENT,
        lambda settings: settings.env.is_used,
        f"{ENVIRONMENT} or {TOOLS}",
        tuple(
            f"env.{name}"
            for name in EnvironmentSettings.model_fields
            if name not in ("source", "tools", *ENVIRONMENT_ONLY)
        ),
    ),
    UsageCondition(ENVIRONMENT, lambda settings: settings.env.source is not None, ENVIRONMENT, ("env.weight",)),
)


def check_unused_settings(resolved: Resolved) -> Iterator[str]:
    """Yields an error for each setting from a later layer than the choice that makes it unused."""
    for field, choice, condition in _unused_fields(resolved):
        if resolved.is_later(field, choice):
            yield (
                f"<{field}> has no effect with <{choice}>: it is only for {condition.text}; "
                f"remove it, or change {condition.setting}"
            )


def launch_notices(resolved: Resolved) -> tuple[str, ...]:
    """Returns the notices at launch: algorithm, unused settings, learning rate, reproducibility, data."""
    unused: dict[str, list[str]] = {}
    for field, choice, _ in _unused_fields(resolved):
        unused.setdefault(resolved.describe(choice), []).append(resolved.describe(field))
    lines = [f"no effect with {choice}: {', '.join(fields)}" for choice, fields in unused.items()]
    if resolved.algorithm_changes:
        lines.insert(0, resolved.algorithm_changes)
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


def _unused_fields(resolved: Resolved) -> Iterator[tuple[str, str, UsageCondition]]:
    """Yields each unused field with a non-default value, the setting that makes it unused, and the condition."""
    for condition in USAGE_CONDITIONS:
        if condition.is_met(resolved.settings):
            continue
        for field in condition.fields:
            if resolved.provenance[field] in ("default", "derived") or _is_inherited(resolved, field):
                continue
            if value_of(resolved.settings, field) != FIELDS[field].default:
                yield field, _deciding_setting(resolved, condition.setting), condition


def _is_inherited(resolved: Resolved, field: str) -> bool:
    """Returns whether a micro-batch setting of the critic has the same value and layer as the policy's."""
    twin = field.replace("critic.", "algorithm.")
    if twin == field or twin not in FIELDS or value_of(resolved.settings, twin) != value_of(resolved.settings, field):
        return False
    return not resolved.is_later(twin, field) and not resolved.is_later(field, twin)


def _deciding_setting(resolved: Resolved, choice: str) -> str:
    """Returns the choice itself, or the setting from which it was derived or that was decided with it."""
    if choice == ENVIRONMENT and not resolved.settings.env.tools and resolved.is_later(TOOLS, choice):
        return TOOLS
    if resolved.provenance[choice] != "derived":
        return choice
    if choice != CORRECTION:
        return "algorithm.name"
    deciding = "rollout.max_staleness"
    for name in ROUNDING_SETTINGS:
        deciding = name if resolved.is_later(name, deciding) else deciding
    return deciding
