"""Tests of the errors about settings that no longer exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from settings import InputError
from settings.loading.fields import FIELDS, SECTIONS, nested
from settings.loading.synonyms import ALIASES, REMOVED
from tests.settings.loading import load_text, with_sets


def _in_yaml(folder: Path, name: str) -> None:
    load_text(folder, yaml.safe_dump(nested({name: 1})))


def _in_set(_: Path, name: str) -> None:
    with_sets(f"{name}=1")


def _in_environment(_: Path, name: str) -> None:
    with_sets(**{f"GRPO__{name.upper().replace('.', '__')}": "1"})


@pytest.mark.parametrize("give", [_in_yaml, _in_set, _in_environment])
def test_a_removed_setting_is_refused_with_the_reason(folder: Path, give: Callable[[Path, str], None]) -> None:
    for removed, reason in REMOVED.items():
        for name in (removed, f"{removed}.inside"):
            with pytest.raises(InputError) as error:
                give(folder, name)
            assert (name in str(error.value) or "GRPO__" in str(error.value)) and reason in str(error.value)


def test_removed_settings_do_not_exist() -> None:
    assert REMOVED.keys().isdisjoint({*FIELDS, *SECTIONS, *ALIASES})
