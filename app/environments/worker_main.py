"""The program of a worker, which plays episodes, each in a thread of its own.

It is started by `app.plugins.start_worker` and exchanges JSON Lines with `app.environments.episode_pool`. The requests
of an episode come one at a time; answers come as they are ready:

    {"source": "game.py:Game", "tools": [], "memory_mib": 4096} -> {"tools": [<schema>, ...]} or {"refused": "why"}
    {"key": 7, "do": "reset", "seed": 7, "columns": {...}} -> {"messages": [...]}
    {"key": 7, "do": "step", "text": "...", "calls": [...]} -> the fields of `StepResult`
    {"key": 7, "do": "score"} -> {}
    {"key": 7, "do": "close"} -> {}

Answers also have the "key". If the episode is over, by the answer or because the request "is_last", the answers to
`step` and `score` have the "scores". Instead of all that there may be a "failure" with its "detail", which ends the
episode, too. The last answer is sent after the environment was closed, so that the time-out of a step holds for that.
"""

from __future__ import annotations

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
from app.plugins.values import PlugInValueError, event_loop

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
    event_loop()  # before there are other threads
    try:
        make, schemas = load_environment(order["source"], order["tools"])
    except BaseException as error:  # including sys.exit
        channel.send({"refused": str(error) if isinstance(error, LoadError) else describe_error(error)})
        return
    channel.send({"tools": schemas})
    episodes: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
    while True:
        request = channel.receive()
        number = request["key"]
        if number not in episodes:
            episodes[number] = queue.SimpleQueue()
            threading.Thread(target=play, args=(make, episodes, number, channel), daemon=True).start()
        episodes[number].put(request)


def play(
    make: Callable[[], AdaptedEnvironment],
    episodes: dict[int, queue.SimpleQueue[dict[str, Any]]],
    number: int,
    channel: TrainerChannel,
) -> None:
    """Serves all requests of one episode, in one thread, because libraries may keep state for each thread."""
    process_id = os.getpid()
    environment: AdaptedEnvironment | None = None
    is_over = False
    while not is_over:
        request = episodes[number].get()
        try:
            environment = environment or make()
            answer, is_over = serve(environment, request)
        except PlugInValueError as error:
            answer, is_over = {"failure": error.kind, "detail": str(error)}, True
        except BaseException as error:  # no error may affect another episode
            kind = "memory" if isinstance(error, MemoryError) else "exit" if isinstance(error, SystemExit) else "raised"
            answer, is_over = {"failure": kind, "detail": describe_error(error)}, True
        if is_over and environment is not None and os.getpid() == process_id:
            try:
                environment.close()
            except BaseException as error:
                print(f"env: close: {describe_error(error)}", file=sys.stderr)
        if os.getpid() != process_id:
            os._exit(0)  # a child that the environment forked also returned from it
        if is_over:
            del episodes[number]
        channel.send(answer | {"key": number})


def serve(environment: AdaptedEnvironment, request: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns the answer to one request, and whether the episode is over."""
    do, is_over = request["do"], request["is_last"]
    answer: dict[str, Any] = {}
    if do == "reset":
        answer = {"messages": environment.reset(request["seed"], request["columns"]) or []}
    elif do == "step":
        step = environment.step(request["text"], [ToolCall(*call) for call in request["calls"]])
        answer, is_over = step._asdict(), is_over or step.terminated or step.truncated
    if is_over and do in ("step", "score"):
        answer["scores"] = environment.score()
    return answer, is_over
