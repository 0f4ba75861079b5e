"""Tests that an exception in a check becomes its result, with an exit code."""

import pytest

from app.preflight.check_results import CheckRecorder
from settings.errors import InputError


def test_an_exception_becomes_the_failure_of_its_check() -> None:
    recorder = CheckRecorder()
    with recorder.run_check("settings"):
        raise InputError("a: wrong")
    with recorder.run_check("attention", "set another"):
        raise NotImplementedError("of a library")
    with recorder.run_check("hub"):
        recorder.warn("hub", "slow", "wait")
    assert [(one.check, one.verdict, one.found, one.exit_code) for one in recorder.results] == [
        ("settings", "fail", "a: wrong", 2),
        ("attention", "fail", "NotImplementedError: of a library", 1),
        ("hub", "warn", "slow", 0),
    ]
    assert [one.advice for one in recorder.results] == ["", "set another", "wait"]
    with pytest.raises(KeyboardInterrupt), recorder.run_check("disk"):
        raise KeyboardInterrupt
