"""What `pip install .` gives: everything the program needs, and nothing else."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED_BY_ANOTHER = {"pydantic-core"}
"""pydantic requires exactly one version of it."""

OPTIONAL = {"math-verify": "math", "qwix": "qlora", "ray": "ray"}
"""What the program imports only where the extra that brings it is installed."""


def distribution(requirement: str) -> str:
    """`ml-dtypes` for `ml_dtypes[extra]>=0.6; marker`."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def program_files() -> list[Path]:
    rooms = (path for room in ("app", "settings") for path in REPOSITORY.glob(f"{room}/**/*.py"))
    return [REPOSITORY / "cli.py", *rooms]


def imported_packages() -> set[str]:
    """Every foreign top-level package the program imports anywhere, as in `import <name>`."""
    names = set()
    for path in program_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").split(".")[0])
    return names - set(sys.stdlib_module_names) - {"app", "settings", "cli"}


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling (of the test extra) builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_dependencies_are_what_the_program_imports() -> None:
    known = packages_distributions()
    imported = {distribution(known[name][0] if name in known else name) for name in imported_packages()}
    declared = {distribution(requirement) for requirement in PROJECT["dependencies"]}
    extras = PROJECT["optional-dependencies"]
    assert all(name in map(distribution, extras[extra]) for name, extra in OPTIONAL.items())
    assert imported - PINNED_BY_ANOTHER - OPTIONAL.keys() == declared


def test_every_dependency_has_a_lower_bound() -> None:
    assert [line for line in PROJECT["dependencies"] if not re.fullmatch(r"[\w-]+>=[\d.]+", line)] == []


def test_torch_is_installed_for_tests_only() -> None:
    extras = PROJECT["optional-dependencies"]
    with_torch = [name for name, lines in extras.items() if "torch" in map(distribution, lines)]
    assert with_torch == ["test"]
    assert "torch" not in map(distribution, PROJECT["dependencies"])


def test_the_wheel_holds_the_program_and_its_data_and_no_more(unpacked_wheel: Path) -> None:
    def files(root: Path, *folders: str) -> set[str]:
        found = [path for folder in folders for path in (root / folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(root)) for path in found if path.suffix != ".pyc"}

    assert {path.name for path in unpacked_wheel.iterdir()} == {
        "app",
        "cli.py",
        "settings",
        f"grpo-{PROJECT['version']}.dist-info",
    }
    packed = files(unpacked_wheel, "app", "settings")
    assert packed == files(REPOSITORY, "app", "settings")
    assert {"app/py.typed", "settings/py.typed", "settings/presets/quickstart.yaml"} <= packed


def test_an_installed_program_finds_its_presets_from_any_directory(unpacked_wheel: Path, tmp_path: Path) -> None:
    name, function = PROJECT["scripts"]["grpo"].split(":")
    presets = [path.stem for path in (unpacked_wheel / "settings" / "presets").glob("*.yaml")]
    assert "quickstart" in presets
    for preset in presets:
        answer = subprocess.run(
            [
                *(sys.executable, "-c", f"import sys; from {name} import {function}; sys.exit({function}())"),
                *("train", "--config", preset, "--print-config"),
            ],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(unpacked_wheel)},
            capture_output=True,
            text=True,
        )
        assert answer.returncode == 0, answer.stderr
        assert "group_size" in answer.stdout
