"""Tests the rendezvous with hosts as threads: missing and duplicate processes, different counts, used ports."""

import socket
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from app.distributed import rendezvous
from app.distributed.rendezvous import ClusterMember, resolve_bind_address, verify_processes
from settings.errors import InputError
from tests.program import free_address

DEADLINE_S = 20.0


def come(member: ClusterMember, *, timeout_s: float = DEADLINE_S) -> str:
    """Joins as one host and returns the error, or an empty string."""
    try:
        verify_processes(member, timeout_s=timeout_s)
    except InputError as error:
        return str(error)
    return ""


def all_come(*members: ClusterMember, timeout_s: float = DEADLINE_S) -> list[str]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(lambda member: come(member, timeout_s=timeout_s), members, timeout=2 * DEADLINE_S))


def test_a_missing_host_is_reported_to_all_with_address_and_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["grpo", "train", "--config", "pod.yaml"])
    address = free_address()
    told = all_come(ClusterMember(address, 4, 0), ClusterMember(address, 4, 2), timeout_s=1.0)
    assert f"after 1 s, no connection to {address} from processes 1, 3 of 4" in told[0]
    assert "Every host must run the same command at the same time" in told[0]
    assert told[0].endswith("grpo train --config pod.yaml")
    # Waiting hosts get the error from process 0, because they wait a little longer than it does.
    assert told[1] == told[0]


def test_a_missing_process_0_is_reported():
    address = free_address()
    (told,) = all_come(ClusterMember(address, 2, 1), timeout_s=0.3)
    assert f"after 0.3 s, process 0 could not be reached at {address} (Connection refused)" in told


@pytest.mark.parametrize("numbers", [(0, 1, 1), (0, 0)])
def test_duplicate_process_ids_stop_all_hosts(numbers: tuple[int, ...]):
    address, twice = free_address(), numbers[1]
    told = all_come(*(ClusterMember(address, len(numbers), number) for number in numbers))
    assert len(set(told)) == 1
    assert f"mesh.process_id: {twice} is set twice, on " in told[0]
    assert f"its own number from 0 to {len(numbers) - 1}" in told[0]


def test_error_names_both_counts_if_hosts_expect_different_numbers_of_processes():
    address = free_address()
    told = all_come(ClusterMember(address, 2, 0), ClusterMember(address, 3, 1))
    assert told[0] == told[1]
    assert "mesh.num_processes: process 0 (" in told[0] and "was started with 2, process 1 (" in told[0]
    assert "with 3; set the same number on every host" in told[0]


def test_an_unusable_coordinator_address_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "LINE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = come(ClusterMember(address, 2, 0))
    assert f"mesh.coordinator_address: port {address.rpartition(':')[2]} of {address} is in use" in error
    assert "choose another port on every host" in error
    # 192.0.2.0/24 is reserved for documentation (RFC 5737), so no host has this address.
    assert "at an address of this host, which has mesh.process_id 0" in come(ClusterMember("192.0.2.1:8476", 2, 0))
    assert "the host name 'nowhere.invalid' cannot be resolved" in come(ClusterMember("nowhere.invalid:8476", 2, 0))


def test_a_host_can_reconnect_under_its_process_id(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "LIVENESS_POLL_S", 0.01)
    address = free_address()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(come, ClusterMember(address, 3, 0))
        assert "still waiting" in come(ClusterMember(address, 3, 1), timeout_s=1.0)
        errors = all_come(ClusterMember(address, 3, 1), ClusterMember(address, 3, 2))
        assert [first.result(timeout=DEADLINE_S), *errors] == ["", "", ""]


def test_unknown_connections_do_not_disturb_the_rendezvous(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "LINE_TIMEOUT_S", 0.2)
    address = free_address()
    host, port = address.split(":")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(come, ClusterMember(address, 2, 0))
        for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"process_id": 1}\n', b"\xff\n", b""):
            with connected(host, int(port), first) as stranger:
                stranger.sendall(said)
        assert all_come(ClusterMember(address, 2, 1)) == [""]
        assert first.result(timeout=DEADLINE_S) == ""


def connected(host: str, port: int, listening: Future[str]) -> socket.socket:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end and not listening.done():
        try:
            return socket.create_connection((host, port), timeout=DEADLINE_S)
        except ConnectionRefusedError:
            continue
    raise AssertionError("nobody listens")


def test_late_hosts_are_named_while_others_wait(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(rendezvous, "LATE_NOTICE_S", 0.0)
    address = free_address()
    come(ClusterMember(address, 3, 0), timeout_s=0.3)
    come(ClusterMember(address, 3, 1), timeout_s=0.3)
    assert capsys.readouterr().err.splitlines() == [
        f"waiting: no connection to {address} from processes 1, 2 of 3",
        f"waiting: process 0 could not be reached at {address}",
    ]


def test_process_0_binds_only_the_coordinator_address(monkeypatch: pytest.MonkeyPatch):
    assert resolve_bind_address("127.0.0.1:8476") == "127.0.0.1:8476"
    assert resolve_bind_address("localhost:8476") in ("127.0.0.1:8476", "[::1]:8476")
    assert resolve_bind_address("10.0.0.2:8476") == "10.0.0.2:8476"
    assert resolve_bind_address("[::1]:8476") == "[::1]:8476"
    # Debian's /etc/hosts maps a host's own name to 127.0.1.1, which other hosts cannot reach.
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 8476))])
    assert resolve_bind_address("worker-0:8476") == "[::]:8476"
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0:8476")
    assert resolve_bind_address("10.0.0.2:8476") == "0.0.0.0:8476"
