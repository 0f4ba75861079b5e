"""Loads settings from a text or from overrides."""

from __future__ import annotations

from pathlib import Path

from settings import Resolved, load


def load_text(folder: Path, text: str, *overrides: str, **environ: str) -> Resolved:
    (folder / "c.yaml").write_text(text)
    return load("c.yaml", overrides, environ)


def with_sets(*overrides: str, **environ: str) -> Resolved:
    return load(None, overrides, environ)
