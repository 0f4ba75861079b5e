"""Tests of `grpo doctor` on two hosts, whose results the first host prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.program import of_tiny, settings
from tests.two_hosts import run_on_two_hosts

pytestmark = pytest.mark.two_hosts


def test_what_only_one_host_has_is_told_and_does_not_part_them(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "plug.py").write_text(
        "import os\ndef judge(completion):\n"
        "    if os.environ['THIS_HOST'] == '1': raise ValueError('not here')\n    return 1.0\n"
    )
    plug = settings(f"reward.functions=['{tmp_path}/plug.py:judge']", "reward.environment=[THIS_HOST]")
    quiet = settings("eval.every_steps=0", f"run.dir={tmp_path / 'runs'}")
    hosts = run_on_two_hosts("doctor", "--json", *of_tiny(tiny_model), *plug, *quiet)
    assert [host.exit_code for host in hosts] == [1, 1], hosts
    first, second = hosts
    assert "{" not in second.stdout
    found = json.loads(first.stdout[first.stdout.index("{") :])["checks"]
    (failed,) = [one for one in found if one["verdict"] == "fail"]
    assert (failed["check"], failed["host"]) == ("reward", 1) and "not here" in failed["found"]
    own = {one["check"]: one["verdict"] for one in found if one["host"] == 0}
    assert {own[name] for name in ("hosts", "reward", "mesh", "forward", "disk")} == {"ok"}
    assert "error: reward (host 1): a run with these settings would fail" in second.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plug.py"]


def test_a_host_without_the_model_leaves_nobody_waiting(tiny_model: Path, tmp_path: Path) -> None:
    quiet = settings("eval.every_steps=0", "data.max_prompt_length=16", f"run.dir={tmp_path / 'runs'}")
    of_each = settings(f"model.path={tiny_model}"), settings(f"model.path={tmp_path}/nowhere")
    hosts = run_on_two_hosts("doctor", "--json", *quiet, of_each=of_each)
    assert [host.exit_code for host in hosts] == [2, 2], hosts
    found = json.loads(hosts[0].stdout[hosts[0].stdout.index("{") :])["checks"]
    failed = {(one["check"], one["host"]) for one in found if one["verdict"] == "fail"}
    assert failed == {("model", 1), ("hosts", 0), ("hosts", 1)}
    (forward,) = [one for one in found if one["check"] == "forward"]
    assert forward["verdict"] == "skip" and "on another host" in forward["found"]


def test_hosts_of_other_settings_are_told_and_try_nothing_together(tiny_model: Path, tmp_path: Path) -> None:
    quiet = settings("eval.every_steps=0", f"run.dir={tmp_path / 'runs'}")
    of_each = settings("data.difficulty=[1]"), settings("data.difficulty=[2]")
    hosts = run_on_two_hosts("doctor", "--json", *of_tiny(tiny_model), *quiet, of_each=of_each)
    assert [host.exit_code for host in hosts] == [2, 2], hosts
    found = json.loads(hosts[0].stdout[hosts[0].stdout.index("{") :])["checks"]
    assert {one["check"] for one in found if one["verdict"] == "fail"} == {"hosts"}
    assert {"mesh", "forward"} <= {one["check"] for one in found if one["verdict"] == "skip"}
