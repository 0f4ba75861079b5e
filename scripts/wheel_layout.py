"""Places all files of the wheel in one folder `grpo/`, because other packages may also have a folder `app`."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WHEEL_PATHS = {
    "grpo.py": "grpo/__init__.py",
    "cli.py": "grpo/cli.py",
    "app": "grpo/app",
    "settings": "grpo/settings",
}
"""Maps a path in the checkout to its path in the wheel."""


class WheelLayout(BuildHookInterface):
    """Build hook that maps the program's files to `WHEEL_PATHS`, except in an editable install (`pip install -e`)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"].update(WHEEL_PATHS)
