from __future__ import annotations

import os
import pty
import re

import pytest

from app.rollout.scheduling.protocol import NewSample, RowReport
from app.rollout.scheduling.sample_states import SampleTable
from app.tracking.console import ProgressDisplay, RolloutProgress, rollout_status
from tests.reward.samples import make_sample


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


def test_every_sample_is_somewhere() -> None:
    table = make_table(8)
    assert rollout_status(table) == "1 active  5 waiting  1 suspended  1 of 8 done"
    table.commit("fast-0", RowReport("p/s1", 20, None, turn_end="stop"), seconds=1.0, steps=1)
    assert rollout_status(table) == "0 active  5 waiting  1 suspended  1 acting  1 of 8 done"


@pytest.mark.parametrize("is_notebook", [False, True])
def test_without_a_terminal_a_line_comes_now_and_then(
    is_notebook: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_without_a_schedule_samples_and_tokens_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter(range(0, 1000, 6))
    samples = [make_sample("1 + 1 = 2", index=index) for index in range(4)]
    with RolloutProgress(num_samples=4, clock=lambda: float(next(times))) as progress:
        assert list(progress.track(iter(samples))) == samples
    first, *_ = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"rollout: \d of 4 done  \d+ tokens/s", first)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, show) -> str:
    """Returns what `show` writes to stderr on a terminal."""
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


def shown_once() -> None:
    with RolloutProgress(num_samples=8) as progress:
        progress.update_rollout(make_table(8))


def test_on_a_terminal_the_line_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    written = on_a_terminal(monkeypatch, shown_once)
    assert "1 active  5 waiting  1 suspended  1 of 8 done" in written and "\x1b[2K" in written
    assert "\x1b[91m" in written or "\x1b[38" in written


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    written = on_a_terminal(monkeypatch, shown_once)
    assert "1 of 8 done" in written and re.search(r"\x1b\[(3|4|9|10)\d", written) is None


def test_the_board_of_a_run_shows_where_its_samples_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def show() -> None:
        with ProgressDisplay(num_steps=2, first_step=0, enabled=True) as board:
            board.set_phase("rollout")
            board.update_rollout(make_table(8))

    assert "1 active  5 waiting  1 suspended  1 of 8 done" in on_a_terminal(monkeypatch, show)
