import json

import pytest

from app.records.jsonl import check_output_path, read_jsonl, write_jsonl
from settings.errors import InputError

NUMBERS = {"a": [1e308, -1e-400, 10**400], "1e999": "1e999"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.jsonl"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"a": 1}\n\n   \n{"a": 2}\n', [(1, {"a": 1}), (4, {"a": 2})]),  # blank lines count
        (b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r\n{"a": 2}', [(1, {"a": "é"}), (2, {"a": 2})]),  # written on Windows
        ('{"a": "x\u2028y\x85z"}\n'.encode(), [(1, {"a": "x\u2028y\x85z"})]),  # separators inside a string
        (json.dumps(NUMBERS).encode(), [(1, NUMBERS)]),
    ],
)
def test_json_objects_are_read_with_their_line_numbers(path, content, expected):
    path.write_bytes(content)
    assert list(read_jsonl(path)) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1', r"not JSON: Expecting ',' delimiter at column 8; correct or remove the line$"),
        (b"[1, 2]", "expected a JSON object, got list; put one object on each line"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"b": 1.0, "a": {"c": [0.5, NaN, NaN]}}', r"unusable JSON: a\.c\[1\] is NaN; correct or remove the line$"),
        (b'{"a": 1E+400}', "a is Infinity, or too large for a float64"),
        (b'{"a": [1, -1e400]}', r"a\[1\] is -Infinity, or too large for a float64"),
        (b'{"a": ' + b"9" * 400 + b".0}", "a is Infinity, or too large"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 200_000, "recursion"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "digits"),
    ],
)
def test_an_invalid_json_line_is_refused_with_its_number_and_reason(path, line, reason):
    path.write_bytes(b'{"ok": 1}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=reason) as raised:
        list(read_jsonl(path))
    assert f"{path}:3" in str(raised.value)


def test_nan_of_other_programs_is_read_as_null(path):
    path.write_text('{"NaN": "NaN", "a": [NaN, {"b": NaN}]}\n{"a": [NaN, -Infinity]}\n')
    lines = read_jsonl(path, reads_nan=True)
    assert next(lines) == (1, {"NaN": "NaN", "a": [None, {"b": None}]})
    with pytest.raises(InputError, match=r"jsonl:2: unusable JSON: a\[1\] is -Infinity"):
        next(lines)


def test_jsonl_files_that_cannot_be_read_or_written_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=str(tmp_path / "absent.jsonl")):
        list(read_jsonl("absent.jsonl"))
    with pytest.raises(InputError, match="cannot be read"):
        list(read_jsonl(tmp_path))
    for path, message in (
        (tmp_path, "got a folder"),
        ("/dev/null", "got a device"),
        (tmp_path / "absent" / "a.jsonl", "the folder .* does not exist"),
    ):
        with pytest.raises(InputError, match=f"^--out: {path}: .*{message}"):
            check_output_path(path, "--out")
    with pytest.raises(InputError, match="got a folder"):
        write_jsonl(tmp_path, [{}])


def test_written_records_are_ascii_lines_that_read_back_equal(path):
    records = [{"a": "\ud800 é \u2028 line\nbreak", "b": [0.1, 1e-300, None, True]}, {"c": {"d": 2**70}}, {}]
    write_jsonl(path, records)
    assert [record for _, record in read_jsonl(path)] == records
    content = path.read_bytes()
    assert content.isascii() and content.endswith(b"\n") and content.count(b"\n") == 3
    assert list(path.parent.iterdir()) == [path]


def test_writing_a_record_with_nan_fails_and_keeps_the_old_file(path):
    path.write_text('{"old": 1}\n')
    with pytest.raises(ValueError, match=r"\(q7/s0\): "):
        write_jsonl(path, [{"uid": "q6/s0"}, {"uid": "q7/s0", "reward": float("nan")}])
    assert path.read_text() == '{"old": 1}\n'
    assert list(path.parent.iterdir()) == [path]
