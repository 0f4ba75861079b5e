"""The number of settings, which only falls: a new one needs a user, and usually replaces another."""

from __future__ import annotations

from settings.loading.fields import FIELDS

MAX_SETTINGS = 180


def test_there_are_no_more_settings_than_agreed() -> None:
    assert len(FIELDS) <= MAX_SETTINGS
