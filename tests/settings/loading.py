"""Loads settings from a text or from overrides, reads tables of cases, and returns the errors of checks."""

import re
from collections.abc import Callable

import pytest

from settings import InputError, Resolved, load
from settings.loading.config_file import ConfigFile


def load_text(text: str, *overrides: str, **environ: str) -> Resolved:
    """Loads the text of `c.yaml`, then `--set` overrides, then environment variables."""
    return load(ConfigFile("c.yaml", "c", text.encode()), overrides, environ)


def with_sets(*overrides: str, **environ: str) -> Resolved:
    return load(None, overrides, environ)


def over_defaults(*overrides: str) -> Resolved:
    """Loads overrides over the defaults of the schema; of several values of a setting, the last one counts."""
    values = dict(text.split("=", 1) for text in overrides)
    return load_text("run: {seed: 0}", *(f"{name}={value}" for name, value in values.items()))


def refusal(function: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(InputError) as caught:
        function(*arguments)
    return str(caught.value)


def rows_of(table: str) -> list[list[str]]:
    """Returns the cells, separated by ` | `, of each row of a table; indented lines continue a row."""
    return [line.split(" | ") for line in re.sub(r"\n +", " ", table.strip()).splitlines()]
