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
from settings.loading.sources import place
from settings.schema.algorithm import WITH_CRITIC
from settings.schema.lora import MAX_RANK

ESTIMATOR, CORRECTION, RANK = "algorithm.estimator", "algorithm.correction", "model.lora.rank"
LEARNING_RATE = "optimizer.learning_rate"
CREDITING_TOKENS = WITH_CRITIC | {"reinforce_plus_plus"}
"""Values of `algorithm.estimator` that credit each token."""


class Readers(NamedTuple):
    choice: str
    """The setting on whose value it depends who reads."""
    values: frozenset[Any]
    spoken: str = ""
    """What the values are called, where they are not listed."""

    def to_text(self) -> str:
        return f"{self.choice} {self.spoken or ' or '.join(sorted(self.values))}"


_FIELDS: Mapping[Readers, tuple[str, ...]] = {
    Readers(ESTIMATOR, CREDITING_TOKENS): (
        "algorithm.gamma",
        "algorithm.mask_mode",
        "algorithm.gae_backend",
        "algorithm.gae_chunk_size",
    ),
    Readers(ESTIMATOR, WITH_CRITIC): (
        *("algorithm.lam", "algorithm.length_adaptive_lam", "algorithm.bootstrap_truncated"),
        *(field for field in FIELDS if field.startswith("critic.") and field != "critic.lam"),
    ),
    # V-trace finds advantages and targets by one lambda.
    Readers(ESTIMATOR, frozenset({"gae"})): ("critic.lam",),
    Readers(ESTIMATOR, frozenset({"vtrace"})): ("algorithm.vtrace_max_ratio", "algorithm.vtrace_max_trace"),
    Readers(CORRECTION, frozenset({"truncate", "mask"})): (
        *("algorithm.correction_level", "algorithm.correction_max", "algorithm.correction_veto"),
    ),
    Readers(CORRECTION, frozenset({"mask"})): ("algorithm.correction_min",),
    Readers(RANK, frozenset(range(1, MAX_RANK + 1)), "of 1 or more"): (
        *("model.lora.alpha", "model.lora.targets", "model.lora.quantize_base"),
    ),
    # With adapters the reference is the frozen weights, which training needs on the devices.
    Readers(RANK, frozenset({None, 0}), "null"): ("score.reference.offload",),
}
READERS: Mapping[str, Readers] = MappingProxyType(
    {field: readers for readers, fields in _FIELDS.items() for field in fields}
)
"""Field -> the choices under which it is read."""


def said_after_the_choice(resolved: Resolved) -> str | None:
    """A check: what was said for an estimator or a correction that does not read it."""
    said = [
        field for field in _unread(resolved) if _place(resolved, field) > _place(resolved, _chosen(resolved, field))
    ]
    return (
        "\n".join(
            f"{resolved.named(field)} has no effect under {resolved.named(_chosen(resolved, field))}: it is for "
            f"{READERS[field].to_text()}; leave it out, or set that"
            for field in said
        )
        or None
    )


def launch_lines(resolved: Resolved) -> tuple[str, ...]:
    """What is told at a launch: what the algorithm's name changes, settings without effect, and a rate for others."""
    unread: dict[str, list[str]] = {}
    for field in _unread(resolved):
        unread.setdefault(resolved.named(_chosen(resolved, field)), []).append(resolved.named(field))
    lines = [f"no effect under {chosen}: {', '.join(fields)}" for chosen, fields in unread.items()]
    return tuple(line for line in (resolved.algorithm_changes, *lines, *_slow_adapters(resolved)) if line)


def _slow_adapters(resolved: Resolved) -> Iterator[str]:
    """What the rate that suits all weights does to adapters, where nobody has chosen it for them."""
    if resolved.settings.model.lora.rank and resolved.provenance[LEARNING_RATE] == "default":
        yield (
            f"{resolved.named(LEARNING_RATE)} suits training of all weights and hardly moves adapters "
            f"({resolved.named(RANK)}); 10 to 100 times that is usual"
        )


def adapters_left_out(resolved: Resolved) -> tuple[str, ...]:
    """What is told where a verb takes the model as it is: adapters that no checkpoint is named for."""
    if not resolved.settings.model.lora.rank:
        return ()
    return (f"{resolved.named(RANK)} has no effect here: the model of model.path is taken as it is, without adapters",)


def _unread(resolved: Resolved) -> Iterator[str]:
    """Fields that somebody has set to something else than the default, and that what was chosen does not read."""
    for field, readers in READERS.items():
        origin, value = resolved.provenance[field], value_of(resolved.settings, field)
        is_own = origin not in ("default", "derived") and not _is_inherited(resolved, field)
        is_read = value_of(resolved.settings, readers.choice) in readers.values
        if not is_read and is_own and value != FIELDS[field].default:
            yield field


def _is_inherited(resolved: Resolved, field: str) -> bool:
    """Whether it is one of the critic's micro-batch settings, with the value and from the layer of the policy's."""
    twin = field.replace("critic.", "algorithm.")
    if twin == field or twin not in FIELDS or _place(resolved, twin) != _place(resolved, field):
        return False
    return value_of(resolved.settings, twin) == value_of(resolved.settings, field)


def _chosen(resolved: Resolved, field: str) -> str:
    """The setting that decided that a field is not read: the choice itself, or what it was derived from."""
    choice = READERS[field].choice
    if resolved.provenance[choice] != "derived":
        return choice
    if choice == CORRECTION:
        return "rollout.max_staleness"
    return "algorithm.name" if resolved.provenance[ESTIMATOR] == "derived" else ESTIMATOR


def _place(resolved: Resolved, field: str) -> int:
    return place(resolved.provenance[field])
