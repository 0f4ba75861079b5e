"""Runs two processes with a few virtual devices, which are two hosts to JAX."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from jax._src import compiler, distributed

from tests.program import DEADLINE_S, REPOSITORY, free_address, settings, started

Hosts = list["subprocess.Popen[str]"]
Arguments = Sequence[str | Path]
Programs = tuple[Sequence[str], Sequence[str]]

KEEPING = "from tests.two_hosts import cache_programs_of_every_host as cache; cache()\n"
HOSTS_PROGRAM = ("-c", f"{KEEPING}import cli; cli.main()")
"""The program that Python runs on a host; later tests reuse its compilation cache."""


def hosts_program(*, heartbeat_s: int) -> tuple[str, str]:
    """Returns the program of a host that JAX ends after another host has sent no heartbeat for this time."""
    shorter = f"from app.distributed import shutdown\nshutdown.HEARTBEAT_S = {heartbeat_s}\n"
    return "-c", f"{shorter}{KEEPING}import cli; cli.main()"


def blind_host(folder: Path) -> tuple[str, str]:
    """Returns the program of a host whose disk does not contain `folder`."""
    return "-c", f"from tests.two_hosts import hide; hide({str(folder)!r})\n{HOSTS_PROGRAM[1]}"


def hide(folder: str) -> None:
    """Hides a folder and its contents from Python in this process."""
    stat = os.stat

    def is_hidden(path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(folder)

    def stat_visible(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, "hidden", str(path))
        return stat(path, *arguments, **options)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.listdir", "os.scandir", "os.rename") and is_hidden(arguments[0]):
            raise FileNotFoundError(errno.ENOENT, "hidden", str(arguments[0]))

    os.stat = stat_visible
    sys.addaudithook(refuse)


def cache_programs_of_every_host() -> None:
    """Makes every host write to the compilation cache, as JAX lets only the first; on CPUs each has its own keys."""
    write = compiler._cache_write  # pyright: ignore[reportPrivateUsage]

    def write_as_the_first(*arguments: Any) -> None:
        with mock.patch.object(distributed.global_state, "process_id", 0):
            write(*arguments)

    setattr(compiler, "_cache_write", write_as_the_first)  # noqa: B010  (a private name)


class Ended(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


@contextmanager
def two_hosts(
    *arguments: str | Path,
    of_each: tuple[Arguments, Arguments] = ((), ()),
    programs: Programs = (HOSTS_PROGRAM, HOSTS_PROGRAM),
    num_devices: int = 4,
    environ: dict[str, str] | None = None,
    cwd: Path = REPOSITORY,
) -> Iterator[Hosts]:
    """Runs a command on two hosts until the end of the block; `THIS_HOST` is replaced by the number of the host."""
    address = free_address()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    *(*arguments, *own, *settings(*of_host(process_id, address, num_devices))),
                    environ={**(environ or {}), "THIS_HOST": str(process_id)},
                    cwd=cwd,
                    program=program,
                )
            )
            for process_id, (own, program) in enumerate(zip(of_each, programs, strict=True))
        ]


def run_on_two_hosts(
    *arguments: str | Path, of_each: tuple[Arguments, Arguments] = ((), ()), **how: Any
) -> tuple[Ended, Ended]:
    """Returns the result of the command on the first and on the second host; see `two_hosts`."""
    with two_hosts(*arguments, of_each=of_each, **how) as hosts:
        return ended(hosts)


def ended(hosts: Hosts, *, deadline_s: float = DEADLINE_S) -> tuple[Ended, Ended]:
    # The outputs are read at the same time: a process whose output is not read blocks, and the other waits for it.
    with ThreadPoolExecutor(len(hosts)) as pool:
        output = list(pool.map(lambda host: host.communicate(timeout=deadline_s), hosts))
    first, second = (Ended(host.returncode, *text) for host, text in zip(hosts, output, strict=True))
    return first, second


def of_host(process_id: int, address: str, num_devices: int = 4) -> tuple[str, ...]:
    """Returns the settings of one of two processes with `num_devices` each."""
    return (
        f"mesh.cpu_devices={num_devices}",
        f"mesh.coordinator_address={address}",
        "mesh.num_processes=2",
        f"mesh.process_id={process_id}",
    )
