"""Settles how samples are cut into micro-batches: dynamically, by a token quota, or into fixed rows.

The update, scoring, and the scoring of each role are scopes of their own. In a scope the quota chooses dynamic,
`rows_per_device` and `strategy` choose fixed, and the switch either. Of two layers that choose differently the later
counts; one layer may not choose both. A role takes from `score` what it does not say itself: the choice, and values.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from settings.errors import InputError
from settings.loading.fields import FIELDS
from settings.loading.sources import Layer, Leaf, place, spoken
from settings.schema.score import ForwardRole

QUOTA = "max_tokens_per_device"
ROWS = "rows_per_device"

Leaves = Mapping[str, Leaf]

_DEFAULTS: Leaves = {
    "dynamic": Leaf(True, "default"),
    QUOTA: Leaf(FIELDS["algorithm.max_tokens_per_device"].default, "default"),
    ROWS: Leaf(8, "derived"),
    "strategy": Leaf("loop", "derived"),
}


class _Scope:
    """`said`: the leaves that nobody took back, by the part of the scope that they set. `inherited` has every part."""

    def __init__(self, section: str, said: Leaves, inherited: Leaves, *, switch: str = "dynamic"):
        names = {"dynamic": switch, QUOTA: QUOTA, ROWS: ROWS, "strategy": "strategy"}
        self.fields = {part: f"{section}.{name}" for part, name in names.items() if f"{section}.{name}" in FIELDS}
        self.said = {part: said[field] for part, field in self.fields.items() if field in said}
        self.inherited = inherited

    def contradictions(self) -> Iterator[str]:
        for layer in sorted({place(leaf.origin) for leaf in self.said.values()}):
            parts = [part for part, leaf in self.said.items() if place(leaf.origin) == layer]
            quota, rows = ([part for part in parts if self._is_dynamic(part) is mode] for mode in (True, False))
            if quota and rows:
                yield (
                    f"{self._named(quota)} {_ask(quota)} for a token quota, {self._named(rows)} for fixed rows; "
                    f"leave out {self._written(rows)} for the quota, or {self._written(quota)} for fixed rows"
                )
            elif {ROWS, "strategy"} <= {*parts} and self.said["strategy"].value == "off":
                yield (
                    f"{self._named(['strategy'])} is one pass over all samples, {self._named([ROWS])} is several; "
                    f"leave out {self._written([ROWS])}, or choose loop or scan as {self.fields['strategy']}"
                )

    def offers(self) -> dict[str, Leaf]:
        """What a role inherits: this scope's choice, and a value for every part, whether or not the choice needs it."""
        own = dict(self.said)
        if _is_off(own) and ROWS in own:
            del own[min((ROWS, "strategy"), key=lambda part: place(own[part].origin))]
        offers = {**self.inherited, **own, "dynamic": self._choice()}
        if ROWS in own and _is_off(offers):
            offers["strategy"] = _DEFAULTS["strategy"]
        return offers

    def settled(self) -> dict[str, Leaf | None]:
        """The leaf that applies to every part; None where the choice leaves it without meaning."""
        offers = self.offers()
        if offers["dynamic"].value:
            return {**offers, ROWS: None, "strategy": None}
        return {**offers, QUOTA: None, ROWS: None if _is_off(offers) else offers[ROWS]}

    def _choice(self) -> Leaf:
        if not self.said:
            return self.inherited["dynamic"]
        latest = max(self.said, key=lambda part: place(self.said[part].origin))
        choice, switch = self._is_dynamic(latest), self.said.get("dynamic")
        return switch if switch and switch.value is choice else Leaf(choice, "derived")

    def _is_dynamic(self, part: str) -> bool:
        """What setting this part chooses."""
        return self.said[part].value if part == "dynamic" else part == QUOTA

    def _named(self, parts: Sequence[str]) -> str:
        return " and ".join(f"{self.fields[part]} = {_value_and_place(self.said[part])}" for part in parts)

    def _written(self, parts: Sequence[str]) -> str:
        return " and ".join(self.said[part].written for part in parts)


def settle(layers: Sequence[Layer]) -> tuple[Layer, list[str]]:
    """Every effective value that differs from what its own field says, and lines for stderr.

    `layers` stand with the strongest first and are valid, field by field.

    Raises: InputError listing every scope for which one layer chooses both ways.
    """
    leaves = ChainMap(*layers)
    scopes = _scopes({field: leaf for field, leaf in leaves.items() if leaf.value is not None})
    problems = [problem for scope in scopes for problem in scope.contradictions()]
    if problems:
        raise InputError("\n".join(problems))
    settled: Layer = {}
    notices = []
    for scope in scopes:
        applies = scope.settled()
        for part, field in scope.fields.items():
            leaf = applies[part] or Leaf(None, "derived")
            stands = leaves[field].value if field in leaves else FIELDS[field].default
            if leaf.value != stands or (leaf.value is not None and field not in leaves):
                settled[field] = leaf
        notices += _overridden_sets(scope, applies)
    return settled, notices


def _scopes(said: Leaves) -> list[_Scope]:
    update = _Scope("algorithm", said, _DEFAULTS, switch="dynamic_microbatch")
    score = _Scope("score", said, {**_DEFAULTS, QUOTA: update.offers()[QUOTA]})
    of_critic = Leaf(FIELDS[f"critic.{QUOTA}"].default, "default")
    critic = _Scope("critic", said, {**update.offers(), QUOTA: of_critic}, switch="dynamic_microbatch")
    roles = (_Scope(f"score.{role}", said, score.offers()) for role in get_args(ForwardRole))
    return [update, critic, score, *roles]


def _overridden_sets(scope: _Scope, applies: Mapping[str, Leaf | None]) -> Iterator[str]:
    """Choices of `--set` that lost to one of the environment, which is not in the same field."""
    winner = max(scope.said.values(), key=lambda leaf: place(leaf.origin), default=None)
    if winner is None or not winner.origin.startswith("env:"):
        return
    for part, leaf in scope.said.items():
        if leaf.origin == "set" and applies[part] is not leaf:
            yield f"environment variable {winner.written} overrides {scope.fields[part]} {leaf.value!r} from --set"


def _is_off(leaves: Leaves) -> bool:
    return "strategy" in leaves and leaves["strategy"].value == "off"


def _value_and_place(leaf: Leaf) -> str:
    return f"{leaf.value!r} (from {spoken(leaf.origin)})"


def _ask(parts: Sequence[str]) -> str:
    return "ask" if len(parts) > 1 else "asks"
