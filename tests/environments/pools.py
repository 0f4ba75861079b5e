"""Writes environments to files and opens pools that run them."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.environments.episode_pool import EPISODE_TIMEOUT_S, EpisodePool, EpisodeReply, EpisodeStart
from app.environments.interface import ToolCall
from settings.schema.reward import EnvironmentSettings, PluginSettings
from tests.program import DEADLINE_S


def write(folder: Path, source: str) -> str:
    (folder / "plug.py").write_text(textwrap.dedent(source))
    return str(folder / "plug.py")


@contextmanager
def opened(*, episode_timeout_s: float = EPISODE_TIMEOUT_S, **settings: Any) -> Iterator[EpisodePool]:
    """Opens a pool of one worker; any setting of `env` and `plugins` can be changed."""
    given = {"workers": 1, "concurrency": 8, "step_timeout_s": 60, **settings}
    plugins = {name: given.pop(name) for name in PluginSettings.model_fields if name in given}
    pool = EpisodePool(
        EnvironmentSettings.model_validate(given),
        PluginSettings.model_validate(plugins),
        episode_timeout_s=episode_timeout_s,
    )
    try:
        yield pool
    finally:
        pool.close()


class Game:
    """An episode seen from the sampler: plays turns and collects the replies of all episodes of its pool."""

    def __init__(self, pool: EpisodePool, key: str, *, seed: int = 0, opening: Any = None, **columns: Any) -> None:
        self.pool, self.key, self.opening = pool, key, opening
        self.start = EpisodeStart(seed, {"prompt": "p", "answer": "a", **columns})

    def send(self, text: str, calls: Sequence[ToolCall] = (), *, is_last: bool = False) -> None:
        self.pool.step(self.key, self.start, self.opening, text, calls, is_last=is_last)

    def play(self, text: str, calls: Sequence[ToolCall] = (), *, is_last: bool = False) -> EpisodeReply:
        self.send(text, calls, is_last=is_last)
        (reply,) = take(self.pool, 1)
        assert reply.key == self.key
        return reply


def take(pool: EpisodePool, number: int) -> list[EpisodeReply]:
    """Returns exactly so many replies, sorted by key."""
    replies: list[EpisodeReply] = []
    while len(replies) < number:
        new = pool.take(DEADLINE_S)
        assert new, f"no reply, after {replies}"
        replies += new
    assert len(replies) == number
    return sorted(replies)


def contents(reply: Any) -> list[str]:
    return [message["content"] for message in reply.messages]
