"""Calls one function in worker processes, or in this process if only this process has it, as in a notebook."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from app.plugins.pool import Job, Limits, Pool, Request, read_failure
from app.plugins.values import Failure
from app.plugins.worker_process import worker_environment
from app.reward.aggregate import RewardOutcome
from app.reward.worker_main import call_function, describe_parameters
from settings.errors import InputError
from settings.schema.reward import CALLABLE_PREFIX, PluginSettings

Result = list[RewardOutcome] | Failure
"""Outcomes of a call, or the failure of the whole call."""
OUTCOMES = TypeAdapter(list[RewardOutcome])

_callables: dict[str, Callable[..., Any]] = {}
"""Maps the name of a reward, or a setting, to the Python function that is `callable:...` in settings."""


class FunctionCall(Job):
    """A call of the function with one sample or a batch, as a job of the pool."""

    shares_worker = False

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(Request(fields, is_last=True))
        self.result: Result | None = None

    def read(self, answer: Mapping[str, Any]) -> list[RewardOutcome]:
        outcomes = read_outcomes(answer)
        if len(outcomes) != self.requests[0].fields["num_samples"]:
            raise ValueError
        return outcomes

    def accept(self, request: Request, reply: Result, *, seconds: float) -> None:
        self.result = request.reply = reply

    def fail(self, failure: Failure, request: Request | None) -> None:
        self.result = failure


class FunctionPool(Pool):
    """The worker processes of one function; they are kept between training steps.

    Args:
        function: `module:name` or `file.py:name`.
        setting: the setting that names the function.
        env_vars: names of environment variables passed in addition to `ALLOWED_ENVIRONMENT`.
    """

    def __init__(self, function: str, *, limits: Limits, setting: str, env_vars: Sequence[str] = ()) -> None:
        self.function, self.setting = function, setting
        super().__init__(
            "app.reward.worker_main",
            {"function": function},
            name=f"{setting}: {function}",
            limits=limits,
            environment=worker_environment(env_vars),
        )

    def run(self, requests: Sequence[Mapping[str, Any]]) -> list[Result]:
        """Returns the result of each request, in the order of the requests.

        Raises:
            WorkersLostError: a worker had to be replaced, but two attempts to start a new one failed.
        """
        calls = [FunctionCall(request) for request in requests]
        for call in calls:
            self.post(partial(self.add, call))
        for call in calls:
            self.wait(lambda call=call: call.result is not None)
        return [call.result for call in calls if call.result is not None]


def open_pool(
    function: str, plugins: PluginSettings, exit_stack: ExitStack, *, name: str, setting: str = "reward.functions"
) -> FunctionPool | InProcessPool:
    """Returns the pool of a function, which the stack closes.

    Args:
        name: its name in `register_callables`, if it is a Python function.
        setting: the setting that names the function.

    Raises:
        InputError: it is a Python function that this process does not have.
    """
    if function.startswith(CALLABLE_PREFIX):
        return InProcessPool(name, function, setting=setting)
    limits = Limits(workers=plugins.workers, timeout_s=plugins.timeout_s, memory_mib=plugins.memory_mib)
    pool = FunctionPool(function, limits=limits, setting=setting, env_vars=plugins.env_vars)
    exit_stack.callback(pool.close)
    return pool


@contextmanager
def register_callables(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Makes Python functions available inside the block, each under the name of its reward or setting."""
    _callables.update(functions)
    try:
        yield
    finally:
        _callables.clear()


class InProcessPool:
    """Calls one function like `FunctionPool`, but in this process: without isolation, or limits on time and memory.

    Args:
        name: name of the reward, or the setting.
        function: name of the function in settings and messages, such as `callable:brevity`.
        setting: the setting that names the function.

    Raises:
        InputError: this process does not have the function.
    """

    def __init__(self, name: str, function: str, *, setting: str) -> None:
        if name not in _callables:
            raise InputError(
                f"{setting}: {function} is a Python function passed to grpo.train, but this process does not have "
                f"it; pass it again, or write it to a file and set {setting} to file.py:function"
            )
        self.function, self.setting = function, setting
        self._callable = _callables[name]

    def load(self) -> dict[str, Any]:
        """Describes the function as a worker does. Raises LoadError if its signature cannot be read."""
        return {"parameters": describe_parameters(self._callable), "unlimited": ()}

    def run(self, requests: Sequence[Mapping[str, Any]]) -> list[Result]:
        """Returns the result of each request, in order."""
        results: list[Result] = []
        for request in requests:
            # A copy, as in a worker, because the function may modify it.
            answer = call_function(self._callable, json.loads(json.dumps(request)))
            if "failure" in answer and answer["failure"].text.startswith("KeyboardInterrupt"):
                raise KeyboardInterrupt
            results.append(read_failure(answer["failure"]) if "failure" in answer else read_outcomes(answer))
        return results


def read_outcomes(answer: Mapping[str, Any]) -> list[RewardOutcome]:
    """Returns the outcomes in a worker's answer; raises one of the errors listed in `Job.read` if it is invalid."""
    outcomes = OUTCOMES.validate_python(answer["outcomes"])
    return [replace(one, failure=read_failure(one.failure)) if one.failure else one for one in outcomes]
