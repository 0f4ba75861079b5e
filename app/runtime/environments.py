"""Opens the environment and the tools of `env.*`."""

from __future__ import annotations

import copy
import logging
from contextlib import closing
from functools import partial
from typing import Any

from app.environments.episode_pool import EpisodePool
from app.plugins.values import one_line
from app.plugins.worker_process import allow_variables
from app.prompts.observation_encoder import ObservationEncoder
from app.prompts.tokenizer import Tokenizer
from app.prompts.tool_calls import resolve_format, turn_calls
from app.prompts.turn_end import unended_turn
from app.records.identity import plugin_file_digests
from app.records.sample import Prompt
from app.records.text_format import format_count
from app.records.typed_values import to_text
from app.rollout.conversations import Conversations, TurnLimits
from settings import Settings
from settings.errors import InputError
from settings.schema.reward import DECISIVE_FIELDS, EnvironmentSettings

log = logging.getLogger(__name__)


def open_pool(settings: Settings) -> EpisodePool:
    """Opens a pool that starts no process yet; raises InputError if a variable in `plugins.env_vars` is not set."""
    allow_variables(settings.plugins.env_vars)
    return EpisodePool(settings.env, settings.plugins)


def prepare_turns(settings: Settings, tokenizer: Tokenizer) -> None:
    """Imports the environment and `env.tools` once, and adds their tools to the prompts that `tokenizer` encodes.

    Without an environment, only warns if the chat template does not mark the end of a turn.

    Raises:
        InputError: the environment, a tool, the chat template or its tool-call format cannot be used.
    """
    env = settings.env
    if not env.is_used:
        has_turns = settings.data.chat_template != "none"
        if has_turns and (fault := unended_turn(tokenizer, settings.rollout.stop)) is not None:
            log.warning("%s: %s; %s", settings.model.path, *fault)
        return
    with closing(open_pool(settings)) as pool:
        tokenizer.tools = pool.load()["tools"]
    ObservationEncoder(tokenizer, tokenizer.tools)
    resolve_format(env.parser, tokenizer, has_tools=bool(tokenizer.tools))


def environment_facts(env: EnvironmentSettings) -> dict[str, Any]:
    """Returns what in `env.*` determines the samples, as name -> JSON value; empty without environment and tools."""
    if not env.is_used:
        return {}
    played = env.model_dump(mode="json", include=set(DECISIVE_FIELDS))
    files = [*plugin_file_digests("env", (env.source, *env.tools)).values()]
    return {**{f"env.{name}": value for name, value in played.items()}, "the files of env.source and env.tools": files}


def open_conversations(settings: Settings, tokenizer: Tokenizer) -> Conversations | None:
    """Returns the conversations of one generator with `env.source` and `env.tools`; None if both are unset."""
    env = settings.env
    if not env.is_used:
        return None
    style = resolve_format(env.parser, tokenizer, has_tools=bool(tokenizer.tools))
    # Copied, because encoding changes a tokenizer's state, and turns may be joined in the generation thread.
    of_thread = copy.deepcopy(tokenizer)
    limits = TurnLimits(
        max_turns=env.max_turns,
        max_turn_tokens=env.max_turn_tokens,
        max_observation_tokens=env.max_observation_tokens,
        max_prompt_tokens=settings.data.max_prompt_length,
        max_suspended=env.max_suspended,
    )
    return Conversations(
        pool=open_pool(settings),
        observations=ObservationEncoder(of_thread, of_thread.tools),
        limits=limits,
        seed=settings.run.seed,
        encode_opening=tokenizer.chat_ids,
        system_prompt=settings.data.system_prompt,
        decode_text=tokenizer.decode,
        read_calls=partial(turn_calls, of_thread, style=style),
    )


def try_episode(settings: Settings, tokenizer: Tokenizer, prompt: Prompt) -> str:
    """Runs a trial episode whose only turn is a prompt's reference answer, and returns a report for users.

    This finds errors of the environment before anything is compiled.

    Raises:
        InputError: the environment fails, or its opening messages are too long.
    """
    conversations = open_conversations(settings, tokenizer)
    assert conversations is not None
    turn = to_text(prompt.answer)
    with closing(conversations.pool) as pool:
        [opening] = conversations.open([prompt])
        if opening.failure is not None:
            raise InputError(
                f"env.source: the environment failed to open a trial episode before training, for {prompt.uid}: "
                f"{opening.failure.text}; fix the environment"
            )
        pool.step("trial", opening.start, opening.messages, turn, [], is_last=True)
        [reply] = pool.take(None)
    if reply.failure is not None:
        raise InputError(
            f"env.source: the environment failed in a trial episode before training, on the turn {turn!r:.60}: "
            f"{reply.failure.text}; fix the environment"
        )
    names = ", ".join(schema["function"]["name"] for schema in tokenizer.tools)
    opened = f"a prompt of {format_count(len(opening.prompt.token_ids), 'token')}" + (
        f" with the tools {names}" if names else ""
    )
    reward = reply.reward + sum(reply.scores.values())
    observation = " ".join(message["content"] for message in reply.messages)
    return f"{prompt.uid}: {opened}; the turn {turn!r:.60} got {one_line(observation)!r} and a reward of {reward:g}"
