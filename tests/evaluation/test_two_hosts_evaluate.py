"""Tests that `grpo evaluate` on two hosts gives the result of one host."""

import json
from pathlib import Path

import pytest

from tests.program import here, records_of, settings, succeeded
from tests.two_hosts import run_on_two_hosts

pytestmark = pytest.mark.two_hosts


def test_two_hosts_evaluate_like_one_host(finished: Path, tmp_path: Path) -> None:
    # Two hosts cannot divide seven prompts evenly.
    chosen = ("--checkpoint", finished, *settings("eval.num_prompts=7", "eval.num_samples=2", "eval.temperature=1"))
    one = succeeded(here("evaluate", *chosen, "--out", tmp_path / "one.jsonl", "--json"))
    first, second = run_on_two_hosts("evaluate", *chosen, "--out", tmp_path / "two.jsonl", "--json")
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert "{" not in second.stdout
    found, expected = json.loads(first.stdout[first.stdout.index("{") :]), json.loads(one.stdout)
    assert (found["metrics"], found["intervals"]) == (expected["metrics"], expected["intervals"])
    drawn = [
        [(r["uid"], r["group_id"], r["completion"], r["rewards"]) for r in records_of(tmp_path / name)]
        for name in ("one.jsonl", "two.jsonl")
    ]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 14
