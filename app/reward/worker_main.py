"""The program of a killable worker, which runs one reward function.

It is started by `app.plugins.start_worker` and exchanges messages with `app.reward.function_pool`, one answer per
request, beside what `app.plugins.worker_program` says:

    {"function": "rewards.py:brevity", ...}                 ->  {"parameters": [...], ...}
    {"arguments": {...}, "num_samples": 4, ...}             ->  {"outcomes": [...]}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from app.plugins.loading import LoadError, load_object
from app.plugins.values import (
    Failure,
    PlugInValueError,
    collect_extras,
    describe_value,
    failure_of,
    finished,
    to_number,
)
from app.plugins.worker_program import start

PROGRAM_MODULES = {"app.reward.math_answers"}
"""Modules of this program that contain reward functions."""


class RewardLengthError(PlugInValueError):
    """A function returned the wrong number of rewards."""

    kind = "length"


def main() -> None:
    """Loads the function, reports its parameters, and serves calls until the trainer exits."""
    channel, function = start(load)
    while True:
        request = channel.receive()
        answer = call_function(function, request)
        channel.end_forked_child()
        channel.send(answer | {"key": request["key"]})


def load(order: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Imports the function `module:name` or `file.py:name`, and describes its parameters.

    Raises:
        LoadError: it cannot be imported, or is not a function.
    """
    path = order["function"]
    function = load_object(path, program_modules=PROGRAM_MODULES)
    if isinstance(function, type) or not callable(function):
        is_class = "a class" if isinstance(function, type) else f"a {type(function).__name__}"
        raise LoadError(f"{path.rpartition(':')[2]} is {is_class}, not a function")
    return function, {"parameters": describe_parameters(function)}


def describe_parameters(function: Callable[..., Any]) -> list[list[Any]]:
    """Returns the name and kind of each parameter, and whether it has a default."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise LoadError("its signature cannot be read") from None
    return [[p.name, p.kind.name, p.default is not p.empty] for p in signature.parameters.values()]


def call_function(function: Callable[..., Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Calls the function and returns its outcomes; any error is returned as a failure."""
    arguments = dict(request["arguments"])
    logged: dict[str, float] = {}
    if "trainer_state" in request:
        arguments["trainer_state"] = SimpleNamespace(**request["trainer_state"])
    if "log_metric" in request:
        arguments["log_metric"] = logged.__setitem__
    try:
        result = finished(function(**arguments))
        if request["is_batch"]:
            return {"outcomes": batch_outcomes(result, request["num_samples"], collect_extras(logged))}
        return {"outcomes": [sample_outcome(result)]}
    except BaseException as error:  # no error may affect another call
        return failure_of(error)


def batch_outcomes(result: Any, num_samples: int, extras: dict[str, float]) -> list[dict[str, Any]]:
    """Returns one outcome per sample; None means an abstention. An item of another type fails only its own sample.

    Raises:
        PlugInValueError: the result is not a list of `num_samples` items.
    """
    if isinstance(result, str | bytes | Mapping) or not hasattr(type(result), "__iter__"):
        raise PlugInValueError(f"returned {describe_value(result)}, expected a list of {num_samples} numbers or None")
    values = list(result)
    if len(values) != num_samples:
        raise RewardLengthError(f"returned {len(values)} values for {num_samples} samples, expected one for each")
    return [{} if value is None else _value_outcome(value, extras) for value in values]


def _value_outcome(value: Any, extras: dict[str, float]) -> dict[str, Any]:
    try:
        return {"value": to_number(value), "extras": extras}
    except PlugInValueError as error:
        return {"failure": Failure(error.kind, str(error))}


def sample_outcome(result: Any) -> dict[str, Any]:
    """Returns the outcome of a function that takes one sample.

    Raises:
        PlugInValueError: the result is neither a number nor a dict with a number as `score`.
    """
    if not isinstance(result, Mapping):
        return {"value": to_number(result)}
    if "score" not in result:
        raise PlugInValueError(f"returned {describe_value(result)}, expected a number or a dict with `score`")
    return {
        "value": to_number(result["score"]),
        "extras": collect_extras({k: v for k, v in result.items() if k != "score"}),
    }
