"""Tests of the channel between two hosts, both of which are this process here."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import SimpleQueue
from typing import Any

import pytest

from app.distributed import control_channel
from app.distributed.control_channel import ControlChannel, HostLostError, accept_hosts, connect_to_first_host
from app.distributed.rendezvous_check import listen
from settings.errors import InputError

KEY = secrets.token_bytes()
LOST = "lost"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1:0") as opened:
        yield opened


def connected(listener: socket.socket, *hosts: int) -> tuple[list[ControlChannel], list[ControlChannel]]:
    """Returns the channels of host 0 and those of the other hosts."""
    with ThreadPoolExecutor(1 + len(hosts)) as threads:
        accepted = threads.submit(accept_hosts, listener, len(hosts), KEY)
        others = threads.map(lambda host: connect_to_first_host(listener.getsockname(), host, KEY), hosts)
        return accepted.result(), list(others)


def received(channel: ControlChannel) -> SimpleQueue[Any]:
    messages: SimpleQueue[Any] = SimpleQueue()
    channel.start(messages.put, lambda: messages.put(LOST))
    return messages


def test_hosts_exchange_messages_in_order_whoever_connects_first(listener: socket.socket) -> None:
    of_first, others = connected(listener, 2, 1)
    assert [channel.host for channel in of_first] == [1, 2] and {channel.host for channel in others} == {0}
    at_first, at_others = [received(channel) for channel in of_first], [received(channel) for channel in others]
    for number in range(100):
        of_first[0].send((number, bytes(number * 1000)))
        others[0].send(number)
    assert [at_others[1].get(timeout=5)[0] for _ in range(100)] == list(range(100))
    assert [at_first[1].get(timeout=5) for _ in range(100)] == list(range(100))
    for channel in (*of_first, *others):
        channel.close()
    assert [messages.get(timeout=5) for messages in (*at_first, *at_others)] == [LOST] * 4


def test_a_closed_channel_is_lost_on_both_sides(listener: socket.socket) -> None:
    (first,), (second,) = connected(listener, 1)
    at_first, at_second = received(first), received(second)
    second.close()
    assert at_first.get(timeout=5) == at_second.get(timeout=5) == LOST
    for channel in (first, second):
        with pytest.raises(HostLostError, match="is lost"):
            channel.send("too late")


def test_a_host_that_reads_nothing_is_lost_in_time(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_channel, "IO_TIMEOUT_S", 1)
    (first,), (second,) = connected(listener, 1)
    start = time.monotonic()
    with pytest.raises(HostLostError):
        first.send(bytes(1 << 28))
    assert time.monotonic() - start < 20
    second.close()


def test_a_program_without_the_key_is_refused_and_waited_for_no_longer(listener: socket.socket) -> None:
    with ThreadPoolExecutor(2) as threads:
        accepted = threads.submit(accept_hosts, listener, 1, KEY)
        with pytest.raises(InputError, match=r"host 1 cannot connect to port \d+ of 127\.0\.0\.1"):
            connect_to_first_host(listener.getsockname(), 1, b"another key")
        with closing(socket.create_connection(listener.getsockname())):
            pass
        second = connect_to_first_host(listener.getsockname(), 1, KEY)
        (first,) = accepted.result(timeout=10)
    for channel in (first, second):
        received(channel)
        channel.close()


def test_a_host_that_does_not_connect_is_named(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_channel, "CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(InputError, match=r"after 0\.5 s, the hosts \[1, 2\] have not connected .* rollout\.scheduler"):
        accept_hosts(listener, 2, KEY)


def test_host_0_that_is_not_there_is_an_error() -> None:
    with listen("127.0.0.1:0") as gone:
        address = gone.getsockname()
    with pytest.raises(InputError, match=r"mesh\.coordinator_address: host 3 cannot connect"):
        connect_to_first_host(address, 3, KEY)
