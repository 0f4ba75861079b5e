"""Two processes of four virtual devices each, which are two hosts to JAX."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.training.program import DEADLINE_S, settings, started

Hosts = list["subprocess.Popen[str]"]
Arguments = Sequence[str | Path]


class Ended(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


@contextmanager
def two_hosts(*arguments: str | Path, of_each: tuple[Arguments, Arguments] = ((), ())) -> Iterator[Hosts]:
    """The same command on both; neither outlives the block.

    Args:
        of_each: what else the command of the first has, and that of the second.
    """
    address = free_address()
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(*arguments, *own, *settings(*of_host(process_id, address))))
            for process_id, own in enumerate(of_each)
        ]


def run_on_two_hosts(*arguments: str | Path, of_each: tuple[Arguments, Arguments] = ((), ())) -> tuple[Ended, Ended]:
    """How the command ends on the first and on the second."""
    with two_hosts(*arguments, of_each=of_each) as hosts:
        return ended(hosts)


def ended(hosts: Hosts) -> tuple[Ended, Ended]:
    first, second = (
        Ended(host.returncode, *output) for host, output in [(h, h.communicate(timeout=DEADLINE_S)) for h in hosts]
    )
    return first, second


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def of_host(process_id: int, address: str) -> tuple[str, ...]:
    """Settings of one of two processes with four devices each."""
    return (
        "mesh.cpu_devices=4",
        f"mesh.coordinator_address={address}",
        "mesh.num_processes=2",
        f"mesh.process_id={process_id}",
    )
