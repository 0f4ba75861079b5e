"""Settings of the reward: functions, reward model, and resource limits of plug-ins."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from settings.loading.secrets import SECRETS
from settings.schema.section import Section

BUILT_IN_REWARDS = ("gsm8k", "arithmetic", "gsm8k_format", "arithmetic_format", "math_verify")
"""Names of the built-in functions of `reward.functions`."""

OVERLONG_REWARD = "overlong"
"""Name of the length penalty among a sample's rewards."""

MODEL_REWARD = "model"
"""Name of the reward model's score among a sample's rewards."""


def _validate_distinct_names(value: tuple[RewardFunctionSettings, ...]) -> tuple[RewardFunctionSettings, ...]:
    names = [function.name for function in value]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"expected each name once, `{repeated[0]}` is there {names.count(repeated[0])} times; "
            "a plug-in takes another one as in `{name: other, function: my_module:function}`"
        )
    return value


def _validate_reward_name(value: str) -> str:
    """Accepts names that can be part of a metric name."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value):
        raise ValueError("expected at most 64 letters, digits, `_`, `-`")
    return value


def _validate_function_path(value: str) -> str:
    place, _, attribute = value.rpartition(":")
    is_place = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    if not is_place or not all(part.isidentifier() for part in attribute.split(".")):
        raise ValueError("expected `module:function` or `path/to/file.py:function`")
    return value


def _validate_variable_names(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"expected names of environment variables, `{name}` is not one")
        if name in SECRETS:
            raise ValueError(f"expected no secret of this program, {name} is never passed on")
    return value


class RewardFunctionSettings(Section):
    name: Annotated[str, AfterValidator(_validate_reward_name)] = Field(
        description="Name of a built-in reward (" + ", ".join(BUILT_IN_REWARDS) + ") or of a plug-in; when absent, the "
        "name of the plug-in's function."
    )
    function: Annotated[str, AfterValidator(_validate_function_path)] | None = None
    """Plug-in: `module:function` or `path/to/file.py:function`; null for a built-in reward."""
    weight: float = 1.0
    """Weight in the sum of rewards; 0 = logged but not counted."""

    @model_validator(mode="after")
    def _validate_name(self) -> RewardFunctionSettings:
        if self.function is None and self.name not in BUILT_IN_REWARDS:
            raise ValueError(
                f"unknown reward `{self.name}`, expected one of {', '.join(BUILT_IN_REWARDS)}, or a plug-in "
                "such as `my_module:function` or `rewards.py:function`"
            )
        if self.function is not None and self.name in BUILT_IN_REWARDS:
            raise ValueError(f"`{self.name}` is the name of a built-in reward; give the plug-in another `name:`")
        return self

    @model_serializer(mode="wrap")
    def _omit_absent_function(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if (name, value) != ("function", None)}


def _expand_shorthand(value: Any) -> Any:
    """Expands `- gsm8k` to `- {name: gsm8k}`, and `- my_module:brevity` to a function of that name."""
    if isinstance(value, str):
        value = {"function": value} if ":" in value else {"name": value}
    if isinstance(value, dict) and isinstance(value.get("function"), str) and "name" not in value:
        value = value | {"name": re.split(r"[:.]", value["function"])[-1]}
    return value


class RewardSettings(Section):
    functions: Annotated[
        tuple[Annotated[RewardFunctionSettings, BeforeValidator(_expand_shorthand)], ...],
        Field(min_length=1, strict=False),
        AfterValidator(_validate_distinct_names),
    ] = (RewardFunctionSettings(name="arithmetic"),)
    """Reward functions; a sample's reward is their weighted sum. The first one determines `eval/accuracy`."""
    model: str | None = Field(default=None, min_length=1)
    """Reward model: directory or hub id of a sequence classifier with one label. Its score of the whole conversation is
    added to the sum under the name `model`. Null = no reward model."""
    model_revision: str | None = None
    """Commit, tag or branch of the reward model's hub id; its newest commit when null."""
    model_weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Weight of the reward model's score in the sum; 0 = logged but not counted."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Number of last tokens before `rollout.max_new_tokens` over which the reward falls linearly by up to
    `overlong_penalty`; null = no length penalty. It also applies to `grpo score --role reward`."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """Length penalty of a completion of `rollout.max_new_tokens` tokens."""
    on_error: Literal["raise", "zero", "drop"] = "raise"
    """If a function or the reward model fails on a sample: stop the run, count its value as 0, or leave out the
    sample."""
    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Wall-clock limit in seconds for one call of a plug-in, which is one sample or one batch."""
    cpu_s: int = Field(default=30, ge=1, le=36_000)
    """Processor time limit in seconds for one call of a plug-in."""
    memory_mib: int = Field(default=4096, ge=256, le=1_048_576)
    """Address space limit in MiB of a plug-in's process, including its libraries."""
    workers: int = Field(default=4, ge=1, le=256)
    """Maximum number of processes of each plug-in, on each host."""
    batch_size: int = Field(default=64, ge=1, le=65_536)
    """Maximum number of samples per call of a batch-style plug-in. The samples of a prompt stay together."""
    max_characters: int = Field(default=100_000, ge=1, le=10_000_000)
    """Plug-ins get at most this many characters of a completion: the last ones."""
    load_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Wall-clock limit in seconds for the import of a plug-in."""
    environment: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_validate_variable_names)] = ()
    """Names of additional environment variables that are passed to plug-ins; by default few are."""
