"""Tests of check results: one per check, whatever exception is raised, and one exit code."""

from __future__ import annotations

import pytest

from app.preflight.check_results import CheckRecorder, CheckResult, DoctorReport
from settings.errors import InputError


def test_what_is_raised_is_what_was_found():
    look = CheckRecorder()
    with look.run_check("settings"):
        raise InputError("a: wrong")
    with look.run_check("disk"):
        raise OSError("full")
    with look.run_check("hub"):
        look.warn("hub", "slow", "wait")
    assert [(one.check, one.verdict, one.found, one.exit_code) for one in look.results] == [
        ("settings", "fail", "a: wrong", 2),
        ("disk", "fail", "OSError: full", 1),
        ("hub", "warn", "slow", 0),
    ]


def test_whoever_interrupts_is_heard():
    with pytest.raises(KeyboardInterrupt), CheckRecorder().run_check("disk"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(("codes", "expected"), [((), 0), ((0, 0), 0), ((0, 1), 1), ((2, 1, 0), 2)])
def test_input_that_cannot_be_used_comes_before_what_else_fails(codes: tuple[int, ...], expected: int):
    findings = [CheckResult("a", "fail" if code else "ok", "", exit_code=code) for code in codes]
    assert DoctorReport(findings, 0.0).exit_code == expected


def test_the_table_wraps_and_obeys_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "90")
    findings = [
        CheckResult("model", "fail", f"{'word ' * 20}\x1b[31m", "mend it", exit_code=2),
        CheckResult("disk", "warn", "little", host=1),
    ]
    lines = DoctorReport(findings, 1.26).to_text().splitlines()
    assert lines[0] == "check          result  found, and -> what to do"
    assert lines[1].startswith("model          fail    word word")
    assert lines[2].startswith(" " * 23 + "word") and lines[2].endswith("\\x1b[31m")
    assert lines[3] == " " * 23 + "-> mend it"
    assert lines[4] == "disk (host 1)  warn    little"
    assert lines[-1] == "1 warn, 1 fail in 1.3 s"
