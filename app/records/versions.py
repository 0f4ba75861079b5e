"""Versions of the program and its dependencies, for processes that must run the same code."""

from __future__ import annotations

import hashlib
import platform
import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

TRAINING_PACKAGES = (
    "grpo-jax",
    *("jax", "jaxlib", "flax", "numpy"),
    *("libtpu", "optax", "orbax-checkpoint", "tokenizers", "transformers"),
)
"""Packages that determine the result of a run."""
QUANTIZATION_PACKAGE = "qwix"
"""The package that also determines the result if the base model is quantized."""

NOT_INSTALLED = "not installed"

SOURCE_ROOT = Path(__file__).resolve().parents[2]
"""The folder of `cli.py`, `app` and `settings`: a checkout, or `grpo/` in site-packages."""


def code_digest() -> str:
    """Returns a digest of the program's source files, the same for a checkout and an installation."""
    digest = hashlib.sha256()
    packages = (SOURCE_ROOT / name for name in ("app", "settings"))
    files = [SOURCE_ROOT / "cli.py", *(path for package in packages for path in sorted(package.rglob("*.py")))]
    for path in files:
        digest.update(f"{path.relative_to(SOURCE_ROOT).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def program_versions() -> dict[str, str]:
    """Maps display names to the versions of Python and `TRAINING_PACKAGES`, and to the code digest."""
    return {
        "version of Python": platform.python_version(),
        **{f"version of {name}": version_of(name) for name in TRAINING_PACKAGES},
        "code of grpo": code_digest(),
    }


def version_of(package: str) -> str:
    """Returns the version of a package, or `NOT_INSTALLED`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def minimum_versions(extra: str | None = None) -> dict[str, str]:
    """Returns the lowest tested version of each package that the program, or its extra of this name, requires."""
    pyproject = SOURCE_ROOT / "pyproject.toml"
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        needed = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    else:
        marker = re.compile("extra ==" if extra is None else f"extra == ['\"]{extra}['\"]")
        needed = [one for one in requires("grpo-jax") or () if bool(marker.search(one)) == (extra is not None)]
    bounds = (re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\w.]+)", one.replace(" ", "")) for one in needed)
    return {bound[1]: bound[2] for bound in bounds if bound}


def parse_release(version: str) -> tuple[int, ...]:
    """Returns (0, 10, 2) for `0.10.2.dev1`, for comparison; () for `NOT_INSTALLED`."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
