"""Settings of the reward: functions, reward model and length penalty."""

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

from settings.schema.section import Section

BUILT_IN_REWARDS = ("gsm8k", "arithmetic", "gsm8k_format", "arithmetic_format", "math_verify")
"""Names of the built-in functions of `reward.functions`."""

CALLABLE_PREFIX = "callable:"
"""Start of `function` for a Python function that was passed to `grpo.train`; only that process can call it."""

OVERLONG_REWARD = "overlong"
"""Name of the length penalty among a sample's rewards."""

MODEL_REWARD = "model"
"""Name of the reward model's score among a sample's rewards."""

ENVIRONMENT_REWARD = "env"
"""Name of the environment's reward among a sample's rewards."""


def _validate_distinct_names(value: tuple[RewardFunctionSettings, ...]) -> tuple[RewardFunctionSettings, ...]:
    names = [function.name for function in value]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"expected different names, but `{repeated[0]}` occurs {names.count(repeated[0])} times; "
            "name a plug-in as in `{name: other, function: my_module:function}`"
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


class RewardFunctionSettings(Section):
    name: Annotated[str, AfterValidator(_validate_reward_name)] = Field(
        description="Name of a built-in reward (" + ", ".join(BUILT_IN_REWARDS) + ") or of a plug-in; the name of the "
        "plug-in's function when absent."
    )
    function: Annotated[str, AfterValidator(_validate_function_path)] | None = None
    """Plug-in: `module:function` or `path/to/file.py:function`; null for a built-in reward. `callable:function` is a
    Python function that was passed to `grpo.train`."""
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
        if value.endswith(".py"):
            raise ValueError(f"{value} names no function; write {value}:FUNCTION")
        value = {"function": value} if ":" in value else {"name": value}
    if isinstance(value, dict) and isinstance(value.get("function"), str) and "name" not in value:
        value = value | {"name": re.split(r"[:.]", value["function"])[-1]}
    return value


def _as_list(value: Any) -> Any:
    """Accepts one function instead of a list."""
    if isinstance(value, str) and "," in value:
        names = ", ".join(name.strip() for name in value.split(","))
        raise ValueError(f"expected a list for several functions, such as [{names}]")
    return [value] if isinstance(value, str) else value


class RewardSettings(Section):
    functions: Annotated[
        tuple[Annotated[RewardFunctionSettings, BeforeValidator(_expand_shorthand)], ...],
        Field(strict=False),
        BeforeValidator(_as_list),
        AfterValidator(_validate_distinct_names),
    ] = (RewardFunctionSettings(name="arithmetic"),)
    """Reward functions; a sample's reward is their weighted sum. The first one determines `eval/accuracy`. They judge
    what the policy wrote in its last turn. With `env.source`, none unless set: the environment's reward is the reward,
    and determines `eval/accuracy`."""
    model: str | None = Field(default=None, min_length=1)
    """Reward model: directory or hub id of a sequence classifier with one label. Its score of the whole conversation
    (of several turns, the prompt and the last) is added to the sum under the name `model`. Null = no reward model."""
    model_weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Weight of the reward model's score in the sum; 0 = logged but not counted."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Number of tokens before `rollout.max_new_tokens` over which the reward falls linearly by up to
    `overlong_penalty`, observations included; null = no length penalty. `grpo score --role reward` applies it, too."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """Length penalty for a completion of `rollout.max_new_tokens` tokens."""
    on_error: Literal["raise", "zero", "drop"] = "raise"
    """What to do if a function or the reward model fails on a sample: stop the run, count its value as 0, or drop the
    sample."""
    batch_size: int = Field(default=64, ge=1, le=65_536)
    """Maximum number of samples per call of a batch-style plug-in. The samples of a prompt stay together."""
