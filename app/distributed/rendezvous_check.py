"""Rendezvous: verifies that every expected process is reachable before `jax.distributed.initialize`.

JAX ends a process from C++, without an exception, if a host never connects, and does not detect duplicate process ids
or different process counts. So process 0 first listens on the same port itself: every other process sends its id and
its process count, and receives a reply once all have connected or something is wrong.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from settings.errors import InputError

PROTOCOL_GREETING = "grpo roll call 1"
"""Part of every message, so that another program is not mistaken for a peer."""
MAX_LINE_BYTES = 1 << 14
LINE_TIMEOUT_S = 3.0
"""Longest wait for a message after a connection."""
LIVENESS_POLL_S = 1.0
"""Interval at which process 0 checks that the connected processes are still alive."""
RETRY_S = 0.1
LATE_NOTICE_S = 10.0
"""Time after which the missing processes are reported."""

BIND_ADDRESS_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's environment variable for the listening address, needed if the coordinator address is not a local one."""


class ClusterMember(NamedTuple):
    """The cluster, and this process's id in it."""

    coordinator_address: str
    """`host:port` of process 0."""
    num_processes: int
    process_id: int


Notify = Callable[[str], None]


class Peer(NamedTuple):
    """A connected process that waits for a reply, or process 0 itself, without a connection."""

    connection: socket.socket | None
    name: str

    @property
    def is_connected(self) -> bool:
        """Whether the connection is open; the process closes it when it exits or connects again."""
        if self.connection is None or not select.select([self.connection], [], [], 0)[0]:
            return True
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False


def verify_processes(member: ClusterMember, *, timeout_s: float, command: str, notify: Notify) -> None:
    """Waits until all processes have connected.

    Args:
        timeout_s: longest time to wait.
        command: the command to run on every host, for the error message.
        notify: called with a line to log if a process is late.

    Raises:
        InputError: a process is missing, an id is duplicated, process counts differ, or the port cannot be used.
    """

    def explain_timeout(what: str) -> str:
        return (
            f"mesh.start_timeout_s: after {timeout_s:g} s, {what}. Every host must run the same command at the "
            f"same time, each with its own mesh.process_id unless the platform assigns one: {command}"
        )

    wait = _gather_processes if member.process_id == 0 else _wait_for_process_0
    wait(member, timeout_s, notify, explain_timeout)


def resolve_bind_address(address: str) -> str:
    """Returns the `host:port` on which process 0 listens: the configured address, not every interface.

    If /etc/hosts maps the name to loopback, as on Debian, other hosts resolve it to another address: process 0 then
    listens on every interface.

    Raises:
        InputError: the name cannot be resolved.
    """
    if os.environ.get(BIND_ADDRESS_VARIABLE):
        return os.environ[BIND_ADDRESS_VARIABLE]
    host, port = _split_host_port(address)
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise InputError(
            f"mesh.coordinator_address: the host name {host!r} cannot be resolved ({error.strerror}); "
            "give the address of process 0, as in 10.0.0.2:8476"
        ) from error
    ip_address = ipaddress.ip_address(resolved)
    if ip_address.is_loopback and host not in ("localhost", str(ip_address)):
        return f"[::]:{port}"
    return f"[{ip_address}]:{port}" if ip_address.version == 6 else f"{ip_address}:{port}"


def _gather_processes(
    member: ClusterMember, timeout_s: float, notify: Notify, explain_timeout: Callable[[str], str]
) -> None:
    """Runs the rendezvous on process 0: accepts the other processes and replies to them."""
    start, notices = time.monotonic(), iter((True,))
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(member))
        peers, problem = {0: Peer(None, _process_name())}, None
        while problem is None and len(peers) < member.num_processes:
            missing = _format_processes([number for number in range(member.num_processes) if number not in peers])
            waited_s = time.monotonic() - start
            if waited_s >= timeout_s:
                problem = explain_timeout(
                    f"{missing} of {member.num_processes} had not connected to {member.coordinator_address}"
                )
            elif waited_s >= LATE_NOTICE_S and next(notices, False):
                notify(f"waiting at {member.coordinator_address} for {missing}")
            elif select.select([listener], [], [], min(timeout_s - waited_s, LIVENESS_POLL_S))[0]:
                problem = _accept_peer(member, peers, stack.enter_context(listener.accept()[0]))
            peers = {number: peer for number, peer in peers.items() if peer.is_connected}
        # JAX takes the port as soon as the others receive the reply.
        listener.close()
        for peer in peers.values():
            if peer.connection is not None:
                _send_message(peer.connection, problem=problem)
    if problem is not None:
        raise InputError(problem)


def _listen(member: ClusterMember) -> socket.socket:
    """Returns the socket on which process 0 listens; raises InputError if another program has its port."""
    host, port = _split_host_port(resolve_bind_address(member.coordinator_address))
    if host == "::" and not socket.has_dualstack_ipv6():
        host = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=host == "::")
    except OSError as error:
        raise InputError(_listen_error_message(member, error)) from error


def _listen_error_message(member: ClusterMember, error: OSError) -> str:
    address = member.coordinator_address
    if error.errno != errno.EADDRINUSE:
        return (
            f"mesh.coordinator_address: process 0 cannot listen at {address} ({error.strerror}); it must be an address "
            f"of this host, which has mesh.process_id 0 (or set {BIND_ADDRESS_VARIABLE})"
        )
    with suppress(OSError):
        # Another process 0 says that there are two.
        answer = _query(member, LINE_TIMEOUT_S)
        if answer is not None and answer["problem"] is not None:
            return str(answer["problem"])
    return (
        f"mesh.coordinator_address: port {address.rpartition(':')[2]} of {address} is in use by another program or by "
        "a run that has not ended; stop it, or choose another port on every host"
    )


def _accept_peer(member: ClusterMember, peers: dict[int, Peer], connection: socket.socket) -> str | None:
    """Adds a newly connected process; returns what is wrong with it, if anything. Rejects other programs."""
    message: dict[str, Any] | None = None
    with suppress(OSError):
        message = _receive_message(connection, LINE_TIMEOUT_S)
    if message is None:
        connection.close()
        return None
    number, count, name, problem = message["process_id"], message["num_processes"], message["name"], None
    if count != member.num_processes:
        problem = (
            f"mesh.num_processes: process 0 ({peers[0].name}) was started with {member.num_processes}, process "
            f"{number} ({name}) with {count}; set the same number on every host"
        )
    elif number in peers and peers[number].is_connected:
        problem = (
            f"mesh.process_id: {number} is set twice, on {peers[number].name} and on {name}; give each of the "
            f"{member.num_processes} hosts that connect to {member.coordinator_address} its own number from 0 to "
            f"{member.num_processes - 1}"
        )
    if problem is None:
        peers[number] = Peer(connection, name)
    else:
        _send_message(connection, problem=problem)
    return problem


def _wait_for_process_0(
    member: ClusterMember, timeout_s: float, notify: Notify, explain_timeout: Callable[[str], str]
) -> None:
    """Runs the rendezvous on the other processes: tries to connect until process 0 replies."""
    start, notices, address = time.monotonic(), iter((True,)), member.coordinator_address
    while True:
        try:
            answer = _query(member, max(start + timeout_s - time.monotonic(), RETRY_S))
        except TimeoutError:
            reason = f"process 0 at {address} was still waiting for other processes, or could not be reached"
        except OSError as error:
            reason = f"process 0 could not be reached at {address} ({error.strerror or error})"
        else:
            if answer is not None and answer["problem"] is not None:
                raise InputError(str(answer["problem"]))
            if answer is not None:
                return
            reason = f"{address} is used by another program, or by a run that has already started"
        waited_s = time.monotonic() - start
        if waited_s >= timeout_s:
            raise InputError(explain_timeout(reason))
        if waited_s >= LATE_NOTICE_S and next(notices, False):
            notify(f"waiting for process 0: {reason}")
        time.sleep(RETRY_S)


def _query(member: ClusterMember, timeout_s: float) -> dict[str, Any] | None:
    """Returns the reply of process 0; None if it is another program that replies, or ends the connection.

    Raises:
        OSError: it cannot be reached, or does not reply in time (TimeoutError).
    """
    with socket.create_connection(_split_host_port(member.coordinator_address), timeout=timeout_s) as connection:
        _send_message(connection, **member._asdict(), name=_process_name())
        # Longer than process 0 waits: its reply says who is missing, and leaving early would add this process.
        return _receive_message(connection, timeout_s + LINE_TIMEOUT_S)


def _send_message(connection: socket.socket, **message: Any) -> None:
    connection.settimeout(LINE_TIMEOUT_S)
    # A closed connection is detected by the next read.
    with suppress(OSError):
        connection.sendall(json.dumps({"greeting": PROTOCOL_GREETING, **message}).encode() + b"\n")


def _receive_message(connection: socket.socket, timeout_s: float) -> dict[str, Any] | None:
    """Returns the message of the peer; None if another program has written. Raises OSError if nothing arrives."""
    connection.settimeout(timeout_s)
    with connection.makefile("rb") as file:
        line = file.readline(MAX_LINE_BYTES)
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and message.get("greeting") == PROTOCOL_GREETING else None


def _split_host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _process_name() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def _format_processes(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"
