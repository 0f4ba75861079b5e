"""Tests of the prompts that each host samples, and of their order in the file."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from app.records.sample import Prompt
from app.stages.rollout import PromptShard
from settings import Settings
from settings.schema.rollout import RolloutSettings


def work_of(num_prompts: int, *, prompts_per_step: int) -> PromptShard:
    prompts = [Prompt(str(i), np.array([1], np.int32), "?", None) for i in range(num_prompts)]
    return PromptShard.from_prompts(
        prompts, Settings(rollout=RolloutSettings(prompts_per_step=prompts_per_step, group_size=2))
    )


def test_one_host_has_all_prompts_in_rounds() -> None:
    work = work_of(5, prompts_per_step=2)
    assert work.prompt_indices == [0, 1, 2, 3, 4] and work.num_samples == 10
    assert [list(one) for one in work.rounds] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("num_prompts", [1, 4, 7, 9])
def test_rounds_host_after_host_are_the_file(num_prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    hosts = []
    for host in range(2):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        hosts.append(work_of(num_prompts, prompts_per_step=2))
    rounds = list(zip(*(work.rounds for work in hosts), strict=True))
    assert [place for of_hosts in rounds for one in of_hosts for place in one] == list(range(num_prompts))


def test_lines_come_back_by_rounds() -> None:
    lines = iter([b"%d" % i for i in range(10)])
    assert [list(part) for part in work_of(5, prompts_per_step=2).split_by_round(lines)] == [
        [b"0", b"1", b"2", b"3"], [b"4", b"5", b"6", b"7"], [b"8", b"9"],
    ]  # fmt: skip


def test_who_generates_is_heard_to_the_end() -> None:
    has_ended = []

    def lines() -> Iterator[bytes]:
        yield from [b""] * 4
        has_ended.append(True)

    parts = work_of(2, prompts_per_step=1).split_by_round(lines())
    assert [len(list(part)) for part in parts] == [2, 2]
    assert has_ended
