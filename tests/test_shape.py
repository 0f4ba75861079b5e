"""Tests of the program's shape: no circles of imports, and sizes of files, functions and folders."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import pytest

from tests.test_import_layers import REPOSITORY, SOURCES, find_imports

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_FILES_IN_FOLDER = 26


def imported_modules(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns the modules of the program that each one imports, also in functions and for types alone.

    A module that lies in a package does not count as an import of the package's own file.
    """
    return {
        module: {
            name
            for found in find_imports(source)
            for name in (found.target, found.target.rpartition(".")[0])
            if name in sources and name != module
        }
        for module, source in sources.items()
    }


def circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Returns the groups of modules that reach each other by their imports."""
    imports = imported_modules(sources)
    reached = {module: _reached(module, imports) for module in imports}
    groups = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in reached
        if module in reached[module]
    }
    return sorted(sorted(group) for group in groups)


def _reached(module: str, imports: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [*imports[module]]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += imports[name]
    return seen


def long_functions(module: str, source: str) -> dict[str, int]:
    """Returns the functions with more lines than allowed, signature and docstring included, and their lines."""
    lengths = {
        f"{module}.{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(SOURCES) == []


def test_no_file_is_too_long() -> None:
    lengths = {module: len(source.splitlines()) for module, source in SOURCES.items()}
    assert {module for module, lines in lengths.items() if lines > MAX_FILE_LINES} == set()


def test_no_function_is_too_long() -> None:
    found = [long_functions(module, source) for module, source in SOURCES.items()]
    assert {name for names in found for name in names} == set()


@pytest.mark.parametrize("package", ["app", "settings"])
def test_no_folder_has_too_many_files(package: str) -> None:
    folders = {path.parent for path in (REPOSITORY / package).rglob("*.py")}
    crowded = {folder: len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: files for folder, files in crowded.items() if files > MAX_FILES_IN_FOLDER} == {}


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for module, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name for name, modules in places.items() if len(modules) > 1} == set()


def test_the_checker_sees_a_circle_through_a_function_and_a_type() -> None:
    sources = {
        "app": "",
        "app.model": "",
        "app.model.a": "def lazy():\n    from app.model import b",
        "app.model.b": "if TYPE_CHECKING:\n    from app.model.c import C",
        "app.model.c": "import app.model.a",
        "app.model.d": "from app.model.a import f",
    }
    assert circles(sources) == [["app.model.a", "app.model.b", "app.model.c"]]


def test_the_checker_counts_a_function_with_its_signature() -> None:
    body = "\n".join(["    pass"] * (MAX_FUNCTION_LINES - 1))
    assert long_functions("m", f"def f():\n{body}") == {}
    assert long_functions("m", f"class C:\n  def f(\n    self):\n{body}") == {"m.f": MAX_FUNCTION_LINES + 1}
