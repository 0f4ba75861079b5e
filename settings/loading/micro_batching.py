"""Resolves the micro-batch settings: dynamic under a token quota, or a fixed number of samples.

The update, the critic, scoring, and the scoring of each role are separate scopes. In a scope, the quota selects
dynamic, `rows_per_device` and `strategy` select fixed, and the switch selects either. If two layers differ, the later
one wins; one layer must not select both. A role inherits the selection and the values it does not set from `score`.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from settings.errors import InputError
from settings.loading.fields import FIELDS
from settings.loading.sources import Layer, SourcedValue, describe_origin, precedence
from settings.schema.score import ForwardRole

TOKEN_QUOTA = "max_tokens_per_device"
ROWS = "rows_per_device"

SourcedValues = Mapping[str, SourcedValue]

_DEFAULTS: SourcedValues = {
    "dynamic": SourcedValue(True, "default"),
    TOKEN_QUOTA: SourcedValue(FIELDS["algorithm.max_tokens_per_device"].default, "default"),
    ROWS: SourcedValue(8, "derived"),
    "strategy": SourcedValue("loop", "derived"),
}


class _Scope:
    """One scope: `explicit` has the non-null values that were set, by part; `inherited` has a value for every part."""

    def __init__(self, section: str, explicit: SourcedValues, inherited: SourcedValues, *, switch: str = "dynamic"):
        names = {"dynamic": switch, TOKEN_QUOTA: TOKEN_QUOTA, ROWS: ROWS, "strategy": "strategy"}
        self.fields = {part: f"{section}.{name}" for part, name in names.items() if f"{section}.{name}" in FIELDS}
        self.explicit = {part: explicit[field] for part, field in self.fields.items() if field in explicit}
        self.inherited = inherited

    def contradictions(self) -> Iterator[str]:
        for layer in sorted({precedence(leaf.origin) for leaf in self.explicit.values()}):
            parts = [part for part, leaf in self.explicit.items() if precedence(leaf.origin) == layer]
            quota, rows = ([part for part in parts if self._is_dynamic(part) is mode] for mode in (True, False))
            if quota and rows:
                yield (
                    f"{self._describe(quota)} {_verb_form(quota)} a token quota, but {self._describe(rows)} "
                    f"{_verb_form(rows)} fixed rows; "
                    f"remove {self._given_names(rows)} for the quota, or {self._given_names(quota)} for fixed rows"
                )
            elif {ROWS, "strategy"} <= {*parts} and self.explicit["strategy"].value == "off":
                yield (
                    f"{self._describe(['strategy'])} selects one pass over all samples, but {self._describe([ROWS])} "
                    f"selects several; "
                    f"remove {self._given_names([ROWS])}, or set {self.fields['strategy']} to loop or scan"
                )

    def values_to_inherit(self) -> dict[str, SourcedValue]:
        """Returns what a role inherits: this scope's selection, and a value for every part, even an unused one."""
        own = dict(self.explicit)
        if _is_off(own) and ROWS in own:
            del own[min((ROWS, "strategy"), key=lambda part: precedence(own[part].origin))]
        offers = {**self.inherited, **own, "dynamic": self._mode()}
        if ROWS in own and _is_off(offers):
            offers["strategy"] = _DEFAULTS["strategy"]
        return offers

    def effective_values(self) -> dict[str, SourcedValue | None]:
        """Returns the effective value of each part; None if the selection does not use it."""
        offers = self.values_to_inherit()
        if offers["dynamic"].value:
            return {**offers, ROWS: None, "strategy": None}
        return {**offers, TOKEN_QUOTA: None, ROWS: None if _is_off(offers) else offers[ROWS]}

    def _mode(self) -> SourcedValue:
        if not self.explicit:
            return self.inherited["dynamic"]
        latest = max(self.explicit, key=lambda part: precedence(self.explicit[part].origin))
        choice, switch = self._is_dynamic(latest), self.explicit.get("dynamic")
        return switch if switch and switch.value is choice else SourcedValue(choice, "derived")

    def _is_dynamic(self, part: str) -> bool:
        """Returns whether the value set for this part selects dynamic micro-batches."""
        return self.explicit[part].value if part == "dynamic" else part == TOKEN_QUOTA

    def _describe(self, parts: Sequence[str]) -> str:
        leaves = {self.fields[part]: self.explicit[part] for part in parts}
        return " and ".join(f"{name} = {x.value!r} (from {describe_origin(x.origin)})" for name, x in leaves.items())

    def _given_names(self, parts: Sequence[str]) -> str:
        return " and ".join(self.explicit[part].given_name for part in parts)


def resolve_micro_batching(layers: Sequence[Layer]) -> tuple[Layer, list[str]]:
    """Returns the effective values that differ from the given or default ones, and notices for stderr.

    `layers` are already validated field by field; the strongest is first.

    Raises: InputError listing every scope for which one layer selects both dynamic and fixed.
    """
    leaves = ChainMap(*layers)
    scopes = _build_scopes({field: leaf for field, leaf in leaves.items() if leaf.value is not None})
    problems = [problem for scope in scopes for problem in scope.contradictions()]
    if problems:
        raise InputError("\n".join(problems))
    settled: Layer = {}
    notices = []
    for scope in scopes:
        applies = scope.effective_values()
        for part, field in scope.fields.items():
            leaf = applies[part] or SourcedValue(None, "derived")
            stands = leaves[field].value if field in leaves else FIELDS[field].default
            if leaf.value != stands or (leaf.value is not None and field not in leaves):
                settled[field] = leaf
        notices += _override_notices(scope, applies)
    return settled, notices


def _build_scopes(explicit: SourcedValues) -> list[_Scope]:
    update = _Scope("algorithm", explicit, _DEFAULTS, switch="dynamic_microbatch")
    score = _Scope("score", explicit, {**_DEFAULTS, TOKEN_QUOTA: update.values_to_inherit()[TOKEN_QUOTA]})
    critic_default = SourcedValue(FIELDS[f"critic.{TOKEN_QUOTA}"].default, "default")
    critic = _Scope(
        "critic", explicit, {**update.values_to_inherit(), TOKEN_QUOTA: critic_default}, switch="dynamic_microbatch"
    )
    roles = (_Scope(f"score.{role}", explicit, score.values_to_inherit()) for role in get_args(ForwardRole))
    return [update, critic, score, *roles]


def _override_notices(scope: _Scope, effective: Mapping[str, SourcedValue | None]) -> Iterator[str]:
    """Yields notices about `--set` selections that the environment overrides through another field."""
    winner = max(scope.explicit.values(), key=lambda leaf: precedence(leaf.origin), default=None)
    if winner is None or not winner.origin.startswith("env:"):
        return
    for part, leaf in scope.explicit.items():
        if leaf.origin == "set" and effective[part] is not leaf:
            yield f"environment variable {winner.given_name} overrides {scope.fields[part]} {leaf.value!r} from --set"


def _is_off(values: SourcedValues) -> bool:
    return "strategy" in values and values["strategy"].value == "off"


def _verb_form(parts: Sequence[str]) -> str:
    return "select" if len(parts) > 1 else "selects"
