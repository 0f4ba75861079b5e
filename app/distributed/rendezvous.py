"""Who has come, asked before JAX joins the hosts.

JAX's own start ends a process from C++, without an exception, where a host never comes, and takes numbers given twice
and hosts that expect different counts for granted. So process 0 first listens on the same port by itself: every other
host tells its number and how many it expects, and gets for an answer that all have come or what is wrong.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from settings.errors import InputError

GREETING = "grpo roll call 1"
"""What both sides' lines hold, so that neither mistakes another program for its peer."""
MAX_LINE_BYTES = 1 << 14
LINE_TIMEOUT_S = 3.0
"""Whoever connects and then says nothing keeps the others waiting no longer than this."""
LOOK_S = 1.0
"""How often process 0 looks whether those who have come are still there."""
RETRY_S = 0.1
TOLD_AFTER_S = 10.0
"""When a person is told who is being waited for."""

BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's own environment variable, for a process 0 that the others reach under an address that is not its own."""


class Member(NamedTuple):
    """This host among those that join."""

    address: str
    """`host:port` of process 0."""
    num_processes: int
    process_id: int


Tell = Callable[[str], None]


def call_roll(member: Member, *, timeout_s: float, command: str, tell: Tell) -> None:
    """Returns on all hosts once all have come.

    Args:
        timeout_s: how long this host waits.
        command: what every host must run, for the error.
        tell: gets a line when somebody is late.

    Raises:
        InputError: hosts that never came, a number given twice, different counts, or a port that cannot be used.
    """
    deadline = Deadline(timeout_s, command)
    if member.process_id == 0:
        _call(member, deadline, tell)
    else:
        _attend(member, deadline, tell)


class Deadline:
    """How long this host waits, and what it says at the end of that."""

    def __init__(self, timeout_s: float, command: str):
        self._start = time.monotonic()
        self.timeout_s = timeout_s
        self._command = command

    @property
    def left_s(self) -> float:
        return self._start + self.timeout_s - time.monotonic()

    @property
    def is_late(self) -> bool:
        return self.timeout_s - self.left_s >= TOLD_AFTER_S

    def passed(self, what: str) -> str:
        """The error that a time-out is."""
        return (
            f"mesh.start_timeout_s: {what} within {self.timeout_s:g} s. Every host must run the same command at the "
            f"same time, each with a mesh.process_id of its own where the platform gives it none: {self._command}"
        )


def address_to_bind(address: str) -> str:
    """`host:port` on which process 0 listens: what the others were told, and no other network.

    A name for which this host's own tables give its loopback (as Debian's do) means another address to the others:
    then all networks.

    Raises:
        InputError: no host is known by that name.
    """
    if os.environ.get(BIND_ADDRESS):
        return os.environ[BIND_ADDRESS]
    host, port = _split(address)
    found = ipaddress.ip_address(_look_up(address)[1][0])
    if found.is_loopback and host != "localhost" and not _is_number(host):
        return f"[::]:{port}"
    return f"[{found}]:{port}" if found.version == 6 else f"{found}:{port}"


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _look_up(address: str) -> tuple[socket.AddressFamily, Any]:
    host, port = _split(address)
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(
            f"mesh.coordinator_address: no host is known as {host!r} ({error.strerror}); "
            "give the address of process 0, as in 10.0.0.2:8476"
        ) from error
    return family, found


def _listen(member: Member) -> socket.socket:
    at = address_to_bind(member.address)
    host, port = _split(at)
    if host == "::":
        both = socket.has_dualstack_ipv6()
        family, where = (socket.AF_INET6, ("::", port)) if both else (socket.AF_INET, ("", port))
    else:
        both = False
        family, where = _look_up(at)
    return socket.create_server(where, family=family, backlog=128, dualstack_ipv6=both)


def _call(member: Member, deadline: Deadline, tell: Tell) -> None:
    """Process 0's part."""
    try:
        listener = _listen(member)
    except OSError as error:
        raise InputError(_cannot_listen(member, error)) from error
    with ExitStack() as stack:
        stack.enter_context(listener)
        here, problem = {0: Guest(None, _own_name())}, None
        untold = iter((True,))
        while problem is None and len(here) < member.num_processes:
            if deadline.left_s <= 0:
                problem = deadline.passed(_never_came(member, here))
            elif deadline.is_late and next(untold, False):
                tell(f"waiting at {member.address} for {_processes(_missing(member, here))}")
            elif select.select([listener], [], [], min(deadline.left_s, LOOK_S))[0]:
                problem = _enter(member, here, stack.enter_context(listener.accept()[0]))
            here = {number: guest for number, guest in here.items() if guest.is_there}
        # JAX takes the port as soon as the others hear that all have come.
        listener.close()
        for guest in here.values():
            guest.answer(problem)
    if problem is not None:
        raise InputError(problem)


class Guest:
    """A host that has come, with the connection it waits on; None is this one."""

    def __init__(self, connection: socket.socket | None, name: str):
        self._connection = connection
        self.name = name

    @property
    def is_there(self) -> bool:
        """False once the host has left: ended, or tries anew."""
        if self._connection is None or not select.select([self._connection], [], [], 0)[0]:
            return True
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def answer(self, problem: str | None) -> None:
        if self._connection is not None:
            _send(self._connection, {"problem": problem})


def _enter(member: Member, here: dict[int, Guest], connection: socket.socket) -> str | None:
    """Takes a host in that has just connected; says what is wrong with it. Strangers are sent away."""
    said = _receive(connection, LINE_TIMEOUT_S)
    number = None if said is None else said.get("process_id")
    if said is None or not isinstance(number, int):
        connection.close()
        return None
    guest, count, problem = Guest(connection, str(said.get("name"))), said.get("num_processes"), None
    if count != member.num_processes:
        problem = (
            f"mesh.num_processes: process 0 ({here[0].name}) was started with {member.num_processes}, process {number} "
            f"({guest.name}) with {count}; give every host the same number"
        )
    elif number in here and here[number].is_there:
        problem = (
            f"mesh.process_id: {number} was given twice, on {here[number].name} and on {guest.name}; give each of the "
            f"{member.num_processes} hosts that join at {member.address} a number of its own, 0 to "
            f"{member.num_processes - 1}"
        )
    if problem is None:
        here[number] = guest
    else:
        guest.answer(problem)
    return problem


def _attend(member: Member, deadline: Deadline, tell: Tell) -> None:
    """The part of all others."""
    why, untold = "", iter((True,))
    while deadline.left_s > 0:
        heard, why = _ask(member, deadline)
        if heard is not None:
            if heard["problem"] is not None:
                raise InputError(str(heard["problem"]))
            _wait_for_listener(member, deadline)
            return
        if deadline.is_late and next(untold, False):
            tell(f"waiting for process 0: {why}")
        time.sleep(RETRY_S)
    raise InputError(deadline.passed(why))


def _ask(member: Member, deadline: Deadline) -> tuple[dict[str, Any] | None, str]:
    """What process 0 has to say, or None and why."""
    try:
        where = _look_up(member.address)[1][:2]
        with socket.create_connection(where, timeout=max(deadline.left_s, RETRY_S)) as connection:
            _send(connection, {**member._asdict(), "name": _own_name()})
            heard = _receive(connection, deadline.left_s)
    except OSError as error:
        return None, f"process 0 could not be reached at {member.address} ({error.strerror or error})"
    except InputError as error:
        return None, str(error)
    if heard is not None and "problem" in heard:
        return heard, ""
    if deadline.left_s <= 0:
        return None, f"process 0 at {member.address} was still waiting for others"
    return None, f"what answers at {member.address} is another program, or a run that has already started"


def _wait_for_listener(member: Member, deadline: Deadline) -> None:
    """Until JAX listens there: asked a moment too early, its client waits for a second before it asks again."""
    while deadline.left_s > 0:
        try:
            socket.create_connection(_look_up(member.address)[1][:2], timeout=LINE_TIMEOUT_S).close()
            return
        except OSError:
            time.sleep(RETRY_S / 10)


def _send(connection: socket.socket, said: Mapping[str, Any]) -> None:
    connection.settimeout(LINE_TIMEOUT_S)
    # Where it has left, whoever reads from it next finds out.
    with suppress(OSError):
        connection.sendall(json.dumps({"greeting": GREETING, **said}).encode() + b"\n")


def _receive(connection: socket.socket, timeout_s: float) -> dict[str, Any] | None:
    """The line that the other side sends; None where it is not one of ours, or none comes in time."""
    end, line = time.monotonic() + timeout_s, b""
    while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
        left_s = end - time.monotonic()
        if left_s <= 0:
            return None
        connection.settimeout(left_s)
        try:
            part = connection.recv(MAX_LINE_BYTES)
        except OSError:
            return None
        if not part:
            return None
        line += part
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and said.get("greeting") == GREETING else None


def _cannot_listen(member: Member, error: OSError) -> str:
    """Why process 0 cannot take its own port: what holds it is another process 0, or another program."""
    if error.errno != errno.EADDRINUSE:
        return (
            f"mesh.coordinator_address: process 0 cannot listen at {member.address} ({error.strerror}); it must be an "
            f"address of the host with mesh.process_id 0, which is this one (or set {BIND_ADDRESS})"
        )
    heard, _ = _ask(member, Deadline(LINE_TIMEOUT_S, command=""))
    if heard is not None and heard["problem"] is not None:
        return str(heard["problem"])
    return (
        f"mesh.coordinator_address: port {member.address.rpartition(':')[2]} of {member.address} is in use by another "
        "program, or by a run that has not ended; end that, or choose another port on every host"
    )


def _own_name() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def _missing(member: Member, here: Mapping[int, Guest]) -> list[int]:
    return [number for number in range(member.num_processes) if number not in here]


def _never_came(member: Member, here: Mapping[int, Guest]) -> str:
    missing = _missing(member, here)
    return f"{_processes(missing)} of {member.num_processes} never came to {member.address}"


def _processes(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"
