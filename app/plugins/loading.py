"""Imports the user's `module:name` or `file.py:name` in a worker process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

PROGRAM_FOLDER = str(Path(__file__).parents[1]) + os.sep


class LoadError(Exception):
    """A plug-in cannot be loaded; the message gives the reason."""


def load_object(path: str, *, program_modules: Collection[str] = ()) -> Any:
    """Imports and returns the function or class at `path`, which is `module:name` or `file.py:name`.

    Args:
        program_modules: modules that are imported from this program, even if the working directory has an `app`.

    Raises:
        LoadError: the file, module or name does not exist, or the import fails.
    """
    place, _, attribute = path.rpartition(":")
    # As with `python file.py`, modules next to the file and in the working directory can be imported. This program's
    # own functions are found even if the working directory contains another `app`.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]) if place in program_modules else os.getcwd())
    try:
        module: Any = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except LoadError:
        raise
    except BaseException as error:  # including sys.exit in the module
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{place}.".startswith(f"{absent}.") and not place.endswith(".py"):
            where = f"in {os.getcwd()} or among the installed packages"
            raise LoadError(f"there is no module `{absent}` {where}; correct the name, or install it") from None
        raise LoadError(
            f"importing {place} failed: {describe_error(error)}; fix the module, or install what it imports"
        ) from error
    target = module
    for name in attribute.split("."):
        if not hasattr(target, name):
            of_user = {n: v for n, v in vars(module).items() if callable(v) and not n.startswith("_")}
            known = sorted(n for n, v in of_user.items() if getattr(v, "__module__", None) == module.__name__)
            hint = "".join(f"; did you mean {near}?" for near in get_close_matches(name, known, n=1))
            there = ", ".join(known[:20]) or "none"
            raise LoadError(f"{place} has no `{name}`{hint or f'; correct the name (functions and classes: {there})'}")
        target = getattr(target, name)
    return target


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LoadError(f"no such file: {path.absolute()}; correct the path")
    name = f"plugin_{path.stem}"
    if getattr(sys.modules.get(name), "__file__", None) == str(path.absolute()):
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path.absolute())
    assert specification is not None and specification.loader is not None
    sys.path.insert(0, str(path.absolute().parent))
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def describe_error(error: BaseException) -> str:
    """Returns the last line of an error's traceback, with the file and line where it was raised."""
    text = traceback.format_exception_only(error)[-1].strip()
    place = _error_location(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{_relative_path(error.filename)}:{error.lineno}"
    return f"{text[:1000]} ({place})" if place else text[:1000]


def _error_location(trace: TracebackType | None) -> str | None:
    """Returns the innermost `file:line` of user code in a traceback, or else of any code outside this program."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(trace)]
    lines = [(file, line) for file, line in lines if not file.startswith((PROGRAM_FOLDER, "<frozen"))]
    user_lines = [(file, line) for file, line in lines if not file.startswith((sys.prefix, sys.base_prefix))]
    if not lines:
        return None
    file, line = (user_lines or lines)[-1]
    return f"{_relative_path(file)}:{line}"


def _relative_path(file: str) -> str:
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
