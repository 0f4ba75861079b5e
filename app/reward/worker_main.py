"""The program of a killable worker, which runs one reward function.

It is started by `app.plugins.start_worker` and exchanges messages with `app.reward.function_pool`, one answer per
request, in addition to the protocol of `app.plugins.worker_program`:

    {"function": "rewards.py:brevity", ...}                 ->  {"parameters": [...], ...}
    {"arguments": {...}, "num_samples": 4, ...}             ->  {"outcomes": [...]}

Values that JSON does not support are tagged in the arguments; see `app.records.typed_values`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

from app.plugins.loading import LoadError, load_object
from app.plugins.values import (
    MAX_EXTRAS,
    MAX_TEXT_CHARACTERS,
    Failure,
    PlugInValueError,
    await_value,
    collect_extras,
    describe_value,
    failure_of,
    to_number,
)
from app.plugins.worker_program import start
from app.records.typed_values import from_json

MAX_FLOAT32 = float.fromhex("0x1.fffffep127")
MAX_LOGGED_CHARACTERS = 10_000
"""Maximum length of a text that a function logs for a sample."""
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
        raise LoadError(f"expected a function, got {is_class}")
    return function, {"parameters": describe_parameters(function)}


def describe_parameters(function: Callable[..., Any]) -> list[list[Any]]:
    """Returns the name and kind of each parameter, and whether it has a default."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise LoadError("its signature cannot be read; wrap it in a function defined with `def`") from None
    return [[p.name, p.kind.name, p.default is not p.empty] for p in signature.parameters.values()]


def call_function(function: Callable[..., Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Calls the function and returns its outcomes; any error is returned as a failure."""
    arguments, num_samples = from_json(request["arguments"]), request["num_samples"]
    metrics: dict[str, float] = {}
    columns: dict[str, Iterable[Any]] = {}
    for_function = {
        "trainer_state": SimpleNamespace(**request["trainer_state"]),
        "log_metric": metrics.__setitem__,
        "log_extra": columns.__setitem__,
    }
    arguments |= {name: for_function[name] for name in request["trainer_arguments"]}
    try:
        result = await_value(function(**arguments))
        if (token_counts := request.get("token_counts")) is not None:
            return {"outcomes": estimator_outcomes(result, token_counts)}
        if request["is_batch"]:
            logged = collect_columns(columns, num_samples)
            return {"outcomes": batch_outcomes(result, num_samples, collect_extras(metrics), logged)}
        return {"outcomes": [sample_outcome(result)]}
    except BaseException as error:  # no error may affect other calls
        return failure_of(error)


def estimator_outcomes(result: Any, token_counts: Sequence[int]) -> list[dict[str, Any]]:
    """Returns an advantage estimator's result for each sample: a number, or one per token.

    Raises:
        PlugInValueError: the result has another form.
    """
    outcomes = []
    for value, num_tokens in zip(_items(result, len(token_counts), "numbers or lists"), token_counts, strict=True):
        is_number = not hasattr(type(value), "__len__") or getattr(value, "ndim", 1) == 0
        if not is_number and len(value) != num_tokens:
            raise PlugInValueError(
                f"returned a list of length {len(value)} for a sample of {num_tokens} tokens, expected a number, or "
                "one for each token"
            )
        numbers = [to_number(one) for one in ([value] if is_number else value)]
        if beyond := [number for number in numbers if abs(number) > MAX_FLOAT32]:
            raise PlugInValueError(f"returned {beyond[0]:g}, expected a magnitude of at most {MAX_FLOAT32:g} (float32)")
        outcomes.append({"value": numbers[0]} if is_number else {"token_values": numbers})
    return outcomes


def batch_outcomes(
    result: Any, num_samples: int, extras: Mapping[str, float], logged: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns one outcome per sample; None means an abstention. An item with a wrong type fails only its own sample.

    Args:
        extras: metrics of the call, counted for each of its samples.
        logged: values that the function logged for each sample.

    Raises:
        PlugInValueError: the result is not a list of `num_samples` items.
    """
    return [
        {"logged": of_sample} | ({} if value is None else _value_outcome(value, extras))
        for value, of_sample in zip(_items(result, num_samples, "numbers or None"), logged, strict=True)
    ]


def _items(result: Any, num_samples: int, kind: str) -> list[Any]:
    if isinstance(result, str | bytes | Mapping) or not hasattr(type(result), "__iter__"):
        raise PlugInValueError(f"returned {describe_value(result)}, expected a list of {num_samples} {kind}")
    values = list(result)
    if len(values) != num_samples:
        raise RewardLengthError(f"returned a list of length {len(values)}, expected {num_samples}, one per sample")
    return values


def _value_outcome(value: Any, extras: Mapping[str, float]) -> dict[str, Any]:
    try:
        return {"value": to_number(value), "extras": extras}
    except PlugInValueError as error:
        return {"failure": Failure(error.kind, str(error))}


def collect_columns(columns: Mapping[Any, Iterable[Any]], num_samples: int) -> list[dict[str, Any]]:
    """Returns each sample's values passed to TRL's `log_extra(column, values)`; at most `MAX_EXTRAS` columns.

    Raises:
        PlugInValueError: a column does not have one value per sample.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(num_samples)]
    for name, values in islice(columns.items(), MAX_EXTRAS):
        of_samples = list(values)
        if len(of_samples) != num_samples:
            raise PlugInValueError(
                f"logged {len(of_samples)} values of {name!r}, expected one for each of {num_samples} samples"
            )
        for row, value in zip(rows, of_samples, strict=True):
            row[str(name)[:MAX_TEXT_CHARACTERS]] = _loggable(value)
    return rows


def _loggable(value: Any) -> str | float | None:
    if value is None or isinstance(value, bool | int):
        return value
    try:
        return to_number(value)
    except PlugInValueError:
        return str(value)[:MAX_LOGGED_CHARACTERS]


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
