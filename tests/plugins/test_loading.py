"""Tests of the import of what users name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app.plugins.loading import LoadError, describe_error, load_object


@pytest.fixture(autouse=True)
def same_path_and_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    monkeypatch.chdir(tmp_path)


def test_names_of_one_file_share_its_state() -> None:
    Path("plug.py").write_text("class A:\n    seen = []\ndef see(): A.seen.append(1)\n")
    first, see = load_object("plug.py:A"), load_object("plug.py:see")
    see()
    assert first.seen == [1] and load_object("plug.py:A.seen") == [1]


def test_files_of_one_name_are_not_mixed_up() -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "plug.py").write_text(f"name = '{folder}'")
    assert [load_object(f"{folder}/plug.py:name") for folder in ("a", "b", "a")] == ["a", "b", "a"]


def test_an_error_is_placed_in_the_file_of_the_user() -> None:
    Path("plug.py").write_text("import json\ndef f():\n    json.loads('x')\n")
    with pytest.raises(ValueError) as caught:
        load_object("plug.py:f")()
    assert (
        describe_error(caught.value)
        == "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0) (plug.py:3)"
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.py:f", r"no such file: .*gone\.py"),
        ("gone.deeper:f", "there is no module `gone` in .* or among the installed packages"),
        ("json:load_all", "json has no `load_all`; its functions: .*dumps, load, loads"),
    ],
)
def test_what_does_not_exist_is_named(path: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        load_object(path)
