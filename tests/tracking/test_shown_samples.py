"""Tests of the samples on the console, which shows any text without interpreting it."""

from __future__ import annotations

import numpy as np

from app.records.sample import Prompt, Sample
from app.tracking.run_reporter import sample_lines, truncate_middle

HOSTILE = "[bold red]x[/] \x1b[31mred\x1b[0m \r over \u202egnp\n汉字 \ud800"


def sample(group_id: int, index: int, reward: float | None, completion: str = "", **fields: object) -> Sample:
    values = {
        "prompt": Prompt(f"p{group_id}", np.array([1], np.int32), f"question {group_id}", "7"),
        "sample_index": index,
        "group_id": group_id,
        "completion_ids": np.array([3, 4], np.int32),
        "completion": completion or f"answer {group_id}.{index}",
        "behavior_logprobs": np.zeros(2, np.float32),
        "finish_reason": "stop",
        "policy_version": 0,
        "reward": reward,
        "rewards": None if reward is None else {"right": reward},
        "advantages": np.full(2, 0.5, np.float32),
    }
    return Sample(**(values | fields))  # pyright: ignore[reportArgumentType]


def test_best_and_worst_of_the_groups_that_differ_most_are_shown() -> None:
    rewards = [[1, 1, 1], [0, 0.5, 0.2], [0.1, 0, 1], [0, 0.5, 0]]
    lines = sample_lines([sample(g, i, r) for g, row in enumerate(rewards) for i, r in enumerate(row)], step=3)
    assert lines == [
        "completions of step 3",
        "  question 2  [7]",
        "    reward 1, right 1, advantage 0.5, stop: answer 2.2",
        "    reward 0, right 0, advantage 0.5, stop: answer 2.1",
        "  question 3  [7]",
        "    reward 0.5, right 0.5, advantage 0.5, stop: answer 3.1",
        "    reward 0, right 0, advantage 0.5, stop: answer 3.0",
    ]


def test_samples_without_reward_advantage_or_tokens_are_shown_as_such() -> None:
    empty = {"advantages": np.empty(0, np.float32), "completion_ids": np.empty(0, np.int32)}
    lines = sample_lines([sample(0, 0, None, **empty), sample(0, 1, 1.0, advantages=None)], step=1)
    assert lines[2:] == [
        "    reward 1, right 1, advantage –, stop: answer 0.1",
        "    reward –, advantage –, stop: answer 0.0",
    ]
    assert sample_lines([], step=1) == []


def test_the_last_message_of_a_chat_is_the_question() -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "5 + 7?"}]
    lines = sample_lines([sample(0, 0, 1.0, prompt=Prompt("p", np.array([1], np.int32), chat, None))], step=1)
    assert lines[1] == "  5 + 7?  [–]"


def test_hostile_texts_are_shown_and_not_obeyed() -> None:
    (_, _, line) = sample_lines([sample(0, 0, 1.0, HOSTILE, rewards={"[red]\x1b[1m": 1.0})], step=1)
    assert line.isprintable()
    assert "[red]\\x1b[1m 1" in line and r"[bold red]x[/] \x1b[31mred\x1b[0m \r over \u202egnp↵ 汉字 \ud800" in line


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = truncate_middle("a" * 1000 + " the answer is 42", limit=60)
    assert text.startswith("aaaa") and text.endswith("the answer is 42") and len(text) == 63
    assert truncate_middle("short", limit=60) == "short"
