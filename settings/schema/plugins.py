"""Settings of plug-ins: environments and tools (`env`), and the processes of all plug-ins (`plugins`)."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from settings.loading.secrets import SECRETS
from settings.schema.rollout import MAX_SLOTS, MAX_TOKENS
from settings.schema.section import Section

BUILT_IN_ENVIRONMENTS = ("calculator", "guess_number", "lookup")
"""Values of `env.source` beside paths."""
BUILT_IN_TOOLS = ("calculator", "lookup")
"""Values of `env.tools` beside paths."""

DECISIVE_FIELDS = frozenset({"source", "tools", "max_turns", "max_turn_tokens", "max_observation_tokens", "parser"})
"""Fields of `env` that the samples depend on, unless a time-out is reached."""

ToolCallFormat = Literal["auto", "json_tags", "json", "none"]
"""Values of `env.parser`."""


def _validate_name(value: str, *, known: tuple[str, ...]) -> str:
    place, _, attribute = value.rpartition(":")
    is_place = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    if value not in known and not (is_place and all(part.isidentifier() for part in attribute.split("."))):
        raise ValueError(f"expected one of {', '.join(known)}, or `path/to/file.py:name`, or `module:name`")
    return value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class EnvironmentSettings(Section):
    source: Annotated[str, AfterValidator(partial(_validate_name, known=BUILT_IN_ENVIRONMENTS))] | None = None
    """Environment that answers the policy after every turn: calculator, guess_number, lookup, `path/to/file.py:name` or
    `module:name`. Its rewards are added to the sum under the name `env`. Null = none."""
    tools: Annotated[
        tuple[Annotated[str, AfterValidator(partial(_validate_name, known=BUILT_IN_TOOLS))], ...],
        Field(strict=False),
        BeforeValidator(_as_list),
    ] = ()
    """Functions that the policy may call: calculator, lookup, `path/to/file.py:name` or `module:name`. A turn without
    a call is the answer, which the reward functions judge. With `source`, tools beside those of the environment."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Weight of the rewards of `source` in the sum; 0 = logged but not counted."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """Where the rewards of `source` count: all at the end of the sample (trajectory), or each at the end of the turn
    that earned it (turn), which needs an estimator of returns per token: gae, vtrace or reinforce_plus_plus."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """With `credit: turn`: factor by which a reward is discounted for every turn between it and the turn that learns
    from it."""
    max_turns: int = Field(default=8, ge=1, le=1024)
    """Most turns of the policy in a sample. One that would need more is truncated, as at `rollout.max_new_tokens`."""
    max_turn_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Longest turn, in tokens, at which a sample is truncated; null = only `rollout.max_new_tokens`, which counts all
    tokens behind the prompt, observations included."""
    max_observation_tokens: int | None = Field(default=1024, ge=1, le=MAX_TOKENS)
    """Longest observation in tokens, without those of the chat template: messages of a longer one are cut at their
    ends, with a note for the policy; null = never. An observation that does not fit into `rollout.max_new_tokens`
    truncates the sample."""
    parser: ToolCallFormat = "auto"
    """How the policy writes tool calls: as JSON between `<tool_call>` and `</tool_call>` (json_tags: Qwen, SmolLM,
    Hermes), as one JSON object (json: Llama 3), or not at all (none). auto = as the chat template says."""
    step_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """Seconds after which one step of an environment counts as hung; its process is then ended. Its other samples are
    played again from the start, and dropped if they get another answer to the same turns."""
    concurrency: int = Field(default=32, ge=1, le=4096)
    """Samples that each process serves at once, in threads, which share modules and memory: for environments that wait
    rather than compute."""
    max_suspended: int | None = Field(default=None, ge=0, le=MAX_SLOTS)
    """Most samples of a worker, or of `rollout.slots`, that leave their slots while they wait for the environment; they
    keep their part of the KV cache while there is room. Slots are busy with slots * (1 + latency / time of a turn)
    samples. Null = four for each slot; 0 = they wait in their slots."""

    @property
    def is_used(self) -> bool:
        """Whether samples have several turns."""
        return self.source is not None or bool(self.tools)


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
