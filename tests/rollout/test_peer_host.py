"""Tests of another host as host 0 sees it, through a socket whose other end is this test."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

from app.distributed.control_channel import ControlChannel
from app.distributed.rendezvous_check import listen
from app.rollout.hosts.host_messages import Joined, SegmentResult, Submitted
from app.rollout.hosts.peer_host import HostWorkerError, PeerHost
from app.rollout.scheduling.protocol import RunSegment
from tests.distributed.test_control_channel import connected, received

SEGMENT = RunSegment(worker="fast-0", segment=1, admit=(), length=8, leave_when_finished=0, leave_when_active=0)


class Pair(NamedTuple):
    peer: PeerHost
    there: ControlChannel
    messages: SimpleQueue[Any]
    """What host 0 has sent."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    with listen("127.0.0.1:0") as listener:
        (first,), (second,) = connected(listener, 1)
    peer = PeerHost(first)
    yield Pair(peer, second, received(second))
    peer.close()


def never() -> bool:
    return False


def test_a_worker_that_failed_between_segments_fails_the_next_one_at_once(pair: Pair) -> None:
    pair.peer.begin(1)
    pair.there.send((1, SegmentResult("fast-0", "OutOfMemory: the copy of a cache")))
    pair.there.send((1, Submitted([])))
    assert pair.peer.wait_for_rows(never) == []
    with pytest.raises(HostWorkerError, match="the copy of a cache"):
        pair.peer.start_segment(SEGMENT, [], {}).result(timeout=5)
    # Reported once: the worker of the next rollout is another.
    pair.peer.begin(2)
    ended = pair.peer.start_segment(SEGMENT, [], {})
    assert not ended.done()
    pair.there.send((2, SegmentResult("fast-0", "broken")))
    with pytest.raises(HostWorkerError, match="broken"):
        ended.result(timeout=5)


def test_a_host_may_join_the_next_rollout_while_rounds_of_this_one_are_taken(pair: Pair) -> None:
    pair.peer.begin(1)
    pair.there.send((2, Joined([])))
    pair.there.send((1, Submitted([])))
    while not pair.peer.take_rounds():
        pass
    pair.peer.begin(2)
    pair.there.send((2, Submitted([])))
    assert pair.peer.wait_for_workers({}, never) == []
    assert pair.peer.wait_for_rows(never) == []
