"""`grpo inspect-mesh` on two hosts: each reports the mesh of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.free_address import free_address
from tests.program import DEADLINE_S, of_tiny, settings, started
from tests.two_hosts import of_host, run_on_two_hosts

pytestmark = pytest.mark.two_hosts


def test_each_host_reports_the_mesh_of_both_and_its_own_devices(tiny_model: Path) -> None:
    hosts = run_on_two_hosts("inspect-mesh", "--json", *of_tiny(tiny_model), *settings("mesh.shape=1,-1,1"))
    assert [host.exit_code for host in hosts] == [0, 0], hosts
    for number, host in enumerate(hosts):
        report = json.loads(host.stdout[host.stdout.index("{") :])
        assert report["shape"] == {"dp": 1, "fsdp": 8, "tp": 1}
        assert (report["num_hosts"], report["this_host"]) == (2, number)
        assert [len(one["devices"]) for one in report["hosts"]] == [4, 4]


def test_a_missing_host_is_named(tiny_model: Path) -> None:
    alone = settings(*of_host(0, free_address()), "mesh.start_timeout_s=1")
    with started("inspect-mesh", *of_tiny(tiny_model), *alone) as host:
        _, stderr = host.communicate(timeout=DEADLINE_S)
    assert host.returncode == 2, stderr
    assert "process 1 of 2 had not connected" in stderr and "grpo inspect-mesh" in stderr and "Traceback" not in stderr
