"""Resolves the micro-batch settings: dynamic under a token quota, or a fixed number of samples.

The update, the critic, scoring, and the scoring of each role are separate scopes. In a scope, a token quota selects
dynamic micro-batches, `rows_per_device` and `strategy` select fixed ones, and `algorithm.dynamic_microbatch` or
`score.dynamic` selects either. If two layers of settings differ, the later one wins; one layer must not select both.
A role inherits null settings from `score`; the critic inherits all of them except the quota from `algorithm`.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from settings.errors import InputError
from settings.loading.fields import FIELDS
from settings.loading.sources import Layer, SourcedValue, describe_origin, precedence
from settings.schema.algorithm import ForwardRole

SWITCHES = ("dynamic", "dynamic_microbatch")
TOKEN_QUOTA, ROWS, STRATEGY = "max_tokens_per_device", "rows_per_device", "strategy"
DEFAULTS = {ROWS: SourcedValue(8, "derived"), STRATEGY: SourcedValue("loop", "derived")}

Values = Mapping[str, SourcedValue | None]
"""Maps each field of a scope, such as `rows_per_device`, to its value; None if the kind of micro-batch ignores it."""


class _Scope:
    """The micro-batch settings of one scope: the fields `given` by the user, and the effective `values` of all."""

    def __init__(self, section: str, leaves: Mapping[str, SourcedValue], inherited: Values, *, is_dynamic: bool = True):
        names = {part: f"{section}.{part}" for part in (*SWITCHES, TOKEN_QUOTA, ROWS, STRATEGY)}
        self.fields = {part: name for part, name in names.items() if name in FIELDS}
        self.given = given = {part: leaves[field] for part, field in self.fields.items() if field in leaves}
        if given:
            is_dynamic = self._selects_dynamic(max(given, key=lambda part: precedence(given[part].origin)))
        self.is_dynamic = is_dynamic
        switch = SourcedValue(is_dynamic, "derived" if given else "default")
        self.values: Values = {
            part: given[part] if part in given and given[part].value is is_dynamic else switch for part in SWITCHES
        }
        if is_dynamic:
            self.values |= {TOKEN_QUOTA: given.get(TOKEN_QUOTA) or inherited[TOKEN_QUOTA], ROWS: None, STRATEGY: None}
            return
        own = dict(given)
        if ROWS in own and _is_off(own):
            del own[min((ROWS, STRATEGY), key=lambda part: precedence(own[part].origin))]
        offers = {**inherited, **own}
        has_rows = ROWS in own or not _is_off(offers)
        self.values |= {TOKEN_QUOTA: None, ROWS: offers[ROWS] if has_rows else None, STRATEGY: offers[STRATEGY]}

    def _selects_dynamic(self, part: str) -> bool:
        return self.given[part].value if part in SWITCHES else part == TOKEN_QUOTA

    def contradictions(self) -> Iterator[str]:
        for layer in sorted({precedence(leaf.origin) for leaf in self.given.values()}):
            parts = [part for part, leaf in self.given.items() if precedence(leaf.origin) == layer]
            quota, rows = ([part for part in parts if self._selects_dynamic(part) is mode] for mode in (True, False))
            names = [" and ".join(self.given[part].given_name for part in some) for some in (quota, rows)]
            if quota and rows:
                yield (
                    f"a token quota follows from {self._describe(*quota)}, but fixed rows from {self._describe(*rows)};"
                    f" remove {names[1]} for the quota, or {names[0]} for fixed rows"
                )
            elif {ROWS, STRATEGY} <= {*parts} and _is_off(self.given):
                yield (
                    f"{self._describe(STRATEGY)} selects one pass over all samples, but {self._describe(ROWS)} selects "
                    f"several; remove {self.given[ROWS].given_name}, or set {self.fields[STRATEGY]} to loop or scan"
                )

    def override_notices(self) -> Iterator[str]:
        """Yields a notice for each `--set` that an environment variable overrides by setting another field."""
        winner = max(self.given.values(), key=lambda leaf: precedence(leaf.origin), default=None)
        for part, leaf in self.given.items():
            if winner and winner.origin.startswith("env:") and leaf.origin == "set" and self.values[part] is not leaf:
                yield (
                    f"environment variable {winner.given_name} overrides {self.fields[part]} {leaf.value!r} from --set"
                )

    def _describe(self, *parts: str) -> str:
        leaves = [(self.fields[part], self.given[part]) for part in parts]
        return " and ".join(f"{name} = {x.value!r} (from {describe_origin(x.origin)})" for name, x in leaves)


def resolve_micro_batching(layers: Sequence[Layer]) -> tuple[Layer, list[str]]:
    """Returns the effective micro-batch settings that differ from the given or default ones, and notices for stderr.

    `layers` are already validated field by field; the strongest is first.

    Raises: InputError listing every scope for which one layer selects both dynamic and fixed micro-batches.
    """
    leaves = ChainMap(*layers)
    given = {field: leaf for field, leaf in leaves.items() if leaf.value is not None}
    own, critics = (
        given.get(field := f"{section}.{TOKEN_QUOTA}", SourcedValue(FIELDS[field].default, "default"))
        for section in ("algorithm", "critic")
    )
    update = _Scope("algorithm", given, {**DEFAULTS, TOKEN_QUOTA: own})
    # Scoring uses the update's quota even if the update uses fixed rows.
    score = _Scope("score", given, {**DEFAULTS, TOKEN_QUOTA: own})
    critic = _Scope("critic", given, {**update.values, TOKEN_QUOTA: critics}, is_dynamic=update.is_dynamic)
    roles = [
        _Scope(f"score.{role}", given, score.values, is_dynamic=score.is_dynamic) for role in get_args(ForwardRole)
    ]
    scopes = [update, critic, score, *roles]
    if problems := [problem for scope in scopes for problem in scope.contradictions()]:
        raise InputError("\n".join(problems))
    settled: Layer = {}
    for scope in scopes:
        for part, field in scope.fields.items():
            leaf = scope.values[part] or SourcedValue(None, "derived")
            stands = leaves[field].value if field in leaves else FIELDS[field].default
            if leaf.value != stands or (leaf.value is not None and field not in leaves):
                settled[field] = leaf
    return settled, [notice for scope in scopes for notice in scope.override_notices()]


def _is_off(values: Values) -> bool:
    strategy = values.get(STRATEGY)
    return strategy is not None and strategy.value == "off"
