"""Rendezvous: finds the hosts of a run, and verifies that all are there before `jax.distributed.initialize`.

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
import shlex
import socket
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from jax._src import cloud_tpu_init  # JAX has no public API for its detection of clusters
from jax._src.clusters import ClusterEnv

from settings.errors import InputError

PROTOCOL_GREETING = "grpo roll call 1"
"""Part of every message, so that another program is not mistaken for a peer."""
MAX_LINE_BYTES = 1 << 14
LINE_TIMEOUT_S = 3.0
"""Maximum wait for a message after a connection."""
LIVENESS_POLL_S = 1.0
"""Interval at which process 0 checks that the connected processes are still alive."""
RETRY_S = 0.1
LATE_NOTICE_S = 10.0
"""Time after which the missing processes are reported."""

BIND_ADDRESS_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's environment variable for the listening address, needed if the coordinator address is not a local one."""
MANUAL_SETTINGS_HINT = "set mesh.coordinator_address, mesh.num_processes and mesh.process_id instead"


class ClusterMember(NamedTuple):
    """A cluster and this process's id in it."""

    coordinator_address: str
    """`host:port` of process 0."""
    num_processes: int
    process_id: int


def is_cloud_tpu_vm() -> bool:
    """Returns whether this machine has TPUs and their library, without accessing a device or the network."""
    return cloud_tpu_init.running_in_cloud_tpu_vm


def detect_cluster(*, timeout_s: int, required: bool = False) -> ClusterMember | None:
    """Returns this process's place in its Cloud TPU, Slurm, Open MPI or Kubernetes cluster; None for a single host.

    Args:
        required: whether to raise, instead of returning None, if the platform does not answer.

    Raises:
        InputError: the platform's description of its hosts cannot be read, or a required platform does not answer.
    """
    try:
        address, num_processes, process_id, _ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, timeout_s
        )
    except (OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
        reason = f"the platform's description of its hosts cannot be read ({error})"
        if isinstance(error, OSError):
            if not required:  # TPUs without a metadata server, as in hosted notebooks
                return None
            reason = f"the value is auto, but the platform does not answer ({error})"
        raise InputError(f"mesh.coordinator_address: {reason}; {MANUAL_SETTINGS_HINT}") from error
    if address is None or num_processes in (None, 1) or process_id is None:
        return None
    return ClusterMember(address, num_processes, process_id)


class Peer(NamedTuple):
    """A connected process that waits for a reply."""

    connection: socket.socket
    name: str

    @property
    def is_connected(self) -> bool:
        """Whether the connection is open; the process closes it when it exits or connects again."""
        if not select.select([self.connection], [], [], 0)[0]:
            return True
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False


class _Patience:
    """Limits the wait for other processes, and reports once on stderr which processes are late."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._start = time.monotonic()
        self._has_reported = False

    def left_s(self, late: str) -> float:
        """Returns the remaining seconds; raises InputError if there are none.

        Args:
            late: clause of the message that says which process is late.
        """
        waited_s = time.monotonic() - self._start
        if waited_s >= self._timeout_s:
            raise InputError(
                f"mesh.start_timeout_s: after {self._timeout_s:g} s, {late}. Every host must run the same command at "
                "the same time, each with its own mesh.process_id unless the platform assigns one: "
                f"{shlex.join(['grpo', *sys.argv[1:]])}"
            )
        if waited_s >= LATE_NOTICE_S and not self._has_reported:
            self._has_reported = True
            print(f"waiting: {late}", file=sys.stderr, flush=True)
        return self._timeout_s - waited_s


def verify_processes(member: ClusterMember, *, timeout_s: float) -> None:
    """Waits until all processes have connected.

    Raises:
        InputError: a process is missing, an id is duplicated, process counts differ, or the port cannot be used.
    """
    wait = _gather_processes if member.process_id == 0 else _wait_for_process_0
    wait(member, _Patience(timeout_s))


def resolve_bind_address(address: str) -> str:
    """Returns the `host:port` on which process 0 listens: the configured address, not every interface.

    `BIND_ADDRESS_VARIABLE` takes precedence. If /etc/hosts maps the name to loopback, as on Debian, other hosts resolve
    it to another address: process 0 then listens on every interface.

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


def _gather_processes(member: ClusterMember, patience: _Patience) -> None:
    """Runs the rendezvous on process 0: accepts the other processes and replies to them."""
    peers: dict[int, Peer] = {}
    problem: InputError | None = None
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(member))
        try:
            while missing := [number for number in range(1, member.num_processes) if number not in peers]:
                names = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing[:20]))}"
                left_s = patience.left_s(
                    f"no connection to {member.coordinator_address} from {names}"
                    f"{' and others' if len(missing) > 20 else ''} of {member.num_processes}"
                )
                if select.select([listener], [], [], min(left_s, LIVENESS_POLL_S))[0]:
                    _accept_peer(member, peers, stack.enter_context(listener.accept()[0]))
                peers = {number: peer for number, peer in peers.items() if peer.is_connected}
        except InputError as error:
            problem = error
        # JAX needs the port as soon as the others receive the reply.
        listener.close()
        for peer in peers.values():
            _send_message(peer.connection, problem=problem and str(problem))
    if problem is not None:
        raise problem


def _listen(member: ClusterMember) -> socket.socket:
    """Returns the socket on which process 0 listens; raises InputError if it cannot listen there."""
    address = member.coordinator_address
    host, port = _split_host_port(resolve_bind_address(address))
    if host == "::" and not socket.has_dualstack_ipv6():
        host = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=host == "::")
    except OSError as error:
        problem = (
            f"process 0 cannot listen at {address} ({error.strerror}); set it to a port above 1023 at an address of "
            f"this host, which has mesh.process_id 0, or set {BIND_ADDRESS_VARIABLE} to the address at which to listen"
        )
        if error.errno == errno.EADDRINUSE:
            with suppress(OSError):
                _query(member, LINE_TIMEOUT_S)  # a second process 0 learns that the id is taken
            problem = (
                f"port {port} of {address} is in use by another program or by a run that has not ended; stop it, or "
                "choose another port on every host"
            )
        raise InputError(f"mesh.coordinator_address: {problem}") from error


def _accept_peer(member: ClusterMember, peers: dict[int, Peer], connection: socket.socket) -> None:
    """Adds a newly connected process, or closes a connection from another program.

    Raises:
        InputError: the process has a duplicate id or a different process count; it receives the same error.
    """
    message = None
    with suppress(OSError):
        message = _receive_message(connection, LINE_TIMEOUT_S)
    if message is None:
        connection.close()
        return
    number, name, ours = message["process_id"], message["name"], _process_name()
    problem = None
    if message["num_processes"] != member.num_processes:
        problem = (
            f"mesh.num_processes: process 0 ({ours}) was started with {member.num_processes}, process {number} "
            f"({name}) with {message['num_processes']}; set the same number on every host"
        )
    elif number == 0 or (number in peers and peers[number].is_connected):
        problem = (
            f"mesh.process_id: {number} is set twice, on {peers[number].name if number else ours} and on {name}; give "
            f"each of the {member.num_processes} hosts that connect to {member.coordinator_address} its own number "
            f"from 0 to {member.num_processes - 1}"
        )
    if problem is not None:
        _send_message(connection, problem=problem)
        raise InputError(problem)
    peers[number] = Peer(connection, name)


def _wait_for_process_0(member: ClusterMember, patience: _Patience) -> None:
    """Runs the rendezvous on the other processes: tries to connect until process 0 replies."""
    address = member.coordinator_address
    reason = f"process 0 could not be reached at {address}"
    while True:
        left_s = patience.left_s(reason)
        try:
            if _query(member, max(left_s, RETRY_S)):
                return
            reason = f"{address} is used by another program, or by a run that has already started"
        except TimeoutError:
            reason = f"process 0 at {address} was still waiting for other processes, or could not be reached"
        except OSError as error:
            reason = f"process 0 could not be reached at {address} ({error.strerror or error})"
        time.sleep(RETRY_S)


def _query(member: ClusterMember, timeout_s: float) -> bool:
    """Returns whether process 0 replies that all have connected; False if another program answers or hangs up.

    Raises:
        InputError: process 0 replies with an error.
        OSError: process 0 cannot be reached, or does not reply in time (TimeoutError).
    """
    with socket.create_connection(_split_host_port(member.coordinator_address), timeout=timeout_s) as connection:
        _send_message(connection, **member._asdict(), name=_process_name())
        # Wait longer than process 0: its reply says who is missing, and this process would be missing if it left early.
        answer = _receive_message(connection, timeout_s + LINE_TIMEOUT_S)
    if answer is not None and answer["problem"] is not None:
        raise InputError(answer["problem"])
    return answer is not None


def _send_message(connection: socket.socket, **message: Any) -> None:
    connection.settimeout(LINE_TIMEOUT_S)
    # A closed connection is detected by the next read.
    with suppress(OSError):
        connection.sendall(json.dumps({"greeting": PROTOCOL_GREETING, **message}).encode() + b"\n")


def _receive_message(connection: socket.socket, timeout_s: float) -> dict[str, Any] | None:
    """Returns the peer's message; None if the peer is another program. Raises OSError if nothing arrives."""
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
