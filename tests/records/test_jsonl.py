import json

import pytest

from app.records.jsonl import check_output_path, read_jsonl, write_jsonl
from settings.errors import InputError


def test_reading_yields_line_numbers_and_skips_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n   \n{"a": 2}\n')
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (4, {"a": 2})]


def test_reading_accepts_byte_order_mark_crlf_and_no_last_newline(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r\n{"a": 2}')
    assert list(read_jsonl(path)) == [(1, {"a": "é"}), (2, {"a": 2})]


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "x\u2028y\x85z"}\n', encoding="utf-8")
    assert list(read_jsonl(path)) == [(1, {"a": "x\u2028y\x85z"})]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1', r"not JSON: Expecting ',' delimiter at column 8$"),
        (b"[1, 2]", "expected a JSON object, got list"),
        (b'"text"', "got str"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"b": 1.0, "a": {"c": [0.5, NaN, NaN]}}', r"not usable JSON: a\.c\[1\] is NaN$"),
        (b'{"a": 1E+400}', "a is Infinity, or too large for a float64"),
        (b'{"a": [1, -1e400]}', r"a\[1\] is -Infinity, or too large for a float64"),
        (b'{"a": ' + b"9" * 400 + b".0}", "a is Infinity, or too large"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 200_000, "recursion"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "digits"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_reason(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"ok": 1}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=reason) as raised:
        list(read_jsonl(path))
    assert f"{path}:3" in str(raised.value)


def test_nan_is_null_where_other_programs_write_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"NaN": "NaN", "a": [NaN, {"b": NaN}]}\n{"a": [NaN, -Infinity]}\n')
    lines = read_jsonl(path, reads_nan=True)
    assert next(lines) == (1, {"NaN": "NaN", "a": [None, {"b": None}]})
    with pytest.raises(InputError, match=r"jsonl:2: not usable JSON: a\[1\] is -Infinity"):
        next(lines)


def test_large_numbers_and_what_looks_like_them_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    record = {"a": [1e308, -1e-400, 10**400], "1e999": "1e999"}
    path.write_text(json.dumps(record))
    assert list(read_jsonl(path)) == [(1, record)]


def test_an_absent_file_is_named_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=str(tmp_path / "absent.jsonl")):
        list(read_jsonl("absent.jsonl"))


def test_reading_a_folder_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        list(read_jsonl(tmp_path))


def test_written_records_read_back_equal(tmp_path):
    records = [{"a": "\ud800 é \u2028", "b": [0.1, 1e-300, None, True]}, {"c": {"d": 2**70}}]
    path = tmp_path / "a.jsonl"
    write_jsonl(path, records)
    assert [record for _, record in read_jsonl(path)] == records
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"old": 1}\n')
    with pytest.raises(ValueError, match=r"record 2 \(q7/s0\)"):
        write_jsonl(path, [{"uid": "q6/s0"}, {"uid": "q7/s0", "reward": float("nan")}])
    assert path.read_text() == '{"old": 1}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_refused_as_output(tmp_path):
    with pytest.raises(InputError, match="got a folder"):
        write_jsonl(tmp_path, [{}])


def test_a_device_is_refused_as_output():
    with pytest.raises(InputError, match="got a device"):
        check_output_path("/dev/null")


def test_an_absent_folder_is_refused_as_output(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        check_output_path(tmp_path / "absent" / "a.jsonl")


def test_each_record_is_one_ascii_line(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"a": "line\nbreak é"}, {}])
    lines = path.read_bytes().split(b"\n")
    assert [json.loads(line) for line in lines[:-1]] == [{"a": "line\nbreak é"}, {}]
    assert lines[-1] == b"" and path.read_bytes().isascii()
