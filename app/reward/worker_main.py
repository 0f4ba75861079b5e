"""One reward function in a process of its own, which may be killed: `python app/reward/worker_main.py`.

It speaks JSON Lines with `app.reward.worker_process`, one answer to each line, and imports nothing but the
standard library and the function:

    {"function": "rewards.py:brevity", "memory_mib": 4096, ...}  ->  {"parameters": [...]} or {"refused": "why"}
    {"call": 7, "arguments": {...}, "num_samples": 4, ...}       ->  {"outcomes": [...]} or {"failure": [kind, text]},
                                                                     with the same "call"
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import queue
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, NoReturn

PROGRAM_MODULES = {"app.reward.math_answers"}
"""Modules of this program that hold reward functions."""

MAX_EXTRAS = 32
"""Further numbers kept of one sample."""
EXTRA_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


class FunctionLoadError(Exception):
    """The function cannot be used; the message says why."""


class RewardValueError(Exception):
    """A function returned something that is no reward."""

    kind = "value"


class RewardLengthError(RewardValueError):
    """A function returned too few or too many of them."""

    kind = "length"


class TrainerChannel:
    """The pipes to the trainer, out of the function's reach: it reads nothing, and prints to stderr."""

    def __init__(self) -> None:
        self._requests = os.fdopen(os.dup(0), "rb")
        self._answers = os.dup(1)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        os.register_at_fork(after_in_child=self._close_in_child)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """A thread, because the trainer may go away while the function runs."""
        for line in self._requests:
            self._lines.put(line)
        kill_process_group()

    def _close_in_child(self) -> None:
        """A child that outlives this process must not hold the pipe open: its end tells the trainer of our death."""
        if self._answers >= 0:
            os.close(self._answers)
        self._answers = -1

    def receive(self) -> dict[str, Any]:
        return json.loads(self._lines.get())

    def send(self, answer: Mapping[str, Any]) -> None:
        data = memoryview(json.dumps(answer).encode() + b"\n")
        while data:
            data = data[os.write(self._answers, data) :]


def kill_process_group() -> NoReturn:
    """Kills the process group, if it is our own."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Loads the function, says what it takes, and calls it until the trainer goes away."""
    process_id = os.getpid()
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    channel = TrainerChannel()
    order = channel.receive()
    unlimited = limit_memory(order["memory_mib"] * 2**20)
    limit_cpu(order["load_cpu_s"])
    try:
        function = load_function(order["function"])
        parameters = describe_parameters(function)
    except FunctionLoadError as refusal:
        channel.send({"refused": str(refusal)})
        return
    channel.send({"parameters": parameters, "unlimited": unlimited})
    with asyncio.Runner() as runner:
        while True:
            request = channel.receive()
            limit_cpu(order["cpu_s"])
            answer = call_function(function, request, runner)
            if os.getpid() != process_id:
                os._exit(0)  # the function forked, and its child came back from it too
            channel.send(answer | {"call": request["call"]})


def limit_memory(num_bytes: int) -> list[str]:
    """Bounds the address space and forbids core dumps; returns what the system did not let us bound."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    ceiling = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))
    except (ValueError, OSError):  # macOS
        return ["memory"]
    return []


def limit_cpu(seconds: float) -> None:
    """Lets this process use so many more processor seconds; then it is killed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    ceiling = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (ceiling if hard == resource.RLIM_INFINITY else min(ceiling, hard), hard))


def load_function(function: str) -> Callable[..., Any]:
    """What `module:name` or `file.py:name` names.

    Raises:
        RefusedError: there is no such file, module or name, its import fails, or it is no function.
    """
    place, _, attribute = function.rpartition(":")
    # As for `python file.py`, modules next to the file and in the working directory can be imported. The program's own
    # functions are found even if the working directory has an `app`, too.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]) if place in PROGRAM_MODULES else os.getcwd())
    module: Any = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    target = module
    for name in attribute.split("."):
        if not hasattr(target, name):
            known = [n for n, v in vars(module).items() if inspect.isroutine(v) and not n.startswith("_")]
            raise FunctionLoadError(
                f"{place} has no `{name}`; functions there: {', '.join(sorted(known)[:20]) or 'none'}"
            )
        target = getattr(target, name)
    if isinstance(target, type) or not callable(target):
        is_class = "a class" if isinstance(target, type) else f"a {type(target).__name__}"
        raise FunctionLoadError(f"{attribute} is {is_class}, not a function")
    return target


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FunctionLoadError(f"no such file: {path.absolute()}")
    name = f"reward_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path.absolute())
    assert specification is not None and specification.loader is not None
    sys.path.insert(0, str(path.absolute().parent))
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    loader = specification.loader
    return _run_import(str(path), lambda: loader.exec_module(module) or module)


def _import_module(name: str) -> ModuleType:
    try:
        return _run_import(name, lambda: importlib.import_module(name))
    except FunctionLoadError as refusal:
        cause = refusal.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            where = f"in {os.getcwd()} or among the installed packages"
            raise FunctionLoadError(f"there is no module `{cause.name}` {where}") from None
        raise


def _run_import(place: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except BaseException as error:  # sys.exit in a module is an error of that module like any other
        raise FunctionLoadError(f"importing {place} failed: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """The last line of a traceback, and where it came from."""
    text = traceback.format_exception_only(error)[-1].strip()
    place = _error_location(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{_relative_path(error.filename)}:{error.lineno}"
    return f"{text[:1000]} ({place})" if place else text[:1000]


def _error_location(trace: TracebackType | None) -> str | None:
    """The innermost line outside the standard library and the installed packages, or else outside this module."""
    lines = [(f.filename, f.lineno) for f in traceback.extract_tb(trace) if f.filename != __file__]
    lines = [(file, line) for file, line in lines if not file.startswith("<frozen")]
    own = [(file, line) for file, line in lines if not file.startswith((sys.prefix, sys.base_prefix))]
    return f"{_relative_path((own or lines)[-1][0])}:{(own or lines)[-1][1]}" if lines else None


def _relative_path(file: str) -> str:
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


def describe_parameters(function: Callable[..., Any]) -> list[list[Any]]:
    """Name, kind and whether it has a default, of each parameter."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise FunctionLoadError("its signature cannot be read") from None
    return [[p.name, p.kind.name, p.default is not p.empty] for p in signature.parameters.values()]


def call_function(function: Callable[..., Any], request: Mapping[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    """Calls the function, whatever happens, and says what came of it."""
    arguments = dict(request["arguments"])
    logged: dict[str, float] = {}
    if "trainer_state" in request:
        arguments["trainer_state"] = SimpleNamespace(**request["trainer_state"])
    if "log_metric" in request:
        arguments["log_metric"] = logged.__setitem__
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = runner.run(_awaited(result))
        if request["is_batch"]:
            return {"outcomes": batch_outcomes(result, request["num_samples"], collect_extras(logged))}
        return {"outcomes": [sample_outcome(result)]}
    except RewardValueError as error:
        return {"failure": [error.kind, str(error)]}
    except MemoryError as error:
        return {"failure": ["memory", describe_error(error)]}
    except SystemExit as error:
        return {"failure": ["exit", describe_error(error)]}
    except BaseException as error:  # whatever it is, it costs this call alone
        return {"failure": ["raised", describe_error(error)]}


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def batch_outcomes(result: Any, num_samples: int, extras: dict[str, float]) -> list[dict[str, Any]]:
    """One outcome per sample; None abstains.

    Raises:
        RewardValueError: not a list of so many things. A thing that is no number fails its own sample alone.
    """
    if isinstance(result, str | bytes | Mapping) or not hasattr(type(result), "__iter__"):
        raise RewardValueError(f"returned {describe_value(result)}, expected a list of {num_samples} numbers or None")
    values = list(result)
    if len(values) != num_samples:
        raise RewardLengthError(f"returned {len(values)} values for {num_samples} samples")
    return [{} if value is None else _value_outcome(value, extras) for value in values]


def _value_outcome(value: Any, extras: dict[str, float]) -> dict[str, Any]:
    try:
        return {"value": to_number(value), "extras": extras}
    except RewardValueError as error:
        return {"failure": [error.kind, str(error)]}


def sample_outcome(result: Any) -> dict[str, Any]:
    """The outcome of a function that takes one sample.

    Raises:
        RewardValueError: neither a number nor a dict whose `score` is one.
    """
    if not isinstance(result, Mapping):
        return {"value": to_number(result)}
    if "score" not in result:
        raise RewardValueError(f"returned {describe_value(result)}, a dict without `score`")
    return {
        "value": to_number(result["score"]),
        "extras": collect_extras({k: v for k, v in result.items() if k != "score"}),
    }


def to_number(value: Any) -> float:
    """Whatever Python counts as one real number (int, bool, numpy's, torch's), finite.

    Raises:
        RewardValueError: it is something else.
    """
    if not hasattr(type(value), "__float__") and not hasattr(type(value), "__index__"):
        raise RewardValueError(f"returned {describe_value(value)}, expected a number")
    result = float(value)
    if not math.isfinite(result):
        raise RewardValueError(f"returned {result}")
    return result


def collect_extras(values: Mapping[Any, Any]) -> dict[str, float]:
    """The finite numbers under names that a metric may have."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if not isinstance(name, str) or not EXTRA_NAME_PATTERN.fullmatch(name) or len(found) == MAX_EXTRAS:
            continue
        try:
            found[name] = to_number(value)
        except (RewardValueError, TypeError, ValueError, OverflowError):
            continue
    return found


def describe_value(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}" if value is not None else "None"


if __name__ == "__main__":
    main()
