"""Settings of rewards, environments and tools (`env`), and the processes of all plug-ins (`plugins`)."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from settings.schema.rollout import MAX_SLOTS, MAX_TOKENS
from settings.schema.section import LocalPath, Section, as_list, validate_plugin
from settings.secrets import SECRETS

BUILT_IN_REWARDS = ("gsm8k", "arithmetic", "gsm8k_format", "arithmetic_format", "math_verify")
"""Names of the built-in functions of `reward.functions`."""

CALLABLE_PREFIX = "callable:"
"""Prefix of `function` for a Python function that was passed to `grpo.train`; only that process can call it."""

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
    """Returns a name that can be part of a metric name; raises ValueError for others."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value):
        raise ValueError("expected 1 to 64 letters, digits, `_` or `-`")
    return value


class RewardFunctionSettings(Section):
    name: Annotated[str, AfterValidator(_validate_reward_name)] = Field(
        description="Name of a built-in reward (" + ", ".join(BUILT_IN_REWARDS) + ") or of a plug-in; the name of the "
        "plug-in's function when absent."
    )
    function: Annotated[str, AfterValidator(validate_plugin)] | None = None
    """Plug-in: `module:function` or `path/to/file.py:function`; null for a built-in reward. `callable:function` is a
    Python function that was passed to `grpo.train`."""
    weight: float = 1.0
    """Factor of this function's value in the reward of a sample; 0 only logs the value."""

    @model_validator(mode="after")
    def _validate_name(self) -> RewardFunctionSettings:
        if self.function is None and self.name not in BUILT_IN_REWARDS:
            raise ValueError(
                f"unknown reward `{self.name}`, expected one of {', '.join(BUILT_IN_REWARDS)}, or a plug-in "
                "such as `my_module:function` or `rewards.py:function`"
            )
        if self.function is not None and self.name in BUILT_IN_REWARDS:
            raise ValueError(
                f"expected a plug-in's own name, but `{self.name}` is a built-in reward; set another `name:`"
            )
        return self

    @model_serializer(mode="wrap")
    def _omit_absent_function(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if (name, value) != ("function", None)}


def _expand_shorthand(value: Any) -> Any:
    """Expands `- gsm8k` to `- {name: gsm8k}`, and `- my_module:brevity` to a function of that name."""
    if isinstance(value, str):
        if value.endswith(".py"):
            raise ValueError(f"expected a function, as in {value}:FUNCTION")
        value = {"function": value} if ":" in value else {"name": value}
    if isinstance(value, dict) and isinstance(value.get("function"), str) and "name" not in value:
        value = value | {"name": re.split(r"[:.]", value["function"])[-1]}
    return value


def _as_list(value: Any) -> Any:
    """Returns a single function as a list of one; raises ValueError for several in one string."""
    if isinstance(value, str) and "," in value:
        names = ", ".join(name.strip() for name in value.split(","))
        raise ValueError(f"expected a list for several functions, such as [{names}]")
    return as_list(value)


class RewardSettings(Section):
    functions: Annotated[
        tuple[Annotated[RewardFunctionSettings, BeforeValidator(_expand_shorthand)], ...],
        Field(strict=False),
        BeforeValidator(_as_list),
        AfterValidator(_validate_distinct_names),
    ] = (RewardFunctionSettings(name="arithmetic"),)
    """Reward functions, which grade the policy's last turn; the reward of a sample is the weighted sum of their values.
    Each is the name of a built-in function (gsm8k, arithmetic, gsm8k_format, arithmetic_format, math_verify),
    `path/to/file.py:name`, `module:name`, or a mapping such as `{function: rewards.py:brevity, name: short, weight:
    0.5}`, in which `weight` is 1 by default. The first function determines `eval/accuracy`. With `env.source`, the
    default is an empty list, and the rewards of the environment determine `eval/accuracy`."""
    model: LocalPath | None = Field(default=None, min_length=1)
    """Reward model: directory or hub id of a sequence classifier with one label. Its score of the prompt and the
    policy's last turn is added to the reward under the name `model`. If null, there is no reward model."""
    model_weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Factor of the reward model's score in the reward of a sample; 0 only logs the score."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Subtracts from the reward a length penalty that rises linearly from 0 to `reward.overlong_penalty` over the last
    overlong_buffer tokens up to `rollout.max_new_tokens`. Observations count as tokens. If null, there is no penalty.
    `grpo score --role reward` also applies it."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """Length penalty of a completion of `rollout.max_new_tokens` tokens, if `reward.overlong_buffer` is set."""
    on_error: Literal["raise", "zero", "drop"] = "raise"
    """What to do if a reward function or the reward model fails on a sample: stop the run (raise), count its value as 0
    (zero), or leave the sample out of training (drop)."""
    batch_size: int = Field(default=64, ge=1, le=65_536)
    """Maximum number of samples per call of a reward function that takes batches. The samples of a prompt are passed
    together."""


BUILT_IN_ENVIRONMENTS = ("calculator", "guess_number")
"""Built-in values of `env.source`; others name a plug-in."""
BUILT_IN_TOOLS = ("calculator",)
"""Built-in values of `env.tools`; others name a plug-in."""

DECISIVE_FIELDS = frozenset({"source", "tools", "max_turns", "max_turn_tokens", "max_observation_tokens", "parser"})
"""Fields of `env` that determine the samples, as long as no time limit is exceeded."""

ToolCallFormat = Literal["auto", "json_tags", "json", "none"]
"""Values of `env.parser`."""


class EnvironmentSettings(Section):
    source: Annotated[str, AfterValidator(partial(validate_plugin, built_in=BUILT_IN_ENVIRONMENTS))] | None = None
    """Environment that answers the policy after every turn: calculator, guess_number, `path/to/file.py:name` or
    `module:name`. Its rewards are added to the reward of the sample under the name `env`. If null, there is no
    environment."""
    tools: Annotated[
        tuple[Annotated[str, AfterValidator(partial(validate_plugin, built_in=BUILT_IN_TOOLS))], ...],
        Field(strict=False),
        BeforeValidator(as_list),
    ] = ()
    """Functions that the policy may call: calculator, `path/to/file.py:name` or `module:name`. With `env.source`, they
    are added to the environment's own tools; without it, a turn without a call is the answer, which the reward
    functions grade."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Factor of the environment's rewards in the reward of a sample; 0 only logs them."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """Where the environment's rewards count: all at the end of the sample (trajectory), or each at the end of the turn
    that earned it (turn). `turn` needs an estimator with returns per token: gae, vtrace or reinforce_plus_plus."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """Discount factor per turn for the environment's rewards in later turns, with `env.credit: turn`; `algorithm.gamma`
    is the factor per token."""
    max_turns: int = Field(default=8, ge=1, le=1024)
    """Maximum number of policy turns in a sample. A sample that needs more is truncated."""
    max_turn_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Maximum length of a policy turn in tokens; a longer turn truncates the sample. If null, only
    `rollout.max_new_tokens` limits it, which counts all tokens after the prompt, including observations."""
    max_observation_tokens: int | None = Field(default=1024, ge=1, le=MAX_TOKENS)
    """Maximum length of an observation in tokens, not counting those that the chat template adds. Text beyond it is
    replaced by a note for the policy; null never cuts. An observation that does not fit into `rollout.max_new_tokens`
    truncates the sample."""
    parser: ToolCallFormat = "auto"
    """How the policy writes tool calls: as JSON between `<tool_call>` and `</tool_call>` (json_tags: Qwen, SmolLM,
    Hermes), as one JSON object (json: Llama 3), or not at all (none). `auto` selects the format that the chat template
    uses."""
    step_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """Time limit in seconds for a step of an environment, after which its process is killed. The other samples of that
    process are replayed from the start, and dropped if the environment answers differently."""
    concurrency: int = Field(default=32, ge=1, le=4096)
    """Number of samples that each process serves at once, in threads that share modules and memory. Raise it for
    environments that wait rather than compute."""
    max_suspended: int | None = Field(default=None, ge=0, le=MAX_SLOTS)
    """Maximum number of samples, per worker or for `rollout.slots`, that give up their slots while they wait for the
    environment; they keep their KV cache while there is room. Null allows four per slot, and 0 none. Raise it if a step
    of the environment takes more than four times as long as a turn of the policy."""

    @property
    def is_used(self) -> bool:
        """Whether there is an environment or a tool, so that samples have several turns."""
        return self.source is not None or bool(self.tools)


def _validate_variable_names(value: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names; raises ValueError if one is not valid or names a secret of this program."""
    for name in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(
                f"expected names of letters, digits and `_` that do not start with a digit, but one is `{name}`"
            )
        if name in SECRETS:
            raise ValueError(f"expected no secrets, but {name} is one; remove it, since plug-ins never get secrets")
    return value


class PluginSettings(Section):
    workers: int = Field(default=4, ge=1, le=1024)
    """Maximum number of processes on each host for each reward function, and for the environments with their tools.
    Raise it if plug-ins are slow and CPU cores are idle."""
    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Time limit in seconds for one call of a reward function, with one sample or one batch. `env.step_timeout_s` is
    the limit for a step of an environment."""
    memory_mib: int = Field(default=4096, ge=256, le=1_048_576)
    """Limit in MiB for the address space of each plug-in process, including its libraries."""
    env_vars: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_validate_variable_names)] = ()
    """Names of environment variables that plug-in processes get, in addition to a few standard ones."""
