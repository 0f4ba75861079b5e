"""Opens the environment and the tools of `env.*`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from app.environments.episode_pool import EpisodePool
from app.plugins.loading import LoadError
from app.prompts.bridge import TurnBridge
from app.prompts.tokenizer import Tokenizer
from app.prompts.tool_calls import resolve_format, turn_calls
from app.rollout.conversations import Conversations, TurnLimits
from settings import Settings
from settings.errors import InputError
from settings.schema.environment import EnvironmentSettings


def read_tool_schemas(env: EnvironmentSettings) -> Sequence[Mapping[str, Any]]:
    """Returns the tools that prompts list, as OpenAI defines them, after importing environment and tools once.

    Raises:
        InputError: they cannot be loaded.
    """
    if not env.is_used:
        return ()
    with closing(EpisodePool(env)) as pool:
        try:
            return pool.load().tool_schemas
        except LoadError as error:
            place = f"env.source: {env.source}" if env.source else f"env.tools: {', '.join(env.tools)}"
            raise InputError(f"{place}: {error}") from error


def check_turns(settings: Settings, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Checks that the chat template serves several turns; returns notes on it for users.

    Raises:
        InputError: the template, or how it writes calls, cannot be used.
    """
    if not settings.env.is_used:
        return ()
    notes = TurnBridge(tokenizer, tokenizer.tools).notes
    resolve_format(settings.env.parser, tokenizer, has_tools=bool(tokenizer.tools))
    return notes


def open_conversations(settings: Settings, tokenizer: Tokenizer) -> Conversations | None:
    """Opens processes for the environments of one generator; None without an environment. `close` ends them."""
    env = settings.env
    if not env.is_used:
        return None
    style = resolve_format(env.parser, tokenizer, has_tools=bool(tokenizer.tools))
    # Encoding changes a tokenizer, and turns may be joined in the thread of generation.
    of_thread = copy.deepcopy(tokenizer)
    limits = TurnLimits(
        max_turns=env.max_turns,
        max_turn_tokens=env.max_turn_tokens,
        max_observation_tokens=env.max_observation_tokens,
        max_prompt_tokens=settings.data.max_prompt_length,
        max_suspended=env.max_suspended,
    )
    return Conversations(
        pool=EpisodePool(env),
        bridge=TurnBridge(of_thread, of_thread.tools),
        limits=limits,
        seed=settings.run.seed,
        encode_opening=tokenizer.chat_ids,
        system_prompt=settings.data.system_prompt,
        decode_text=tokenizer.decode,
        read_calls=partial(turn_calls, of_thread, style=style),
    )
