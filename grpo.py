"""The module that `import grpo` loads: `grpo.py` in a checkout, `grpo/__init__.py` in an installation.

`cli`, `app` and `settings` are in the same folder. The program's own processes put that folder first on `sys.path`, so
that they never import a user's modules with these names.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

PROGRAM_FOLDER = str(Path(__file__).resolve().parent)


def add_program_to_path() -> None:
    """Puts this program's folder first on `sys.path` and imports `app` and `settings` from it."""
    sys.path.insert(0, PROGRAM_FOLDER)
    # Imported now, because Ray puts the working directory first on the path before a worker's first task.
    for package in ("app", "settings"):
        importlib.import_module(package)


def main() -> None:
    """Runs the command line; the entry point of the console script."""
    add_program_to_path()
    from cli import main as run_command_line

    run_command_line()
