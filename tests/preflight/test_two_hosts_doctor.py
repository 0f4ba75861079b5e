"""`grpo doctor` on two hosts: both run the checks together, and the first one reports the failures of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.program import of_tiny, settings
from tests.two_hosts import run_on_two_hosts

pytestmark = pytest.mark.two_hosts


def test_a_failure_of_one_host_is_reported_by_the_first(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "plug.py").write_text(
        "import os\ndef judge(completion):\n"
        "    if os.environ['THIS_HOST'] == '1': raise ValueError('not here')\n    return 1.0\n"
    )
    plug = settings(f"reward.functions=['{tmp_path}/plug.py:judge']", "plugins.env_vars=[THIS_HOST]")
    overrides = settings("eval.every_steps=0", f"run.dir={tmp_path / 'runs'}")
    hosts = run_on_two_hosts("doctor", "--json", *of_tiny(tiny_model), *plug, *overrides)
    assert [host.exit_code for host in hosts] == [1, 1], hosts
    first, second = hosts
    assert "{" not in second.stdout
    checks = json.loads(first.stdout[first.stdout.index("{") :])["checks"]
    (failed,) = [one for one in checks if one["verdict"] == "fail"]
    assert (failed["check"], failed["host"]) == ("reward", 1) and "not here" in failed["found"]
    first_host = {one["check"]: one["verdict"] for one in checks if one["host"] == 0}
    assert {first_host[name] for name in ("hosts", "reward", "mesh", "attention", "forward", "disk")} == {"ok"}
    assert "error: reward (host 1): a run with these settings would fail" in second.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plug.py"]


def test_a_host_without_the_model_does_not_block_the_other(tiny_model: Path, tmp_path: Path) -> None:
    overrides = settings("eval.every_steps=0", "data.max_prompt_length=16", f"run.dir={tmp_path / 'runs'}")
    of_each = settings(f"model.path={tiny_model}"), settings(f"model.path={tmp_path}/nowhere")
    hosts = run_on_two_hosts("doctor", "--json", *overrides, of_each=of_each)
    assert [host.exit_code for host in hosts] == [2, 2], hosts
    checks = json.loads(hosts[0].stdout[hosts[0].stdout.index("{") :])["checks"]
    failed = {(one["check"], one["host"]) for one in checks if one["verdict"] == "fail"}
    assert failed == {("model", 1), ("hosts", 0), ("hosts", 1)}
    (forward,) = [one for one in checks if one["check"] == "forward"]
    assert forward["verdict"] == "skip" and "or on another one" in forward["found"]
