"""The program of a killable worker, which runs one reward function.

On Linux it consists of two processes: the first supervises, the second runs the function. Orphaned descendants become
children of the first one, so that daemons that the function starts end with the worker.

It exchanges JSON Lines with `app.reward.worker_handle`, one answer per request, and imports only the standard library
and the function:

    {"function": "rewards.py:brevity", "memory_mib": 4096, ...}  ->  {"parameters": [...]} or {"refused": "why"}
    {"call": 7, "arguments": {...}, "num_samples": 4, ...}       ->  {"outcomes": [...]} or {"failure": [kind, text]},
                                                                     and the same "call"
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
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
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, NoReturn

PROGRAM_MODULES = {"app.reward.math_answers"}
"""Modules of this program that contain reward functions."""

PR_SET_CHILD_SUBREAPER = 36
"""The constant of `man 2 prctl`."""
KILL_LIMIT_S = 10

MAX_EXTRAS = 32
"""Maximum number of additional metrics per sample."""
EXTRA_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


class FunctionLoadError(Exception):
    """The function cannot be loaded; the message gives the reason."""


class RewardValueError(Exception):
    """A function returned a value that is not a reward."""

    kind = "value"


class RewardLengthError(RewardValueError):
    """A function returned the wrong number of rewards."""

    kind = "length"


class TrainerChannel:
    """The pipes to the trainer. The function itself gets an empty stdin, and its stdout is redirected to stderr."""

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
        """Reads requests in a thread, so that an exit of the trainer is noticed while the function runs."""
        for line in self._requests:
            self._lines.put(line)
        end_worker()

    def _close_in_child(self) -> None:
        """Closes the pipe in a forked child, which would otherwise hide this process's exit from the trainer."""
        if self._answers >= 0:
            os.close(self._answers)
        self._answers = -1

    def receive(self) -> dict[str, Any]:
        return json.loads(self._lines.get())

    def send(self, answer: Mapping[str, Any]) -> None:
        data = memoryview(json.dumps(answer).encode() + b"\n")
        while data:
            data = data[os.write(self._answers, data) :]


def end_worker() -> NoReturn:
    """Exits, so that the supervisor kills the descendants; without a subreaper, kills the process group."""
    if sys.platform != "linux" and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def supervise() -> None:
    """Returns in a child process. The parent waits for its end, kills all other descendants, and ends in the same way.

    SIGTERM makes the parent kill the child. Other systems than Linux have no subreaper, and the process stays alone.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    child = os.fork()
    if child:
        _end_like(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_like(child: int) -> NoReturn:
    """Waits for the child and its descendants, then ends with its exit code or signal."""

    def kill_child(*_: object) -> None:
        os.kill(child, signal.SIGKILL)

    # Only the child may hold the pipes, so that the trainer notices its end.
    os.close(0)
    os.close(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, kill_child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    # It stays a zombie, so that the handler cannot kill another process with its number.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kill_children()
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def kill_children() -> None:
    """Kills all children, and their orphans as they become children, until there are none or after 10 s."""
    deadline = time.monotonic() + KILL_LIMIT_S
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError):
                if int(stat.read_text().rpartition(") ")[2].split()[1]) == os.getpid():
                    os.kill(int(stat.parent.name), signal.SIGKILL)
        time.sleep(0.001)


def main() -> None:
    """Loads the function, reports its parameters, and serves calls until the trainer exits."""
    supervise()
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
                os._exit(0)  # a child that the function forked also returned from it
            channel.send(answer | {"call": request["call"]})


def limit_memory(num_bytes: int) -> list[str]:
    """Limits the address space; returns the resources that the system cannot limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    ceiling = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))
    except (ValueError, OSError):  # macOS
        return ["memory"]
    return []


def limit_cpu(seconds: float) -> None:
    """Limits how much more processor time this process may use before it is killed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    ceiling = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (ceiling if hard == resource.RLIM_INFINITY else min(ceiling, hard), hard))


def load_function(function: str) -> Callable[..., Any]:
    """Imports the function `module:name` or `file.py:name`.

    Raises:
        FunctionLoadError: the file, module or name does not exist, the import fails, or the name is not a function.
    """
    place, _, attribute = function.rpartition(":")
    # As with `python file.py`, modules next to the file and in the working directory can be imported. The program's own
    # functions are found even if the working directory contains another `app`.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]) if place in PROGRAM_MODULES else os.getcwd())
    module: Any = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    target = module
    for name in attribute.split("."):
        if not hasattr(target, name):
            known = [n for n, v in vars(module).items() if inspect.isroutine(v) and not n.startswith("_")]
            raise FunctionLoadError(
                f"{place} has no `{name}`; its functions: {', '.join(sorted(known)[:20]) or 'none'}"
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
    except BaseException as error:  # including sys.exit in the module
        raise FunctionLoadError(f"importing {place} failed: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Returns the last line of an error's traceback, and the location of the error."""
    text = traceback.format_exception_only(error)[-1].strip()
    place = _error_location(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{_relative_path(error.filename)}:{error.lineno}"
    return f"{text[:1000]} ({place})" if place else text[:1000]


def _error_location(trace: TracebackType | None) -> str | None:
    """Returns the location of the error in user code, or else in any code outside this module."""
    lines = [(f.filename, f.lineno) for f in traceback.extract_tb(trace) if f.filename != __file__]
    lines = [(file, line) for file, line in lines if not file.startswith("<frozen")]
    user_lines = [(file, line) for file, line in lines if not file.startswith((sys.prefix, sys.base_prefix))]
    if not lines:
        return None
    file, line = (user_lines or lines)[-1]
    return f"{_relative_path(file)}:{line}"


def _relative_path(file: str) -> str:
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


def describe_parameters(function: Callable[..., Any]) -> list[list[Any]]:
    """Returns the name and kind of each parameter, and whether it has a default."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise FunctionLoadError("its signature cannot be read") from None
    return [[p.name, p.kind.name, p.default is not p.empty] for p in signature.parameters.values()]


def call_function(function: Callable[..., Any], request: Mapping[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    """Calls the function and returns its outcomes; any error is returned as a failure."""
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
    except BaseException as error:  # no error may affect another call
        return {"failure": ["raised", describe_error(error)]}


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def batch_outcomes(result: Any, num_samples: int, extras: dict[str, float]) -> list[dict[str, Any]]:
    """Returns one outcome per sample; None means an abstention. An item of another type fails only its own sample.

    Raises:
        RewardValueError: the result is not a list of `num_samples` items.
    """
    if isinstance(result, str | bytes | Mapping) or not hasattr(type(result), "__iter__"):
        raise RewardValueError(f"returned {describe_value(result)}, expected a list of {num_samples} numbers or None")
    values = list(result)
    if len(values) != num_samples:
        raise RewardLengthError(f"returned {len(values)} values for {num_samples} samples, expected one for each")
    return [{} if value is None else _value_outcome(value, extras) for value in values]


def _value_outcome(value: Any, extras: dict[str, float]) -> dict[str, Any]:
    try:
        return {"value": to_number(value), "extras": extras}
    except RewardValueError as error:
        return {"failure": [error.kind, str(error)]}


def sample_outcome(result: Any) -> dict[str, Any]:
    """Returns the outcome of a function that takes one sample.

    Raises:
        RewardValueError: the result is neither a number nor a dict with a number as `score`.
    """
    if not isinstance(result, Mapping):
        return {"value": to_number(result)}
    if "score" not in result:
        raise RewardValueError(f"returned {describe_value(result)}, expected a number or a dict with `score`")
    return {
        "value": to_number(result["score"]),
        "extras": collect_extras({k: v for k, v in result.items() if k != "score"}),
    }


def to_number(value: Any) -> float:
    """Converts a finite real number, such as an int, a bool or a NumPy or PyTorch scalar, to a float.

    Raises:
        RewardValueError: the value is not a finite number.
    """
    if not hasattr(type(value), "__float__") and not hasattr(type(value), "__index__"):
        raise RewardValueError(f"returned {describe_value(value)}, expected a number")
    result = float(value)
    if not math.isfinite(result):
        raise RewardValueError(f"returned {result}, expected a finite number")
    return result


def collect_extras(values: Mapping[Any, Any]) -> dict[str, float]:
    """Returns the finite numbers with valid metric names, at most `MAX_EXTRAS` of them."""
    extras: dict[str, float] = {}
    for name, value in values.items():
        if not isinstance(name, str) or not EXTRA_NAME_PATTERN.fullmatch(name) or len(extras) == MAX_EXTRAS:
            continue
        try:
            extras[name] = to_number(value)
        except (RewardValueError, TypeError, ValueError, OverflowError):
            continue
    return extras


def describe_value(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}" if value is not None else "None"


if __name__ == "__main__":
    main()
