"""Python functions that exist only in this process, such as those of a notebook, as reward functions."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

from app.reward.process_pool import Result, parse_answer
from app.reward.worker_main import call_function, describe_parameters
from settings.errors import InputError

_callables: dict[str, Callable[..., Any]] = {}
"""The functions behind `callable:...` in `reward.functions`, by the names of the rewards."""


@contextmanager
def callables_at_hand(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Makes functions available inside the block, by the names of their rewards."""
    _callables.update(functions)
    try:
        yield
    finally:
        _callables.clear()


class InProcessPool:
    """Calls one function like `ProcessPool`, but in this process: nothing limits its time and memory or contains it.

    Args:
        reward: name of the reward.
        function: how settings and messages call the function, such as `callable:brevity`.

    Raises:
        InputError: this process does not have the function.
    """

    def __init__(self, reward: str, function: str) -> None:
        if reward not in _callables:
            raise InputError(
                f"reward.functions: {reward} is a Python function that was passed to grpo.train ({function}), and this "
                "process does not have it; pass it again in `rewards`, or write it to a file and set reward.functions "
                "to file.py:function"
            )
        self.function = function
        self._callable = _callables[reward]

    def load(self) -> dict[str, Any]:
        """Returns the description of the function. Raises LoadError if its signature cannot be read."""
        return {"parameters": describe_parameters(self._callable), "unlimited": ()}

    def run(self, requests: Sequence[Mapping[str, Any]], *, fresh: bool = False) -> list[Result]:
        """Returns the result of each request, in order; `fresh` has no meaning in a single process."""
        if not inspect.iscoroutinefunction(self._callable):
            return self._run(requests)
        # In another thread, because that of a notebook already has a running event loop.
        with ThreadPoolExecutor(max_workers=1) as executor:
            return executor.submit(self._run, requests).result()

    def _run(self, requests: Sequence[Mapping[str, Any]]) -> list[Result]:
        results = []
        # Not entered, which would start an event loop for nothing.
        with closing(asyncio.Runner()) as runner:
            for request in requests:
                # A copy as a worker gets it, which the function may change.
                answer = call_function(self._callable, json.loads(json.dumps(request)), runner)
                if answer.get("failure", ("", ""))[1].startswith("KeyboardInterrupt"):
                    raise KeyboardInterrupt
                results.append(parse_answer(answer))
        return results
