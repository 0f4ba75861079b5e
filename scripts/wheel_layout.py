"""Build hook of the wheel: everything goes into one folder, `grpo/`, since other packages have an `app`, too."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WHEEL_PATHS = {
    "grpo.py": "grpo/__init__.py",
    "cli.py": "grpo/cli.py",
    "app": "grpo/app",
    "settings": "grpo/settings",
}
"""Path in the wheel by path in the checkout."""


class WheelLayout(BuildHookInterface):
    """Adds the program's files; version `editable` (`pip install -e`) puts the checkout on the path instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"].update(WHEEL_PATHS)
