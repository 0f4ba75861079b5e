"""The program of a worker, which plays episodes, each in a thread of its own.

It is started by `app.plugins.start_worker` and exchanges JSON Lines with `app.environments.episode_pool`. The requests
of an episode come one at a time; answers come as they are ready:

    {"source": "game.py:Game", "tools": [], "memory_mib": 4096} -> {"tools": [<schema>, ...]} or {"refused": "why"}
    {"episode": 7, "do": "reset", "seed": 7, "columns": {...}} -> {"messages": [...]} or {"messages": null}
    {"episode": 7, "do": "step", "text": "...", "calls": [...]} -> the fields of `Answer`
    {"episode": 7, "do": "score"} -> {"scores": {...}}
    {"episode": 7, "do": "close"} -> {}

Every answer also has the "episode". Instead of its other fields it may have a {"failure": [kind, text]}.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from app.environments.adapters import AdaptedEnvironment, load_environment
from app.environments.interface import ToolCall
from app.plugins.loading import LoadError, describe_error
from app.plugins.supervisor import limit_memory, supervise
from app.plugins.trainer_channel import TrainerChannel
from app.plugins.values import PlugInValueError, awaited

STACK_BYTES = 2 * 2**20
"""Of a thread: with those of the system, many episodes would fill the address space."""


def main() -> None:
    """Loads the environment, reports its tools, and serves requests until the trainer exits."""
    supervise()
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    channel = TrainerChannel()
    order = channel.receive()
    limit_memory(order["memory_mib"] * 2**20)
    threading.stack_size(STACK_BYTES)
    # One loop for all episodes, because they may share connections, which belong to the loop that made them.
    loop = asyncio.new_event_loop()
    threading.Thread(target=run_forever, args=(loop,), daemon=True).start()

    def wait(value: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaited(value), loop).result() if inspect.isawaitable(value) else value

    try:
        make, schemas = load_environment(order["source"], order["tools"], wait)
    except LoadError as refusal:
        channel.send({"refused": str(refusal)})
        return
    channel.send({"tools": schemas})
    episodes: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
    while True:
        request = channel.receive()
        key = request["episode"]
        if key not in episodes:
            episodes[key] = queue.SimpleQueue()
            threading.Thread(target=play, args=(make, episodes[key], channel), daemon=True).start()
        episodes[key].put(request)
        if request["do"] == "close":
            del episodes[key]


def run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with contextlib.suppress(BaseException):  # `sys.exit` in a coroutine also ends its loop
            loop.run_forever()


def play(
    make: Callable[[], AdaptedEnvironment], requests: queue.SimpleQueue[dict[str, Any]], channel: TrainerChannel
) -> None:
    """Serves all requests of one episode, in one thread, because libraries may keep state for each thread."""
    process_id = os.getpid()
    environment: AdaptedEnvironment | None = None
    is_open = True
    while is_open:
        request = requests.get()
        is_open = request["do"] != "close"
        try:
            environment = environment or make()
            answer = serve(environment, request)
        except PlugInValueError as error:
            answer = {"failure": [error.kind, str(error)]}
        except BaseException as error:  # no error may affect another episode
            kind = "memory" if isinstance(error, MemoryError) else "exit" if isinstance(error, SystemExit) else "raised"
            answer = {"failure": [kind, describe_error(error)]}
        if os.getpid() != process_id:
            os._exit(0)  # a child that the environment forked also returned from it
        channel.send(answer | {"episode": request["episode"]})


def serve(environment: AdaptedEnvironment, request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer to one request."""
    match request["do"]:
        case "reset":
            return {"messages": environment.reset(request["seed"], request["columns"])}
        case "step":
            calls = [ToolCall(*call) for call in request["calls"]]
            return environment.step(request["text"], calls)._asdict()
        case "score":
            return {"scores": environment.score()}
        case _:
            environment.close()
            return {}
