"""Tests the strict YAML parser: line numbers, scalars and errors."""

import math

import pytest

from settings.errors import InputError
from settings.loading.yaml_file import MAX_BYTES, parse_settings_file, parse_yaml

VALUES = {
    **{"1e-6": 1e-6, "1E3": 1000.0, ".5": 0.5, "-3": -3, "010": 10, "0x1F": 31, "0o17": 15, ".inf": math.inf},
    **{"-.inf": -math.inf, "true": True, "False": False, "null": None, "~": None, "": None, "yes": "yes", "off": "off"},
    **{"1:30": "1:30", "1_000": "1_000", "2024-01-01": "2024-01-01", "1,-1,1": "1,-1,1", "'1'": "1"},
    **{".nan": math.nan, "[a, 1]": ["a", 1], "{a: {b: 1}}": {"a": {"b": 1}}},
    "{a: &x {b: 1}, c: *x}": {"a": {"b": 1}, "c": {"b": 1}},
}


@pytest.mark.parametrize("text", VALUES)
def test_yaml_scalars_are_read_as_in_yaml_1_2(text: str) -> None:
    assert repr(parse_yaml(text, name="f.yaml").to_python()) == repr(VALUES[text])


def test_every_yaml_value_records_its_line() -> None:
    root = parse_yaml("# note\na:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n", name="f.yaml")
    assert isinstance(root.value, dict)
    a = root.value["a"].value
    assert isinstance(a, dict)
    assert (root.value["a"].line, a["b"].line, a["c"].line) == (2, 3, 4)
    assert isinstance(a["c"].value, list)
    assert [item.line for item in a["c"].value] == [5, 6]


def test_an_unquoted_yaml_scalar_keeps_its_spelling() -> None:
    assert parse_yaml("1e3", name="f.yaml").spelling == "1e3"
    assert parse_yaml("'1e3'", name="f.yaml").spelling is None


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a:\n\tb: 1", r"f\.yaml:2:1: .*found character"),
        ("a: 1\nb: 2\na: 3", r"f\.yaml:3: `a` is already set on line 1"),
        ("a: !!python/object/apply:os.system ['true']", r"f\.yaml:1:4: .*the tag .*not allowed"),
        ("a: !!int 3", "the tag"),
        ("a: &a [*a]", "nested more than 20 deep"),
        ("[" * 22 + "]" * 22, "nested more than 20 deep"),
        ("[" * 1500, "nested more than 20 deep"),
        (BOMB, "more than 10000 values"),
        ("a: *b", r"f\.yaml:1:4: .*undefined alias"),
        ("a: [1", r"f\.yaml:1:6: not valid YAML"),
        ("a: b: c", r"f\.yaml:1:5: .*mapping values are not allowed"),
        ("a: 1\n---\nb: 2", r"f\.yaml:2:1: .*single document"),
        ("? [a]\n: 1", r"f\.yaml:1: a key is a list or a mapping"),
        ("a: " + "9" * 5000, r"f\.yaml:1: the number has too many digits"),
        ("a: \x07", r"f\.yaml: not valid YAML: .*#x0007"),
        ("", "the file is empty"),
        ("- a\n- b\n", "the file contains a list"),
        ("steps", "the file contains a single value"),
        (b"a: 1\nb: \xff\n", r"f\.yaml:2: not UTF-8 text \(byte 0xff\)"),
        ("#" * (MAX_BYTES + 1), "larger than 256 KiB"),
    ],
)
def test_invalid_yaml_and_files_without_settings_are_refused_with_the_line(content: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_settings_file(content.encode() if isinstance(content, str) else content, name="f.yaml")


def test_byte_order_mark_and_windows_line_ends_are_accepted_in_yaml() -> None:
    root = parse_settings_file(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n", name="f.yaml")
    assert root.to_python() == {"a": 1, "b": 2}
