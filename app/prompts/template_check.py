"""Limits of time and memory for chat templates.

A template comes with a model and is a program: nested loops can run for days, and one multiplication can take all
memory. Jinja's sandbox limits neither.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from settings.errors import InputError

CPU_LIMIT_S = 3
WALL_LIMIT_S = 60
"""Longer than the CPU time, for a busy machine."""
MEMORY_LIMIT_BYTES = 1 << 30
RENDER_LIMIT_S = 10
"""Wall time for one chat in this process."""

TIME_STATUSES = (-signal.SIGXCPU, -signal.SIGKILL)
MEMORY_STATUS = 3
"""Exit statuses of a trial that exceeded its limits."""

PROGRAM = f"""
import json, resource, sys
request = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_limit_s"],) * 2)
try:
    resource.setrlimit(resource.RLIMIT_AS, (request["memory_limit_bytes"],) * 2)
except (ValueError, OSError):  # macOS
    pass
import jinja2.ext, jinja2.sandbox

def raise_exception(message):
    raise jinja2.TemplateError(message)

environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
)
environment.globals.update(raise_exception=raise_exception, strftime_now=lambda format: "2024")
environment.filters["tojson"] = lambda value, **options: json.dumps(value)
for chat in request["chats"]:
    variables = {{**request["variables"], **chat, "add_generation_prompt": len(chat["messages"]) == 1}}
    try:
        environment.from_string(request["template"]).render(variables)
    except MemoryError:
        sys.exit({MEMORY_STATUS})
    except Exception:  # whatever else is wrong with the template, its use reports
        pass
"""

QUESTION, ANSWER = {"role": "user", "content": "What is 12 * 34? " * 20}, {"role": "assistant", "content": "It is 408."}
TRIAL_CHATS = (
    {"messages": [QUESTION]},
    {"messages": [{"role": "system", "content": "Be brief."}, QUESTION]},
    {"messages": [QUESTION, ANSWER]},
    {
        "messages": [QUESTION, ANSWER, {"role": "tool", "content": "408"}],
        "tools": [{"type": "function", "function": {"name": "f", "description": "Tries.", "parameters": {}}}],
    },
)


def check_template(template: str, variables: Mapping[str, Any], *, where: str) -> None:
    """Renders short chats in a separate process. A template that fails for other reasons fails again where it is used.

    Args:
        variables: the special tokens and other variables of the template.
        where: the start of an error message.

    Raises:
        InputError: the template takes more than 3 s of CPU time or 1 GiB of memory.
    """
    status = _trial_status(template, json.dumps(variables, sort_keys=True, default=str))
    amounts = {
        **dict.fromkeys(TIME_STATUSES, f"takes more than {CPU_LIMIT_S} s"),
        MEMORY_STATUS: f"takes more than {MEMORY_LIMIT_BYTES >> 30} GiB of memory",
    }
    if status:
        problem = amounts.get(status, f"ends its process with exit status {status}")
        raise InputError(f"{where}: the chat template {problem} to render a short chat; use another one")


@lru_cache
def _trial_status(template: str, variables: str) -> int:
    request = json.dumps(
        {
            "template": template,
            "variables": json.loads(variables),
            "chats": TRIAL_CHATS,
            "cpu_limit_s": CPU_LIMIT_S,
            "memory_limit_bytes": MEMORY_LIMIT_BYTES,
        }
    )
    try:
        trial = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM],
            input=request.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=WALL_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TIME_STATUSES[0]
    return trial.returncode


@contextmanager
def render_time_limit() -> Iterator[None]:
    """Ends the block after 10 s: a template may loop for one chat only. Other threads than the main one have no limit.

    Raises:
        InputError: the time is over.
    """

    def stop(*_: object) -> None:
        raise InputError(f"the model's chat template takes more than {RENDER_LIMIT_S} s for one chat; use another one")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, RENDER_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
