"""Settings of the section `plugins`: the processes in which reward functions, environments and tools run."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from settings.loading.secrets import SECRETS
from settings.schema.section import Section


def _validate_variable_names(value: tuple[str, ...]) -> tuple[str, ...]:
    """Accepts names of environment variables that hold no secrets of this program."""
    for name in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"expected names of environment variables, but `{name}` is not one")
        if name in SECRETS:
            raise ValueError(f"expected no secrets, but {name} is one, which plug-ins never get")
    return value


class PluginSettings(Section):
    workers: int = Field(default=4, ge=1, le=1024)
    """Most processes of each reward function, and of the environments with their tools, on each host."""
    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds for one call of a reward function, with one sample or one batch; a step of an environment has
    `env.step_timeout_s`."""
    memory_mib: int = Field(default=4096, ge=256, le=1_048_576)
    """Address space limit in MiB of each process, including its libraries."""
    env_vars: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_validate_variable_names)] = ()
    """Names of additional environment variables that the processes get; by default they get only a few."""
