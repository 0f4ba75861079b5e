"""Tests that every setting in README and the runbooks exists, with the default that they give.

Inline code counts if it begins with the name of a section: `rollout.group_size`, also with a value, as in
`algorithm.kl_in: reward`, with `*` or `<phase>`, or with braces. Columns of a table that name settings of another
program are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from app.report.metric_registry import expand_braces, find_metric
from settings import Settings, load
from settings.loading.fields import FIELDS, SECTIONS, value_of
from settings.loading.synonyms import SYNONYMS, VERL_ROOT
from settings.loading.yaml_file import parse_scalar

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "sops").rglob("*.md"))]
MIGRATIONS = [REPOSITORY / "sops" / "migrate" / "from_trl.md", REPOSITORY / "sops" / "migrate" / "from_verl.md"]
THEIRS = {"TRL", "verl", "default there"}
"""Headings of columns that name settings of another program."""
FILE = re.compile(r"\.(json|jsonl|md|py|yaml|html|png|npz|safetensors)$")
STATED = re.compile(r"`([a-z_]+\.[a-z_.]+)` \((\d[\d.e-]*|null|true|false)[;,)]")
"""Pattern of a default, as in `checkpoint.keep` (2), maybe with more text after the value."""


def without_blocks(markdown: str) -> str:
    return re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)


def tables(markdown: str) -> Iterator[list[list[str]]]:
    """Returns the rows of each table, its heading first, as lists of cells."""
    for table in re.findall(r"(?:^\|.*\n)+", markdown, flags=re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        yield [row for row in rows if set("".join(row)) != {"-"}]


def own_text(markdown: str) -> str:
    """Returns the text without the columns of another program."""
    text = without_blocks(markdown)
    prose = re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)
    cells = [
        cell
        for head, *rows in tables(text)
        for row in rows
        for name, cell in zip(head, row, strict=True)
        if name not in THEIRS
    ]
    return "\n".join([prose, *cells])


def named_settings(markdown: str) -> list[str]:
    """Returns the dotted names in inline code, with braces expanded and values removed."""
    found = []
    for code in re.findall(r"`([^`\n]+)`", own_text(markdown)):
        name = re.split(r"[=: ]", code.removeprefix("--set "))[0]
        if name.split(".")[0] in SECTIONS and "." in name and not FILE.search(name):
            found += expand_braces(name)
    return found


def exists(name: str) -> bool:
    pattern = re.sub(r"<\w+>", "*", name)
    return any(fnmatchcase(known, pattern) for known in (*FIELDS, *SECTIONS))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_setting_that_is_named_exists(document: Path) -> None:
    assert [name for name in named_settings(document.read_text(encoding="utf-8")) if not exists(name)] == []


@pytest.fixture(scope="module")
def nothing_said(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Returns the settings of an empty configuration."""
    path = tmp_path_factory.mktemp("empty") / "empty.yaml"
    path.write_text("run: {}\n", encoding="utf-8")
    return load(str(path), [], {}).settings


def is_default(field: str, stated: str, settings: Settings) -> bool:
    """Returns whether a value is the default of the schema, or the derived one."""
    text = stated.strip("`")
    value = yaml.safe_load(text) if text.startswith(("[", "{")) else parse_scalar(text)
    value = tuple(value) if isinstance(value, list) else value
    return value in (FIELDS[field].get_default(), value_of(settings, field))


@pytest.mark.parametrize("document", MIGRATIONS, ids=lambda path: path.name)
def test_a_table_states_the_default_of_each_setting(document: Path, nothing_said: Settings) -> None:
    stated: list[tuple[str, str]] = []
    for head, *rows in tables(without_blocks(document.read_text(encoding="utf-8"))):
        if "default here" not in head:
            continue
        for row in rows:
            fields = re.findall(r"`([^`]+)`", row[head.index("here")])
            defaults = [text.strip() for text in row[head.index("default here")].split(",") if text.strip()]
            assert len(fields) == len(defaults) or fields == ["reward.functions"], row
            stated += zip(fields, defaults, strict=bool(defaults))
    assert len(stated) > 40
    assert [(field, text) for field, text in stated if not is_default(field, text, nothing_said)] == []


@pytest.mark.parametrize(("document", "program"), [(MIGRATIONS[0], "TRL"), (MIGRATIONS[1], "verl")])
def test_errors_about_unknown_names_say_what_the_tables_say(document: Path, program: str) -> None:
    found: set[str] = set()
    for head, *rows in tables(without_blocks(document.read_text(encoding="utf-8"))):
        for theirs, _, here, _, remark in rows if "default here" in head else ():
            fields, names = ({*re.findall(r"`([^`]+)`", cell)} for cell in (here, theirs))
            same = names & FIELDS.keys()  # never unknown
            in_errors = [SYNONYMS[name.removeprefix(VERL_ROOT)] for name in names - same]
            found |= {synonym.title for synonym in in_errors}
            if here == "–" or names:
                assert {field for synonym in in_errors for field in synonym.fields} | same == fields
            for told in {synonym.remark for synonym in in_errors}:
                assert told == remark.replace("`", "").strip() if here == "–" else told in remark.replace("`", "")
    assert found == {synonym.title for synonym in SYNONYMS.values() if synonym.title.startswith(f"{program}'s ")}


@pytest.mark.parametrize("document", MIGRATIONS, ids=lambda path: path.name)
def test_a_metric_that_another_program_s_is_called_here_is_in_the_glossary(document: Path) -> None:
    *_, (head, *rows) = tables(without_blocks(document.read_text(encoding="utf-8")))
    assert head[1:] == ["here"]
    names = [name for _, here in rows for name in re.findall(r"`([^`]+)`", here)]
    assert len(names) > 10
    assert [name for name in names if find_metric(name) is None] == []


def test_a_number_behind_a_setting_is_its_default(nothing_said: Settings) -> None:
    stated = [match for document in DOCUMENTS for match in STATED.findall(document.read_text(encoding="utf-8"))]
    assert stated
    assert [(field, text) for field, text in stated if not is_default(field, text, nothing_said)] == []
