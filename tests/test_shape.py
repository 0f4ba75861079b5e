"""Tests the program's shape: what its modules load, and sizes of files, functions and folders."""

import ast
import re
import subprocess
import sys

from tests.program import REPOSITORY

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_FILES_IN_FOLDER = 26

SOURCES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
    for pattern in ("grpo.py", "cli.py", "app/**/*.py", "settings/**/*.py")
    for path in sorted(REPOSITORY.glob(pattern))
}


def loaded_with(*modules: str) -> set[str]:
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_commands_and_host_packages_start_without_jax() -> None:
    host_only = re.compile(r"cli|settings\b.*|app\.(environments|plugins|report|reward|records)\b.*")
    loaded = loaded_with(*filter(host_only.fullmatch, SOURCES))
    assert not loaded & {"jax", "jaxlib", "flax", "optax", "orbax"}


def test_training_starts_without_kernels_and_extras() -> None:
    """Pallas is slow to import, and its backends for GPUs and TPUs may be missing on other platforms."""
    loaded = loaded_with("app.training.train", "app.runtime.session")
    assert not loaded & {"jax.experimental.pallas", "qwix", "ray", "math_verify", "tensorboardX"}


def test_no_module_allows_code_in_downloaded_files() -> None:
    allowed = re.compile(r"\b(allow_pickle|trust_remote_code)\s*=\s*(?!False)")
    assert {module for module, source in SOURCES.items() if allowed.search(source)} == set()


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
