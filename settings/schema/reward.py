"""The settings of the reward: its functions, its model, and what plug-ins may use."""

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
"""What `reward.functions` knows by name alone."""

OVERLONG_REWARD = "overlong"
"""The name of the penalty for length among a sample's rewards."""


MODEL_REWARD = "model"
"""The name of the reward model's score among those of the functions."""


def _validate_distinct_names(value: tuple[RewardFunctionSettings, ...]) -> tuple[RewardFunctionSettings, ...]:
    names = [function.name for function in value]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"expected each name once, `{repeated[0]}` stands there {names.count(repeated[0])} times; "
            "a plug-in takes another one as in `{name: other, function: my_module:function}`"
        )
    return value


def _validate_reward_name(value: str) -> str:
    """It becomes part of metric names."""
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
            raise ValueError(f"expected names of environment variables, `{name}` is none")
        if name in SECRETS:
            raise ValueError(f"expected nothing secret of this program, {name} stays here")
    return value


class RewardFunctionSettings(Section):
    name: Annotated[str, AfterValidator(_validate_reward_name)] = Field(
        description="Built-in: " + ", ".join(BUILT_IN_REWARDS) + ". A plug-in's own: its function's name when absent."
    )
    function: Annotated[str, AfterValidator(_validate_function_path)] | None = Field(
        default=None, description="A plug-in: `module:function` or `path/to/file.py:function`."
    )
    weight: float = Field(default=1.0, description="Factor in the weighted sum; 0 = shown but not counted.")

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
    """`- gsm8k` is short for `- {name: gsm8k}`, and `- my_module:brevity` for a function of that name."""
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
    ] = Field(
        default=(RewardFunctionSettings(name="arithmetic"),),
        description="Weighted sum. The first one decides what `eval/accuracy` counts.",
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="A reward model: directory or hub id of a sequence classification checkpoint with one label. Its "
        "score of the whole conversation joins the sum as `model`; null = none, and no memory.",
    )
    model_revision: str | None = Field(
        default=None, description="Commit, tag or branch of its hub id; its newest commit when null."
    )
    model_weight: float = Field(
        default=1.0, ge=-1e6, le=1e6, description="Factor of its score in the weighted sum; 0 = shown but not counted."
    )
    overlong_buffer: int | None = Field(
        default=None,
        ge=1,
        description="Tokens below `rollout.max_new_tokens` over which a completion's reward falls by up to "
        "`overlong_penalty`, in proportion; null = no penalty for length. `grpo score --role reward` counts it, too.",
    )
    overlong_penalty: float = Field(
        default=1.0, gt=0, description="What a completion of `rollout.max_new_tokens` tokens loses."
    )
    on_error: Literal["raise", "zero", "drop"] = Field(
        default="raise",
        description="A function or the model fails on a sample: stop the run, count its value as 0, or leave the "
        "sample out.",
    )
    timeout_s: float = Field(
        default=10.0, gt=0, le=3600, description="Wall clock of one call of a plug-in: a sample, or a batch of them."
    )
    cpu_s: int = Field(default=30, ge=1, le=36_000, description="Processor seconds of one call of a plug-in.")
    memory_mib: int = Field(
        default=4096, ge=256, le=1_048_576, description="Address space of a plug-in's process, its libraries included."
    )
    workers: int = Field(default=4, ge=1, le=256, description="Most processes of one plug-in, on each host.")
    batch_size: int = Field(
        default=64,
        ge=1,
        le=65_536,
        description="Most samples of one call of a batch-style plug-in; a prompt's samples stay together.",
    )
    max_characters: int = Field(
        default=100_000, ge=1, le=10_000_000, description="Plug-ins see this much of a completion: its end."
    )
    load_timeout_s: float = Field(default=60.0, gt=0, le=3600, description="Wall clock of a plug-in's import.")
    environment: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_validate_variable_names)] = Field(
        default=(), description="Names of further environment variables that plug-ins may see; few are passed on."
    )
