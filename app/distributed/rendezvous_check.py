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
from collections.abc import Callable, Mapping
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


def verify_processes(member: ClusterMember, *, timeout_s: float, command: str, notify: Notify) -> None:
    """Waits until all processes have connected.

    Args:
        timeout_s: longest time to wait.
        command: the command to run on every host, for the error message.
        notify: called with a line to log if a process is late.

    Raises:
        InputError: a process is missing, an id is duplicated, process counts differ, or the port cannot be used.
    """
    deadline = Deadline(timeout_s, command)
    if member.process_id == 0:
        _run_coordinator(member, deadline, notify)
    else:
        _join_coordinator(member, deadline, notify)


class Deadline:
    """Time limit of a rendezvous, with its error message."""

    def __init__(self, timeout_s: float, command: str):
        self._start = time.monotonic()
        self.timeout_s = timeout_s
        self._command = command

    @property
    def remaining_s(self) -> float:
        return self._start + self.timeout_s - time.monotonic()

    @property
    def is_notice_due(self) -> bool:
        return self.timeout_s - self.remaining_s >= LATE_NOTICE_S

    def timeout_message(self, what: str) -> str:
        """Returns the error message of a time-out."""
        return (
            f"mesh.start_timeout_s: after {self.timeout_s:g} s, {what}. Every host must run the same command at the "
            f"same time, each with its own mesh.process_id unless the platform assigns one: {self._command}"
        )


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
    ip_address = ipaddress.ip_address(_resolve_address(address)[1][0])
    if ip_address.is_loopback and host not in ("localhost", str(ip_address)):
        return f"[::]:{port}"
    return f"[{ip_address}]:{port}" if ip_address.version == 6 else f"{ip_address}:{port}"


def _split_host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _resolve_address(address: str) -> tuple[socket.AddressFamily, Any]:
    host, port = _split_host_port(address)
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(
            f"mesh.coordinator_address: the host name {host!r} cannot be resolved ({error.strerror}); "
            "give the address of process 0, as in 10.0.0.2:8476"
        ) from error
    return family, resolved


def _listen(member: ClusterMember) -> socket.socket:
    at = resolve_bind_address(member.coordinator_address)
    host, port = _split_host_port(at)
    if host == "::":
        both = socket.has_dualstack_ipv6()
        family, where = (socket.AF_INET6, ("::", port)) if both else (socket.AF_INET, ("", port))
    else:
        both = False
        family, where = _resolve_address(at)
    return socket.create_server(where, family=family, backlog=128, dualstack_ipv6=both)


def _run_coordinator(member: ClusterMember, deadline: Deadline, notify: Notify) -> None:
    """Runs the rendezvous on process 0: accepts the other processes and replies to them."""
    try:
        listener = _listen(member)
    except OSError as error:
        raise InputError(_listen_error_message(member, error)) from error
    with ExitStack() as stack:
        stack.enter_context(listener)
        peers, problem = {0: PeerConnection(None, _process_name())}, None
        notices = iter((True,))
        while problem is None and len(peers) < member.num_processes:
            missing = _format_processes([number for number in range(member.num_processes) if number not in peers])
            if deadline.remaining_s <= 0:
                problem = deadline.timeout_message(
                    f"{missing} of {member.num_processes} had not connected to {member.coordinator_address}"
                )
            elif deadline.is_notice_due and next(notices, False):
                notify(f"waiting at {member.coordinator_address} for {missing}")
            elif select.select([listener], [], [], min(deadline.remaining_s, LIVENESS_POLL_S))[0]:
                problem = _accept_peer(member, peers, stack.enter_context(listener.accept()[0]))
            peers = {number: peer for number, peer in peers.items() if peer.is_connected}
        # JAX takes the port as soon as the others receive the reply.
        listener.close()
        for peer in peers.values():
            peer.reply(problem)
    if problem is not None:
        raise InputError(problem)


class PeerConnection:
    """A connected process waiting for a reply, or process 0 itself, without a connection."""

    def __init__(self, connection: socket.socket | None, name: str):
        self._connection = connection
        self.name = name

    @property
    def is_connected(self) -> bool:
        """Whether the connection is open; the process closes it when it exits or connects again."""
        if self._connection is None or not select.select([self._connection], [], [], 0)[0]:
            return True
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def reply(self, problem: str | None) -> None:
        if self._connection is not None:
            _send_message(self._connection, {"problem": problem})


def _accept_peer(member: ClusterMember, peers: dict[int, PeerConnection], connection: socket.socket) -> str | None:
    """Adds a newly connected process; returns what is wrong with it, if anything. Rejects other programs."""
    message = _receive_message(connection, LINE_TIMEOUT_S)
    number = None if message is None else message.get("process_id")
    if message is None or not isinstance(number, int):
        connection.close()
        return None
    peer, count, problem = PeerConnection(connection, str(message.get("name"))), message.get("num_processes"), None
    if count != member.num_processes:
        problem = (
            f"mesh.num_processes: process 0 ({peers[0].name}) was started with {member.num_processes}, process "
            f"{number} ({peer.name}) with {count}; set the same number on every host"
        )
    elif number in peers and peers[number].is_connected:
        problem = (
            f"mesh.process_id: {number} is set twice, on {peers[number].name} and on {peer.name}; give each of the "
            f"{member.num_processes} hosts that connect to {member.coordinator_address} its own number from 0 to "
            f"{member.num_processes - 1}"
        )
    if problem is None:
        peers[number] = peer
    else:
        peer.reply(problem)
    return problem


def _join_coordinator(member: ClusterMember, deadline: Deadline, notify: Notify) -> None:
    """Runs the rendezvous on the other processes: tries to connect until process 0 replies."""
    reason, notices = "", iter((True,))
    while deadline.remaining_s > 0:
        answer, reason = _query_coordinator(member, deadline)
        if answer is not None:
            if answer["problem"] is not None:
                raise InputError(str(answer["problem"]))
            _wait_for_listener(member, deadline)
            return
        if deadline.is_notice_due and next(notices, False):
            notify(f"waiting for process 0: {reason}")
        time.sleep(RETRY_S)
    raise InputError(deadline.timeout_message(reason))


def _query_coordinator(member: ClusterMember, deadline: Deadline) -> tuple[dict[str, Any] | None, str]:
    """Returns the reply of process 0 and "", or None and the reason why there is no reply."""
    try:
        where = _resolve_address(member.coordinator_address)[1][:2]
        with socket.create_connection(where, timeout=max(deadline.remaining_s, RETRY_S)) as connection:
            _send_message(connection, {**member._asdict(), "name": _process_name()})
            # Longer than process 0 waits: its reply says who is missing, and leaving early would add this process.
            answer = _receive_message(connection, deadline.remaining_s + LINE_TIMEOUT_S)
    except OSError as error:
        return None, f"process 0 could not be reached at {member.coordinator_address} ({error.strerror or error})"
    except InputError as error:
        return None, str(error)
    if answer is not None and "problem" in answer:
        return answer, ""
    if deadline.remaining_s <= 0:
        return None, f"process 0 at {member.coordinator_address} was still waiting for other processes"
    return None, f"{member.coordinator_address} is used by another program, or by a run that has already started"


def _wait_for_listener(member: ClusterMember, deadline: Deadline) -> None:
    """Waits until JAX listens: a JAX client that connects too early retries only after a second."""
    while deadline.remaining_s > 0:
        try:
            socket.create_connection(
                _resolve_address(member.coordinator_address)[1][:2], timeout=LINE_TIMEOUT_S
            ).close()
            return
        except OSError:
            time.sleep(RETRY_S / 10)


def _send_message(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.settimeout(LINE_TIMEOUT_S)
    # A closed connection is detected by the next read.
    with suppress(OSError):
        connection.sendall(json.dumps({"greeting": PROTOCOL_GREETING, **message}).encode() + b"\n")


def _receive_message(connection: socket.socket, timeout_s: float) -> dict[str, Any] | None:
    """Returns the message of the peer; None if no valid message arrives in time."""
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
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and message.get("greeting") == PROTOCOL_GREETING else None


def _listen_error_message(member: ClusterMember, error: OSError) -> str:
    """Returns why process 0 cannot listen, for example because another program uses the port."""
    if error.errno != errno.EADDRINUSE:
        return (
            f"mesh.coordinator_address: process 0 cannot listen at {member.coordinator_address} ({error.strerror}); "
            f"it must be an address of this host, which has mesh.process_id 0 (or set {BIND_ADDRESS_VARIABLE})"
        )
    answer, _ = _query_coordinator(member, Deadline(LINE_TIMEOUT_S, command=""))
    if answer is not None and answer["problem"] is not None:
        return str(answer["problem"])
    return (
        f"mesh.coordinator_address: port {member.coordinator_address.rpartition(':')[2]} of "
        f"{member.coordinator_address} is in use by another program or by a run that has not ended; stop it, or choose "
        "another port on every host"
    )


def _process_name() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def _format_processes(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"
