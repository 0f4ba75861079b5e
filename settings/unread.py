"""Settings that only some estimators read: said for a run of another one, they would have no effect.

Whoever sets one of them after the estimator was chosen is mistaken, and refused. Where the estimator was chosen in the
same layer or a later one, that choice wins, as when a preset meets `--set algorithm.name=grpo`: then it is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from settings.algorithm_section import WITH_CRITIC
from settings.fields import FIELDS, value_of
from settings.layers import place
from settings.resolve import Resolved

CREDITING_TOKENS = WITH_CRITIC | {"reinforce_plus_plus"}
"""Values of `algorithm.estimator` that credit each token."""

_FIELDS: Mapping[frozenset[str], tuple[str, ...]] = {
    CREDITING_TOKENS: ("algorithm.gamma", "algorithm.mask_mode", "algorithm.gae_backend", "algorithm.gae_chunk_size"),
    WITH_CRITIC: (
        *("algorithm.lam", "algorithm.length_adaptive_lam", "algorithm.bootstrap_truncated"),
        *(field for field in FIELDS if field.startswith("critic.") and field != "critic.lam"),
    ),
    # V-trace corrects advantages and targets alike.
    frozenset({"gae"}): ("critic.lam",),
    frozenset({"vtrace"}): ("algorithm.vtrace_max_ratio", "algorithm.vtrace_max_trace"),
}
READERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {field: readers for readers, fields in _FIELDS.items() for field in fields}
)
"""Field -> the estimators that read it."""


def said_after_the_estimator(resolved: Resolved) -> str | None:
    """A check: what was said for an estimator that does not read it."""
    choice = _choice(resolved)
    said = [field for field in _unread(resolved) if _place(resolved, field) > _place(resolved, choice)]
    return (
        "\n".join(
            f"{resolved.named(field)} has no effect under {resolved.named(choice)}: it is for algorithm.estimator "
            f"{' or '.join(sorted(READERS[field]))}; leave it out, or set that"
            for field in said
        )
        or None
    )


def launch_lines(resolved: Resolved) -> tuple[str, ...]:
    """What is told at a launch: what the algorithm's name changes, and the settings that have no effect."""
    unread = ", ".join(resolved.named(field) for field in _unread(resolved))
    told = resolved.algorithm_changes, unread and f"no effect under {resolved.named(_choice(resolved))}: {unread}"
    return tuple(line for line in told if line)


def _unread(resolved: Resolved) -> Iterator[str]:
    """Fields that somebody has set to something else than the default, and that the estimator does not read."""
    estimator = resolved.settings.algorithm.estimator
    for field, readers in READERS.items():
        origin, value = resolved.provenance[field], value_of(resolved.settings, field)
        is_own = origin not in ("default", "derived") and not _is_inherited(resolved, field)
        if estimator not in readers and is_own and value != FIELDS[field].default:
            yield field


def _is_inherited(resolved: Resolved, field: str) -> bool:
    """Whether it is one of the critic's micro-batch settings, with the value and from the layer of the policy's."""
    twin = field.replace("critic.", "algorithm.")
    if twin == field or twin not in FIELDS or _place(resolved, twin) != _place(resolved, field):
        return False
    return value_of(resolved.settings, twin) == value_of(resolved.settings, field)


def _choice(resolved: Resolved) -> str:
    """The field that decided the estimator."""
    return "algorithm.name" if resolved.provenance["algorithm.estimator"] == "derived" else "algorithm.estimator"


def _place(resolved: Resolved, field: str) -> int:
    return place(resolved.provenance[field])
