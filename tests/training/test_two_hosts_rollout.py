"""`grpo rollout` on two hosts writes the file that one host writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.training.program import here, of_tiny, records_of, settings
from tests.two_hosts import run_on_two_hosts

OF_THE_CLOCK = ("elapsed_s", "worker", "segments")


def test_two_hosts_write_the_file_that_one_would(tiny_model: Path, tmp_path: Path) -> None:
    # Eleven prompts in rounds of four: the last has three, of which the second host has one.
    problems = [
        {"prompt": f"{a} + {b} = ?", "answer": str(a + b)} for a, b in zip(range(11), range(30, 41), strict=True)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    arguments = ("rollout", *of_tiny(tiny_model), "--prompts", tmp_path / "prompts.jsonl", "--json")
    one = here(*arguments, "--out", tmp_path / "one.jsonl")
    assert one.exit_code == 0, one.stderr
    halves = settings("rollout.prompts_per_step=2")
    given = [a for a in arguments if a != "rollout.prompts_per_step=4"]
    given.pop(given.index("rollout.group_size=4") - 1)
    two = run_on_two_hosts(*given, *halves, "--out", tmp_path / "two.jsonl")
    assert [host.exit_code for host in two] == [0, 0], two
    assert two[1].stdout.count("{") == 0
    print(two[0].stdout)
    print(two[0].stderr)
    print(two[1].stderr)
    found, expected = records_of(tmp_path / "two.jsonl"), records_of(tmp_path / "one.jsonl")
    assert len(found) == 44
    diff = 0
    for record, other in zip(found, expected, strict=True):
        for name in OF_THE_CLOCK:
            del record[name], other[name]
        diff = max(diff, np.abs(np.array(record["behavior_logprobs"]) - np.array(other["behavior_logprobs"])).max())
    print(diff)
    assert found == expected
