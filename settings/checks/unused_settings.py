"""Settings that only some estimators, corrections or adapters read: said for a run without, they have no effect.

Whoever sets one of them after that was chosen is mistaken, and refused. Where it was chosen in the same layer or a
later one, that choice wins, as when a preset meets `--set algorithm.name=grpo`: then it is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from settings.loading.fields import FIELDS, value_of
from settings.loading.resolve import Resolved
from settings.loading.sources import precedence
from settings.schema.algorithm import CRITIC_ESTIMATORS
from settings.schema.lora import MAX_RANK

ESTIMATOR, CORRECTION, RANK = "algorithm.estimator", "algorithm.correction", "model.lora.rank"
LEARNING_RATE = "optimizer.learning_rate"
PER_TOKEN_ESTIMATORS = CRITIC_ESTIMATORS | {"reinforce_plus_plus"}
"""Values of `algorithm.estimator` that credit each token."""


class UsageCondition(NamedTuple):
    setting: str
    """The setting on whose value it depends who reads."""
    values: frozenset[Any]
    values_text: str = ""
    """What the values are called, where they are not listed."""

    def to_text(self) -> str:
        return f"{self.setting} {self.values_text or ' or '.join(sorted(self.values))}"


_FIELDS_BY_CONDITION: Mapping[UsageCondition, tuple[str, ...]] = {
    UsageCondition(ESTIMATOR, PER_TOKEN_ESTIMATORS): (
        "algorithm.gamma",
        "algorithm.mask_mode",
        "algorithm.gae_backend",
        "algorithm.gae_chunk_size",
    ),
    UsageCondition(ESTIMATOR, CRITIC_ESTIMATORS): (
        *("algorithm.lam", "algorithm.length_adaptive_lam", "algorithm.bootstrap_truncated"),
        *(field for field in FIELDS if field.startswith("critic.") and field != "critic.lam"),
    ),
    # V-trace finds advantages and targets by one lambda.
    UsageCondition(ESTIMATOR, frozenset({"gae"})): ("critic.lam",),
    UsageCondition(ESTIMATOR, frozenset({"vtrace"})): ("algorithm.vtrace_max_ratio", "algorithm.vtrace_max_trace"),
    UsageCondition(CORRECTION, frozenset({"truncate", "mask"})): (
        *("algorithm.correction_level", "algorithm.correction_max", "algorithm.correction_veto"),
    ),
    UsageCondition(CORRECTION, frozenset({"mask"})): ("algorithm.correction_min",),
    UsageCondition(RANK, frozenset(range(1, MAX_RANK + 1)), "of 1 or more"): (
        *("model.lora.alpha", "model.lora.targets", "model.lora.quantize_base"),
    ),
    # With adapters the reference is the frozen weights, which training needs on the devices.
    UsageCondition(RANK, frozenset({None, 0}), "null"): ("score.reference.offload",),
}
USAGE_CONDITIONS: Mapping[str, UsageCondition] = MappingProxyType(
    {field: readers for readers, fields in _FIELDS_BY_CONDITION.items() for field in fields}
)
"""Field -> the choices under which it is read."""


def check_unused_settings(resolved: Resolved) -> str | None:
    """A check: what was said for an estimator or a correction that does not read it."""
    said = [
        field
        for field in _unused_fields(resolved)
        if _precedence(resolved, field) > _precedence(resolved, _deciding_setting(resolved, field))
    ]
    return (
        "\n".join(
            f"{resolved.describe(field)} has no effect under {resolved.describe(_deciding_setting(resolved, field))}: "
            f"it is for "
            f"{USAGE_CONDITIONS[field].to_text()}; leave it out, or set that"
            for field in said
        )
        or None
    )


def launch_notices(resolved: Resolved) -> tuple[str, ...]:
    """What is told at a launch: what the algorithm's name changes, settings without effect, and a rate for others."""
    unread: dict[str, list[str]] = {}
    for field in _unused_fields(resolved):
        unread.setdefault(resolved.describe(_deciding_setting(resolved, field)), []).append(resolved.describe(field))
    lines = [f"no effect under {chosen}: {', '.join(fields)}" for chosen, fields in unread.items()]
    return tuple(
        line for line in (resolved.algorithm_changes, *lines, *_adapter_learning_rate_notices(resolved)) if line
    )


def _adapter_learning_rate_notices(resolved: Resolved) -> Iterator[str]:
    """What the rate that suits all weights does to adapters, where nobody has chosen it for them."""
    if resolved.settings.model.lora.rank and resolved.provenance[LEARNING_RATE] == "default":
        yield (
            f"{resolved.describe(LEARNING_RATE)} suits training of all weights and hardly moves adapters "
            f"({resolved.describe(RANK)}); 10 to 100 times that is usual"
        )


def unused_adapter_notices(resolved: Resolved) -> tuple[str, ...]:
    """What is told where a verb takes the model as it is: adapters that no checkpoint is named for."""
    if not resolved.settings.model.lora.rank:
        return ()
    return (
        f"{resolved.describe(RANK)} has no effect here: the model of model.path is taken as it is, without adapters",
    )


def _unused_fields(resolved: Resolved) -> Iterator[str]:
    """Fields that somebody has set to something else than the default, and that what was chosen does not read."""
    for field, readers in USAGE_CONDITIONS.items():
        origin, value = resolved.provenance[field], value_of(resolved.settings, field)
        is_own = origin not in ("default", "derived") and not _is_inherited(resolved, field)
        is_read = value_of(resolved.settings, readers.setting) in readers.values
        if not is_read and is_own and value != FIELDS[field].default:
            yield field


def _is_inherited(resolved: Resolved, field: str) -> bool:
    """Whether it is one of the critic's micro-batch settings, with the value and from the layer of the policy's."""
    twin = field.replace("critic.", "algorithm.")
    if twin == field or twin not in FIELDS or _precedence(resolved, twin) != _precedence(resolved, field):
        return False
    return value_of(resolved.settings, twin) == value_of(resolved.settings, field)


def _deciding_setting(resolved: Resolved, field: str) -> str:
    """The setting that decided that a field is not read: the choice itself, or what it was derived from."""
    choice = USAGE_CONDITIONS[field].setting
    if resolved.provenance[choice] != "derived":
        return choice
    if choice == CORRECTION:
        return "rollout.max_staleness"
    return "algorithm.name" if resolved.provenance[ESTIMATOR] == "derived" else ESTIMATOR


def _precedence(resolved: Resolved, field: str) -> int:
    return precedence(resolved.provenance[field])
