"""Control channels: host 0 and every other host exchange messages at any time, without collectives.

A channel is a TCP connection on which both sides have shown that they know a random key. `multiprocessing.connection`
frames and authenticates; its own `Client` has neither time-outs nor IPv6.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from threading import Lock, Thread
from typing import Any

import jax
from jax._src import distributed  # JAX has no public API for the coordinator's address

from app.distributed.collectives import gather_bytes_over_hosts
from app.distributed.error_barrier import error_barrier
from app.distributed.rendezvous_check import listen, resolve_bind_address, split_host_port
from settings.errors import InputError

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0
"""Maximum time until all hosts have connected."""
IO_TIMEOUT_S = 60.0
"""Maximum time in which a message that has begun makes no progress."""
POLL_INTERVAL_S = 0.5
"""Maximum time until a closed channel ends its thread."""


class HostLostError(ConnectionError):
    """The channel to another host is broken, or the host has left the work that it shared."""


class ControlChannel:
    """Messages to and from another host; any picklable object is a message. `start` must be called once.

    Args:
        connection: an authenticated connection to the host, which the channel takes over.
    """

    def __init__(self, connection: Connection, *, host: int):
        self.host = host
        self._connection = connection
        self._sending = Lock()
        self._is_closing = False

    def start(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        """Starts to receive.

        Args:
            on_message: called with every message, in the channel's own thread, which it must not block.
            on_lost: called once in that thread, after the last message.
        """
        # A daemon thread, because a silent host must not keep the program alive.
        Thread(
            target=self._receive, args=(on_message, on_lost), name=f"channel-to-host-{self.host}", daemon=True
        ).start()

    def _receive(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        try:
            while (received := self._next_message()) is not None:
                on_message(*received)
        finally:
            with self._sending:
                self._connection.close()
            on_lost()

    def _next_message(self) -> tuple[Any] | None:
        """Waits for a message; returns None at the end of the channel."""
        try:
            while not self._is_closing:
                if self._connection.poll(POLL_INTERVAL_S):
                    return (self._connection.recv(),)
        except (OSError, EOFError) as error:
            log.debug("the channel to host %d ends", self.host, exc_info=error)
        return None

    def send(self, message: object) -> None:
        """Sends a message. May be called from any thread.

        Raises:
            HostLostError: the channel is broken.
        """
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            # Part of the message may have been sent, so that nothing can follow it.
            self._is_closing = True
            raise HostLostError(f"the connection to host {self.host} is lost") from error

    def close(self) -> None:
        """Ends the channel soon, on both sides."""
        self._is_closing = True


def open_control_channels() -> list[ControlChannel]:
    """Connects host 0 with every other host; returns this host's channels, one on all hosts but host 0.

    All hosts must call it together.

    Raises:
        InputError: a host cannot connect to host 0.
    """
    coordinator: str = distributed.global_state.coordinator_address  # pyright: ignore[reportAssignmentType]
    with error_barrier():
        listener = _listen_beside(coordinator) if jax.process_index() == 0 else None
    offer = {} if listener is None else {"port": listener.getsockname()[1], "key": secrets.token_hex(32)}
    offer = json.loads(gather_bytes_over_hosts(json.dumps(offer).encode())[0])
    key = bytes.fromhex(offer["key"])
    with error_barrier():
        if listener is not None:
            with listener:
                return accept_hosts(listener, jax.process_count() - 1, key)
        address = split_host_port(coordinator)[0], offer["port"]
        return [connect_to_first_host(address, jax.process_index(), key)]


def _listen_beside(coordinator: str) -> socket.socket:
    """Listens on a free port of the address where the other hosts have found the coordinator."""
    host, _ = split_host_port(resolve_bind_address(coordinator))
    try:
        return listen(f"[{host}]:0" if ":" in host else f"{host}:0")
    except OSError as error:
        raise InputError(
            f"mesh.coordinator_address: process 0 cannot listen on a second port of {host} ({error.strerror}), which "
            "its scheduler of all hosts' workers needs; set rollout.scheduler: null to do without"
        ) from error


def accept_hosts(listener: socket.socket, num_hosts: int, key: bytes) -> list[ControlChannel]:
    """Returns a channel to each of the other hosts, by number, once all have connected. Refuses other programs.

    Raises:
        InputError: a host has not connected in time.
    """
    deadline, channels = time.monotonic() + CONNECT_TIMEOUT_S, dict[int, ControlChannel]()
    while len(channels) < num_hosts:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection = _connection_of(listener.accept()[0])
        except TimeoutError as error:
            missing = sorted({*range(1, num_hosts + 1)} - channels.keys())
            raise InputError(
                f"mesh.coordinator_address: after {CONNECT_TIMEOUT_S:g} s, the hosts {missing} have not connected to "
                f"port {listener.getsockname()[1]} of host 0, which schedules the workers of all hosts; let the hosts "
                "reach each other on all ports, or set rollout.scheduler: null"
            ) from error
        with suppress(OSError, EOFError, multiprocessing.AuthenticationError):
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            host = connection.recv()
            channels[host] = ControlChannel(connection, host=host)
    return [channels[host] for host in sorted(channels)]


def connect_to_first_host(address: tuple[str, int], host: int, key: bytes) -> ControlChannel:
    """Returns this host's channel to host 0.

    Raises:
        InputError: host 0 cannot be reached.
    """
    try:
        connection = _connection_of(socket.create_connection(address, timeout=CONNECT_TIMEOUT_S))
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send(host)
    except (OSError, EOFError, multiprocessing.AuthenticationError) as error:
        raise InputError(
            f"mesh.coordinator_address: host {host} cannot connect to port {address[1]} of {address[0]} ({error}), "
            "where host 0 schedules the workers of all hosts; let the hosts reach each other on all ports, or set "
            "rollout.scheduler: null"
        ) from error
    return ControlChannel(connection, host=0)


def _connection_of(connected: socket.socket) -> Connection:
    """Takes a socket over for messages, every part of which has a time limit."""
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(IO_TIMEOUT_S), 0))
    return Connection(connected.detach())
