"""Settings of the section `run`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from settings.schema.section import Section


def _validate_run_name(value: str) -> str:
    if len(value) > 100 or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError("expected at most 100 letters, digits, `.`, `_`, `-`, starting with a letter or digit")
    return value


class RunSettings(Section):
    name: Annotated[str, AfterValidator(_validate_run_name)] | None = Field(
        default=None, description="Names the run directory. Derived when null: `<config>-seed<seed>`."
    )
    dir: str = Field(default="runs", min_length=1, description="Folder that holds the run directories.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Root of all randomness: data order and sampling noise.")
    steps: int = Field(default=100, ge=1, description="Training steps: rollout, reward, score, advantage, update.")
