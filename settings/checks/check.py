"""Checks that involve several settings: a condition, and the error message if it holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from settings.errors import InputError
from settings.loading.resolve import Resolved
from settings.schema.settings import Settings

Check = Callable[[Resolved], Iterable[str]]
"""Yields error messages. `<a.b>` in a message is replaced by the setting's name, value and origin."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A check that reads only values and has a fixed message."""

    is_broken: Callable[[Settings], bool]
    message: str

    def __call__(self, resolved: Resolved) -> Iterable[str]:
        return [self.message] if self.is_broken(resolved.settings) else []


def run_checks(resolved: Resolved, checks: Iterable[Check]) -> None:
    """Runs every check and raises InputError listing all problems, one per line."""
    problems = [message for check in checks for message in check(resolved)]
    if problems:
        raise InputError(re.sub(r"<([a-z_.0-9]+)>", lambda match: resolved.describe(match[1]), "\n".join(problems)))
