"""What this program is made of, for processes that must run the same one."""

from __future__ import annotations

import hashlib
import platform
import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

DRAWING = ("jax", "jaxlib", "flax", "numpy")
"""Packages that decide what is drawn from the same weights."""
TRAINING = ("grpo", *DRAWING, "libtpu", "optax", "orbax-checkpoint", "qwix", "tokenizers", "transformers")
"""Those that decide what a run becomes."""

NOT_INSTALLED = "not installed"

CODE = Path(__file__).resolve().parents[1]
"""Where `cli.py`, `verbs`, `app` and `settings` lie: a checkout or site-packages."""


def code_digest() -> str:
    """Of the program's own source files, wherever they lie."""
    digest = hashlib.sha256()
    rooms = (CODE / room for room in ("verbs", "app", "settings"))
    files = [CODE / "cli.py", *(path for room in rooms for path in sorted(room.rglob("*.py")))]
    for path in files:
        digest.update(f"{path.relative_to(CODE).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def program_facts(packages: Iterable[str]) -> dict[str, str]:
    """What it is -> which version or digest of it this process runs."""
    return {
        "version of Python": platform.python_version(),
        **{f"version of {name}": version_of(name) for name in packages},
        "code of grpo": code_digest(),
    }


def version_of(package: str) -> str:
    """Of an installed package, or that it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def lower_bounds() -> dict[str, str]:
    """Package that the program cannot do without -> the oldest version that it was tested with."""
    project = CODE / "pyproject.toml"
    if project.is_file():
        needed = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        needed = [one for one in requires("grpo") or () if "extra ==" not in one]
    bounds = (re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\w.]+)", one.replace(" ", "")) for one in needed)
    return {bound[1]: bound[2] for bound in bounds if bound}


def release(version: str) -> tuple[int, ...]:
    """`0.10.2.dev1` as (0, 10, 2), to compare; nothing of what is not installed."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
