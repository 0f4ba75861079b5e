"""Tests of the table of completions, which shows any text without interpreting it."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from app.records.sample import Prompt, Sample
from app.tracking.completions_table import CompletionsTable, completions_table, truncate_middle
from app.tracking.console import render_completions

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


def rendered(table: CompletionsTable, width: int = 100) -> str:
    """Renders the table as for a log file, without colour."""
    output = io.StringIO()
    Console(file=output, width=width).print(render_completions(table))
    return output.getvalue()


def test_best_and_worst_of_the_groups_that_differ_most_are_shown() -> None:
    rewards = [[1, 1, 1], [0, 0.5, 0.2], [0.1, 0, 1], [0, 0.5, 0]]
    table = completions_table([sample(g, i, r) for g, row in enumerate(rewards) for i, r in enumerate(row)], step=3)
    assert [[row[1] for row in group] for group in table.groups] == [
        ["answer 2.2", "answer 2.1"],
        ["answer 3.1", "answer 3.0"],
    ]
    assert table.reward_names == ("right",)
    assert table.groups[0][0] == ("question 2", "answer 2.2", 1, 1, 0.5, "7", "stop")


def test_samples_without_reward_advantage_or_tokens_are_shown_as_such() -> None:
    empty = {"advantages": np.empty(0, np.float32), "completion_ids": np.empty(0, np.int32)}
    table = completions_table([sample(0, 0, None, **empty), sample(0, 1, 1.0, advantages=None)], step=1)
    assert [row[2:5] for row in table.groups[0]] == [(1.0, 1.0, None), (None, None, None)]
    assert rendered(table).count("–") == 4
    assert completions_table([], step=1).groups == ()


def test_the_last_message_of_a_chat_is_the_question() -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "5 + 7?"}]
    table = completions_table([sample(0, 0, 1.0, prompt=Prompt("p", np.array([1], np.int32), chat, None))], step=1)
    prompt, *_, answer, _ = table.groups[0][0]
    assert (prompt, answer) == ("5 + 7?", None)


@pytest.mark.parametrize("width", [60, 100, 200])
def test_a_hostile_completion_is_shown_and_not_obeyed(width: int) -> None:
    text = rendered(completions_table([sample(0, 0, 1.0, HOSTILE, finish_reason="length")], step=1), width)
    assert "\x1b" not in text and "\r" not in text and "\u202e" not in text and "\ud800" not in text
    joined = "".join(line.split("│")[2].strip() for line in text.splitlines() if line.startswith("│"))
    assert joined.replace(" ", "").startswith("[boldred]x[/]\\x1b[31mred\\x1b[0m\\rover\\u202egnp↵汉字")
    assert "cut" in text


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = truncate_middle("a" * 1000 + " the answer is 42", limit=60)
    assert text.startswith("aaaa") and text.endswith("the answer is 42") and len(text) == 63
    assert truncate_middle("short", limit=60) == "short"


def test_names_of_reward_functions_are_text_too() -> None:
    table = completions_table([sample(0, 0, 1.0, rewards={"[red]\x1b[1m": 1.0})], step=1)
    assert "[red]" in rendered(table, 200) and "\x1b" not in rendered(table, 200)
