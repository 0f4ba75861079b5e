"""Tests of the program's shape: no circles of imports, and sizes of files, functions and folders."""

import ast

from tests.program import REPOSITORY
from tests.test_import_layers import SOURCES, find_imports

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_FILES_IN_FOLDER = 26


def imported_modules(module: str, source: str) -> set[str]:
    """Returns the modules of the program that a module imports, also in functions and for types alone.

    A module that lies in a package does not count as an import of the package's own file.
    """
    names = {name for found in find_imports(source) for name in (found.target, found.target.rpartition(".")[0])}
    return names & SOURCES.keys() - {module}


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = {module: imported_modules(module, source) for module, source in SOURCES.items()}
    while leaves := {module for module, names in imports.items() if not names & imports.keys()}:
        imports = {module: names for module, names in imports.items() if module not in leaves}
    assert imports == {}


def test_no_file_function_or_folder_is_too_long() -> None:
    files = {module: len(source.splitlines()) for module, source in SOURCES.items()}
    assert {module for module, lines in files.items() if lines > MAX_FILE_LINES} == set()
    functions = [
        (f"{module}.{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for module, source in SOURCES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert {name for name, lines in functions if lines > MAX_FUNCTION_LINES} == set()
    folders = {path.parent for package in ("app", "settings") for path in (REPOSITORY / package).rglob("*.py")}
    assert {folder for folder in folders if len(list(folder.glob("*.py"))) > MAX_FILES_IN_FOLDER} == set()


def test_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for module, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name for name, modules in places.items() if len(modules) > 1} == set()
