"""The program of a worker, which runs each episode in its own thread.

It is started by `app.plugins.start_worker` and exchanges messages with `app.environments.episode_pool`. Each episode
gets one request at a time; answers are sent as soon as they are ready. In addition to the protocol of
`app.plugins.worker_program`:

    {"source": "game.py:Game", "tools": [], ...} -> {"tools": [<schema>, ...], ...}
    {"do": "reset", "seed": 7, "columns": {...}} -> {"messages": [...]}
    {"do": "step", "text": "...", "calls": [...]} -> the fields of `StepResult`
    {"do": "score"} -> {}
    {"do": "close"} -> {}

If the episode is over, because the environment ended it or the request was "is_last", the answer has "is_over", and
answers to `step` and `score` have "scores". A failure also ends the episode. The last answer is sent after the
environment was closed, so that the step time-out includes closing.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from app.environments.adapters import AdaptedEnvironment, load_environment
from app.environments.interface import ToolCall
from app.plugins.loading import describe_error
from app.plugins.values import event_loop, failure_of
from app.plugins.worker_program import TrainerChannel, start
from app.records.typed_values import from_json

STACK_BYTES = 2 * 2**20
"""Stack size of a thread. With the system's default, many episodes would exhaust the address space."""


def main() -> None:
    """Loads the environment, reports its tools, and serves requests until the trainer exits."""
    channel, make = start(load)
    episodes: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
    while True:
        request = channel.receive()
        number = request["key"]
        if number not in episodes:
            episodes[number] = queue.SimpleQueue()
            threading.Thread(target=play, args=(make, episodes, number, channel), daemon=True).start()
        episodes[number].put(request)


def load(order: Mapping[str, Any]) -> tuple[Callable[[], AdaptedEnvironment], dict[str, Any]]:
    threading.stack_size(STACK_BYTES)
    event_loop()  # before there are other threads
    make, schemas = load_environment(order["source"], order["tools"])
    return make, {"tools": schemas}


def play(
    make: Callable[[], AdaptedEnvironment],
    episodes: dict[int, queue.SimpleQueue[dict[str, Any]]],
    number: int,
    channel: TrainerChannel,
) -> None:
    """Serves all requests of one episode, in one thread, because libraries may keep state per thread."""
    environment: AdaptedEnvironment | None = None
    is_over = False
    while not is_over:
        request = episodes[number].get()
        try:
            environment = environment or make()
            answer, is_over = serve(environment, request)
        except BaseException as error:  # no error may affect other episodes
            answer, is_over = failure_of(error), True
        channel.end_forked_child()
        if is_over and environment is not None:
            try:
                environment.close()
            except BaseException as error:
                print(f"env: close: {describe_error(error)}", file=sys.stderr)
            channel.end_forked_child()
        if is_over:
            del episodes[number]
        channel.send(answer | {"key": number, "is_over": is_over})


def serve(environment: AdaptedEnvironment, request: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns the answer to one request, and whether the episode is over."""
    do, is_over = request["do"], request["is_last"]
    answer: dict[str, Any] = {}
    if do == "reset":
        answer = {"messages": environment.reset(request["seed"], from_json(request["columns"])) or []}
    elif do == "step":
        step = environment.step(request["text"], [ToolCall(*call) for call in request["calls"]])
        answer, is_over = step._asdict(), is_over or step.terminated or step.truncated
    if is_over and do in ("step", "score"):
        answer["scores"] = environment.score()
    return answer, is_over
