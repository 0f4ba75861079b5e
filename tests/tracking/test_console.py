"""Tests the console: lines of steps and evaluations, progress of rollouts, and samples with any text."""

import os
import pty
import re
from dataclasses import replace

import numpy as np
import pytest

from app.records.sample import Episode, Prompt, Sample, Turn
from app.rollout.scheduling.protocol import NewSample, RowReport
from app.rollout.scheduling.sample_states import SampleTable
from app.tracking.console import ProgressDisplay, RolloutProgress, evaluation_line, rollout_status, step_line
from app.tracking.run_reporter import sample_lines, truncate_middle
from tests.tiny import make_sample

METRICS = {
    **{"eval/accuracy": 0.75, "eval/format_rate": 0.5, "eval/truncated_fraction": 0.25, "eval/mean_length": 3.0},
    **{"eval/error_count": 0.0, "eval/accuracy/difficulty_1": 1.0},
}


def test_console_lines_show_percentages_or_means_without_minus_zero() -> None:
    parts = ("accuracy 75.0 %", "difficulty_1 100.0 %", "format 50.0 %", "truncated 25.0 %", "length 3.0")
    assert evaluation_line(5, METRICS) == f"evaluation at step 5: {'  '.join(parts)}"
    plug_in = METRICS | {"eval/accuracy": 3.2, "eval/format_rate": None, "eval/accuracy/difficulty_1": -120.5}
    assert "accuracy 3.200  difficulty_1 -120.500  truncated 25.0 %" in evaluation_line(5, plug_in)
    zero, nothing = (METRICS | {"eval/accuracy": x, "eval/format_rate": None} for x in (-0.0, float("nan")))
    assert "accuracy 0.000  difficulty_1 1.000  " in evaluation_line(5, zero)
    assert "accuracy –  " in evaluation_line(5, nothing)


STEP = {
    **{"reward/mean": -1e-9, "completions/mean_length": 3.0, "time/step_s": 1.0, "perf/tokens_per_s": 9.0},
    **{"loss": -1e-9, "policy/entropy": 0.5, "policy/kl": None, "policy/grad_norm": 0.8125},
    **{"policy/learning_rate": 1e-6, "policy/clip_fraction_low": 0.0, "policy/clip_fraction_high": 0.0},
}


def test_step_line_shows_remaining_time_and_measured_kl_and_clipping() -> None:
    line = step_line(5, STEP, num_steps=100, left_s=3725.4)
    learned = "entropy 0.500  loss +0.0000  grad 0.812  lr 1e-06"
    assert line == f"step   5/100  reward 0.000  length 3.0  {learned}  1.00 s (9 tokens/s)  1:02:05 left"
    more = STEP | {"policy/kl": 0.0123, "policy/clip_fraction_low": 0.01, "policy/clip_fraction_high": 0.02}
    assert "loss +0.0000  kl 0.0123  clipped 3.0 %  grad" in step_line(5, more, num_steps=5, left_s=0.0)
    critic_only = step_line(5, STEP | {"loss": None}, num_steps=5, left_s=0.0)
    assert critic_only == "step 5/5  reward 0.000  length 3.0  critic only  1.00 s (9 tokens/s)"


def test_console_is_never_silent_for_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    display = ProgressDisplay(num_steps=3, first_step=0, enabled=True, clock=lambda: clock[0])
    shown = []
    for clock[0], phase in ((0.0, "compile"), (59.0, ""), (61.0, ""), (90.0, "rollout"), (150.0, ""), (180.0, "")):
        if phase:
            display.set_phase(phase)
        if phase == "rollout":
            display.update_samples(2, 8, 30)
        display.show_wait()
        shown.append(capsys.readouterr().err)
    waits = ["compiling the programs of the first phases: 61 s so far\n", "rollout: 60 s so far, 2 of 8 done\n"]
    assert shown == ["", "", waits[0], "", waits[1], ""]
    for step, clock[0] in ((1, 200.0), (2, 230.0)):
        display.show_step(step, STEP | {"time/step_s": 20.0})
    assert capsys.readouterr().err.split("  ")[-1] == "0:00:25 left\n"


def make_table(num_samples: int) -> SampleTable:
    """Returns states in which one sample is done, one runs, one is suspended, and the others wait."""
    table = SampleTable()
    for i in range(num_samples):
        table.add(NewSample(f"p/s{i}", "p", i, 4, 100))
    for entry in [*table][:3]:
        table.start(entry, "fast-0")
    grow(table, 0, 10, "stop")
    grow(table, 1, 20)
    grow(table, 2, 30)
    table.suspend(table["p/s2"], held_by=None, is_move=True)
    return table


def grow(table: SampleTable, index: int, num_tokens: int, finish: str | None = None) -> None:
    assert table.commit("fast-0", RowReport(f"p/s{index}", num_tokens, finish), seconds=1.0, steps=1)


def test_rollout_status_counts_each_sample_once() -> None:
    table = make_table(8)
    assert rollout_status(table) == "1 active  5 waiting  1 suspended  1 of 8 done"
    table.commit("fast-0", RowReport("p/s1", 20, None, turn_end="stop"), seconds=1.0, steps=1)
    assert rollout_status(table) == "0 active  5 waiting  1 suspended  1 acting  1 of 8 done"


@pytest.mark.parametrize("is_notebook", [False, True])
def test_without_a_terminal_a_line_is_printed_every_ten_seconds(is_notebook, monkeypatch, capsys):
    if is_notebook:  # a kernel of Jupyter sets the variable
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    clock, table = [100.0], make_table(8)
    with RolloutProgress(num_samples=8, clock=lambda: clock[0]) as progress:
        for clock[0] in (100.0, 105.0, 109.9):
            progress.update_rollout(table)
        assert capsys.readouterr().err == ""
        grow(table, 1, 70)
        for clock[0] in (110.0, 119.0):
            progress.update_rollout(table)
    assert capsys.readouterr().err == "rollout: 1 active  5 waiting  1 suspended  1 of 8 done  5 tokens/s\n"


def test_progress_without_a_scheduler_counts_samples_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    progress = RolloutProgress(num_samples=4, clock=lambda: clock[0])
    for clock[0], num_done in ((1.0, 0), (5.0, 1), (11.0, 2)):
        progress.update_samples(num_done, 4, 20 * num_done)
    assert capsys.readouterr().err == "rollout: 2 of 4 done  4 tokens/s\n"


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, show) -> str:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        show()
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:
        pass  # the other end is closed
    os.close(ours)
    return written.decode()


def test_a_terminal_shows_progress_in_colour_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def progress() -> None:
        with RolloutProgress(num_samples=8) as shown:
            shown.update_rollout(make_table(8))

    def board() -> None:
        with ProgressDisplay(num_steps=2, first_step=0, enabled=True) as shown:
            shown.show_step(1, STEP)
            shown.set_phase("rollout")
            shown.update_rollout(make_table(8))

    state = "1 active  5 waiting  1 suspended  1 of 8 done"
    monkeypatch.delenv("NO_COLOR", raising=False)
    written = on_a_terminal(monkeypatch, progress)
    assert state in written and "\x1b[2K" in written
    assert "\x1b[91m" in written or "\x1b[38" in written
    written = on_a_terminal(monkeypatch, board)
    assert "step 1/2  reward" in written and state in written
    monkeypatch.setenv("NO_COLOR", "1")
    written = on_a_terminal(monkeypatch, progress)
    assert state in written and re.search(r"\x1b\[(3|4|9|10)\d", written) is None


HOSTILE = "[bold red]x[/] \x1b[31mred\x1b[0m \r over \u202egnp\n汉字 \ud800"


def sample(group_id: int, index: int, reward: float | None, completion: str = "", **fields: object) -> Sample:
    values = {
        **{"reward": reward, "rewards": None if reward is None else {"right": reward}, "finish_reason": "stop"},
        **{"completion": completion or f"answer {group_id}.{index}", "advantages": np.full(2, 0.5, np.float32)},
        "prompt": Prompt(f"p{group_id}", np.array([1], np.int32), f"question {group_id}", "7"),
    }
    made = make_sample([3, 4], group_id=group_id, sample_index=index)
    return replace(made, **(values | fields))  # pyright: ignore[reportArgumentType]


def test_console_shows_best_and_worst_samples_of_the_most_different_groups() -> None:
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


def test_console_shows_samples_without_reward_advantage_or_tokens() -> None:
    empty = {"advantages": np.empty(0, np.float32), "completion_ids": np.empty(0, np.int32)}
    # The last message of a chat is the question.
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "5 + 7?"}]
    prompt = Prompt("p", np.array([1], np.int32), chat, None)
    samples = [sample(0, 0, None, prompt=prompt, **empty), sample(0, 1, 1.0, prompt=prompt, advantages=None)]
    assert sample_lines(samples, step=1)[1:] == [
        "  5 + 7?  [–]",
        "    reward 1, right 1, advantage –, stop: answer 0.1",
        "    reward –, advantage –, stop: answer 0.0",
    ]
    assert sample_lines([], step=1) == []
    # Tool turns are shown, and the last line of a reference solution.
    turns = (Turn(0, 1, [{"role": "tool", "content": "12"}], text="<<5+7"), Turn(1, 2, text="12"))
    one = sample(0, 0, 1.0, prompt=replace(prompt, answer="5 and 7\n#### 12\n"), episode=Episode(turns, "terminated"))
    assert sample_lines([one], step=1)[1:] == [
        "  5 + 7?  [#### 12]",
        "    reward 1, right 1, advantage 0.5, stop: <<5+7 → tool: 12 → 12",
    ]


def test_texts_on_the_console_are_printable_and_short() -> None:
    (_, _, line) = sample_lines([sample(0, 0, 1.0, HOSTILE, rewards={"[red]\x1b[1m": 1.0})], step=1)
    assert line.isprintable()
    assert "[red]\\x1b[1m 1" in line and r"[bold red]x[/] \x1b[31mred\x1b[0m \r over \u202egnp↵ 汉字 \ud800" in line
    text = truncate_middle("a" * 1000 + " the answer is 42", limit=60)
    assert text.startswith("aaaa") and text.endswith("the answer is 42") and len(text) == 63
    assert truncate_middle("short", limit=60) == "short"
