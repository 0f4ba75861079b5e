"""Two processes of four virtual devices each, which are two hosts to JAX."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.free_address import free_address
from tests.training.program import DEADLINE_S, THE_PROGRAM, settings, started

Hosts = list["subprocess.Popen[str]"]
Arguments = Sequence[str | Path]


class Ended(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


@contextmanager
def two_hosts(
    *arguments: str | Path, of_each: tuple[Arguments, Arguments] = ((), ()), program: Sequence[str] = THE_PROGRAM
) -> Iterator[Hosts]:
    """The same command on both; neither outlives the block.

    Args:
        of_each: what else the command of the first has, and that of the second.
    """
    address = free_address()
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(*arguments, *own, *settings(*of_host(process_id, address)), program=program))
            for process_id, own in enumerate(of_each)
        ]


def run_on_two_hosts(
    *arguments: str | Path, of_each: tuple[Arguments, Arguments] = ((), ()), program: Sequence[str] = THE_PROGRAM
) -> tuple[Ended, Ended]:
    """How the command ends on the first and on the second."""
    with two_hosts(*arguments, of_each=of_each, program=program) as hosts:
        return ended(hosts)


def ended(hosts: Hosts, *, deadline_s: float = DEADLINE_S) -> tuple[Ended, Ended]:
    output = [host.communicate(timeout=deadline_s) for host in hosts]
    first, second = (Ended(host.returncode, *text) for host, text in zip(hosts, output, strict=True))
    return first, second


def of_host(process_id: int, address: str) -> tuple[str, ...]:
    """Settings of one of two processes with four devices each."""
    return (
        "mesh.cpu_devices=4",
        f"mesh.coordinator_address={address}",
        "mesh.num_processes=2",
        f"mesh.process_id={process_id}",
    )
