"""Tests of plug-ins that cannot be used, which are refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings.errors import InputError
from tests.reward.processes import WORKERS
from tests.reward.samples import make_group, score, write_plug_in

pytestmark = WORKERS


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        (None, "no.py:f", "no.py:f: no such file: /"),
        ("class f:\n    def __init__(self, completion): ...", "plug.py:f", "f is a class, not a function"),
        ("import os\n1 / 0", "plug.py:f", "importing plug.py failed: ZeroDivisionError: division by zero (plug.py:2)"),
        ("raise SystemExit(0)", "plug:f", "importing plug failed: SystemExit: 0 (plug.py:1)"),
        ("def f(completion, mood): return 1", "plug.py:f", "cannot be filled: `mood`. A function takes"),
        ("import math\nf = math.hypot", "plug.py:f", "its signature cannot be read"),
    ],
)  # fmt: skip
def test_a_broken_plug_in_is_an_input_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, function: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if source is not None:
        write_plug_in(tmp_path, source)
    with pytest.raises(InputError) as caught:
        score([function], make_group("a"))
    assert str(caught.value).startswith(f"reward.functions: {function}: ")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "__pycache__").exists()


def test_a_good_plug_in_is_closed_when_the_next_one_is_broken(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "def f(completion): return 1")
    with pytest.raises(InputError, match="has no `g`"):
        score([f"{path}:f", f"{path}:g"], make_group("a"))
