"""What this program is made of, for processes that must run the same one."""

from __future__ import annotations

import hashlib
import platform
import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

SAMPLING_PACKAGES = ("jax", "jaxlib", "flax", "numpy")
"""Packages that decide what is drawn from the same weights."""
TRAINING_PACKAGES = ("grpo", *SAMPLING_PACKAGES, "libtpu", "optax", "orbax-checkpoint", "tokenizers", "transformers")
"""Those that decide what a run becomes."""
QUANTIZATION_PACKAGE = "qwix"
"""What decides it, too, where kernels are quantized."""

NOT_INSTALLED = "not installed"

SOURCE_ROOT = Path(__file__).resolve().parents[2]
"""Where `cli.py`, `verbs`, `app` and `settings` lie: a checkout or site-packages."""


def code_digest() -> str:
    """Of the program's own source files, wherever they lie."""
    digest = hashlib.sha256()
    rooms = (SOURCE_ROOT / room for room in ("app", "settings"))
    files = [SOURCE_ROOT / "cli.py", *(path for room in rooms for path in sorted(room.rglob("*.py")))]
    for path in files:
        digest.update(f"{path.relative_to(SOURCE_ROOT).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def program_versions(packages: Iterable[str]) -> dict[str, str]:
    """What it is -> which version or digest of it this process runs."""
    return {
        "version of Python": platform.python_version(),
        **{f"version of {name}": version_of(name) for name in packages},
        "code of grpo": code_digest(),
    }


def sampling_packages(quantization: str | None) -> tuple[str, ...]:
    """Packages that decide what is drawn from the same weights, quantized or not."""
    return SAMPLING_PACKAGES if quantization is None else (*SAMPLING_PACKAGES, QUANTIZATION_PACKAGE)


def version_of(package: str) -> str:
    """Of an installed package, or that it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def minimum_versions(extra: str | None = None) -> dict[str, str]:
    """Package that the program, or one of its extras, cannot do without -> the oldest version it was tested with."""
    pyproject = SOURCE_ROOT / "pyproject.toml"
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        needed = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    else:
        of_extra = re.compile("extra ==" if extra is None else f"extra == ['\"]{extra}['\"]")
        needed = [one for one in requires("grpo") or () if bool(of_extra.search(one)) == (extra is not None)]
    bounds = (re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\w.]+)", one.replace(" ", "")) for one in needed)
    return {bound[1]: bound[2] for bound in bounds if bound}


def parse_release(version: str) -> tuple[int, ...]:
    """`0.10.2.dev1` as (0, 10, 2), to compare; nothing of what is not installed."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
