"""Tests of the settings that a resumed run may change without permission."""

from __future__ import annotations

from settings.checks.resumed_settings import SettingChange
from settings.schema.reward import DECISIVE_FIELDS, EnvironmentSettings


def test_settings_of_environments_are_free_unless_samples_or_rewards_depend_on_them() -> None:
    changes = [SettingChange(f"env.{name}", 1, 2, is_derived=False) for name in EnvironmentSettings.model_fields]
    decisive = {change.name for change in changes if change.is_decisive}
    assert decisive == {f"env.{name}" for name in (*DECISIVE_FIELDS, "weight", "credit", "turn_discount")}
