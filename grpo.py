"""The program as `import grpo` finds it: `grpo.py` of a checkout, `grpo/__init__.py` of an installation.

`cli`, `app` and `settings` are in the same folder. It comes first on `sys.path` of the program's own processes, so that
a user's modules of these names are never imported in their place.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

PROGRAM_FOLDER = str(Path(__file__).resolve().parent)


def add_program_to_path() -> None:
    """Makes `cli`, `app` and `settings` of this program importable, and no others."""
    sys.path.insert(0, PROGRAM_FOLDER)
    # Loaded at once: Ray puts the working directory in front of the path before a worker's first task.
    for package in ("app", "settings"):
        importlib.import_module(package)


def main() -> None:
    """Runs the command line; the entry point of the console script."""
    add_program_to_path()
    from cli import main as run_command_line

    run_command_line()
