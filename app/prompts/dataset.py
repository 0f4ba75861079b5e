"""Reads data sets of questions and reference answers from JSON Lines, Parquet or the Hugging Face hub."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from app.prompts.chat import read_messages, split_completion
from app.records.jsonl import read_jsonl
from app.records.parquet import read_parquet
from app.records.sample import Messages
from app.records.text_format import format_count
from app.records.typed_values import to_json
from settings.errors import InputError, join_words
from settings.schema.model import split_revision

log = logging.getLogger(__name__)

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "reward_model.ground_truth")
COMPLETION_COLUMNS = ("completion", "response", "messages", "answer", "extra_info.answer", "solution")
"""Default column names, in order of preference; a dot denotes a field of a nested object, as in verl's files."""
FILE_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
SPLIT_NAMES = ("train", "test", "val", "dev")
"""Prefixes of the file names of a split; files of different splits are not read together by accident."""
DEFAULT_CONFIGS = {"openai/gsm8k": "main", "gsm8k": "main"}
"""Configurations to use for hub data sets that have several, but no default."""


@dataclass(frozen=True, slots=True, eq=False)
class DatasetRow:
    """A question of a data set, before the chat template is applied."""

    uid: str
    prompt: str | Messages
    answer: Any
    """Reference answer as in the data set, of any type; None without one. See `app.records.typed_values`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other columns."""
    where: str = ""
    """File and line, or another location, for error messages; empty if the row was generated."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """The rows of a data set, and their source."""

    rows: Sequence[DatasetRow]
    column_mapping: Mapping[str, str]
    """Maps `prompt` and `answer` to their columns; has no `answer` if the data set has no answers."""
    source: str
    parts: Sequence[Dataset] = ()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of uid, prompt, answer and other columns of every row, in order."""
        digest = hashlib.sha256()
        for row in self.rows:
            columns = [row.uid, row.prompt, row.answer, dict(row.extra)]
            digest.update(json.dumps(columns, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()

    def to_text(self) -> str:
        """Returns the source, the number of rows and the columns as text; for a mixture, one line per part."""
        if self.parts:
            return "\n".join(part.to_text() for part in self.parts)
        columns = ", ".join(f"{role} from {column}" for role, column in self.column_mapping.items())
        num_unanswered = sum(row.answer is None for row in self.rows)
        missing = f", {num_unanswered:,} without an answer" if 0 < num_unanswered < len(self.rows) else ""
        return f"{self.source}: {format_count(len(self.rows), 'row')} ({columns}{missing})"


RawRow = tuple[str, str, Mapping[str, Any]]
"""The uid of a row, its location for the start of error messages, and its columns."""


def load_dataset(
    source: str,
    *,
    split: str = "train",
    prompt_column: str | None = None,
    answer_column: str | None = None,
    reads_completions: bool = False,
) -> Dataset:
    """Reads a data set and finds its prompt and answer columns.

    Args:
        source: `hf:<hub id>[:<config>][@<revision>]`, or the path of a .jsonl, .json (lines) or .parquet file, a folder
            of them, or a pattern such as `data/train-*.parquet`. JSON files may be gzipped.
        split: split of a hub data set; ignored for files.
        prompt_column: name of the prompt column; None for the first of `PROMPT_COLUMNS` that exists.
        answer_column: name of the answer column; None for the first of `ANSWER_COLUMNS` that exists, if any.
        reads_completions: whether answers are completions for supervised fine-tuning; `COMPLETION_COLUMNS` then
            replaces `ANSWER_COLUMNS`.

    Raises:
        InputError: the source does not exist, is empty or malformed, or a row has no usable prompt or completion.
    """
    raw_rows = _read_hub(source, split) if source.startswith("hf:") else _read_files(source)
    if not raw_rows:
        raise InputError(f"data.source: {source} contains no rows; name a file or data set that has some")
    raw_rows = _without_foreign_columns(raw_rows)
    mapping = _choose_columns(source, raw_rows, prompt_column, answer_column, reads_completions=reads_completions)
    rows = [_to_row(*raw, mapping, reads_completions=reads_completions) for raw in raw_rows]
    return Dataset(rows=rows, column_mapping=mapping, source=source)


def find_files(source: str) -> list[Path]:
    """Returns the data files that a path, folder or pattern denotes, sorted by name.

    Raises:
        InputError: there are none, or a file has an unknown format.
    """
    path = Path(source)
    if path.is_dir():
        found = (file.relative_to(path) for file in path.rglob("*") if _suffix(file))
        files = sorted(path / file for file in found if not any(part.startswith((".", "_")) for part in file.parts))
        _check_shards(path, files)
    elif not path.exists() and glob.has_magic(source):
        files = [Path(file) for file in sorted(glob.glob(source, recursive=True))]
        if not files:
            raise InputError(f"data.source: no file matches {path.absolute()}; correct the pattern")
    else:
        files = [path]
    for file in files:
        _check_file(file)
    return files


def _read_files(source: str) -> list[RawRow]:
    files = find_files(source)
    # Shards may have the same name in different folders.
    folder = Path(os.path.commonpath([file.parent for file in files]))
    return [
        (f"{file.relative_to(folder).as_posix().removesuffix(_suffix(file))}/{index}", where, columns)
        for file in files
        for index, (where, columns) in enumerate(_read_file(file))
    ]


def _check_shards(folder: Path, files: Sequence[Path]) -> None:
    """Raises InputError if a folder has no data files, or if its files cannot all be shards of one split."""
    if not files:
        raise InputError(
            f"data.source: the folder {folder.absolute()} contains no files ending in {join_words(FILE_SUFFIXES)}; "
            "name another folder"
        )
    for kind_of in (_suffix, lambda file: next((name for name in SPLIT_NAMES if file.name.startswith(name)), "")):
        different = {kind_of(file): file for file in files}
        if len(different) > 1:
            names = join_words((str(file.relative_to(folder)) for file in different.values()), last="and")
            raise InputError(
                f"data.source: {folder.absolute()} mixes splits or file formats (for example {names}); select the "
                f"files with a pattern, such as {folder}/train*.parquet"
            )


def _suffix(path: Path) -> str:
    """Returns the suffix of a file's name that determines its format; empty if unknown."""
    return next((path.name[-len(suffix) :] for suffix in FILE_SUFFIXES if path.name.lower().endswith(suffix)), "")


def _check_file(path: Path) -> None:
    if not path.exists():
        hint = f", or write hf:{path} for a hub data set" if str(path).count("/") == 1 and not path.suffix else ""
        raise InputError(f"data.source: {path.absolute()}: no such file; correct the path{hint}")
    if not _suffix(path) or not path.is_file():
        raise InputError(
            f"data.source: {path.absolute()}: expected a file ending in {join_words(FILE_SUFFIXES)}, a folder or a "
            "pattern of such files, `hf:<hub id>` or `builtin:arithmetic`"
        )


def _read_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix.lower() != ".parquet":
        yield from ((f"{path}:{line}", record) for line, record in read_jsonl(path))
        return
    try:
        yield from read_parquet(path)
    except InputError as error:
        raise InputError(f"data.source: {error}") from error


def split_hub_source(source: str) -> tuple[str, str | None, str | None]:
    """Returns hub id, configuration and revision of `hf:<hub id>[:<config>][@<revision>]`."""
    name, revision = split_revision(source.removeprefix("hf:"))
    hub_id, _, config = name.partition(":")
    return hub_id, config or None, revision


def _read_hub(source: str, split: str) -> list[RawRow]:
    import datasets
    from datasets.exceptions import DatasetsError

    hub_id, config, revision = split_hub_source(source)
    if not hub_id:
        raise InputError(f"data.source: expected hf:<hub id>[:<config>][@<revision>], got {source!r}")
    config = config or DEFAULT_CONFIGS.get(hub_id)
    try:
        table = datasets.load_dataset(hub_id, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise InputError(
            f"data.source: {source} (split {split!r}) cannot be loaded: {error}; correct data.source or "
            "data.split or, without a network, name a .jsonl or .parquet file"
        ) from error
    stem = f"{Path(hub_id).name}/{split}"
    return [(f"{stem}/{i}", f"{source} {split} row {i}", to_json(row)) for i, row in enumerate(table.to_list())]


def _without_foreign_columns(raw_rows: Sequence[RawRow]) -> Sequence[RawRow]:
    """Drops columns with types that `to_json` does not support, with a warning."""
    foreign: dict[str, None] = {}
    for _, where, columns in raw_rows:
        for name, value in columns.items():
            if name not in foreign and (problem := _json_problem(value)):
                log.warning("%s: column %s is left out: %s", where, name, problem)
                foreign[name] = None
    if not foreign:
        return raw_rows
    return [
        (uid, where, {name: value for name, value in columns.items() if name not in foreign})
        for uid, where, columns in raw_rows
    ]


def _json_problem(value: Any) -> str | None:
    """Returns why a value cannot be written as JSON; None if it can."""
    if isinstance(value, str | int | float) or value is None:
        return None
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _choose_columns(
    source: str,
    raw_rows: Sequence[RawRow],
    prompt_column: str | None,
    answer_column: str | None,
    *,
    reads_completions: bool,
) -> dict[str, str]:
    # Columns of all rows, with fields of nested objects as `outer.inner`, in order of appearance.
    available: dict[str, None] = {}
    for _, _, columns in raw_rows:
        for name, value in columns.items():
            available[name] = None
            if isinstance(value, Mapping):
                available |= {f"{name}.{inner}": None for inner in value}
    mapping = {}
    answer = ("completion", COMPLETION_COLUMNS) if reads_completions else ("answer", ANSWER_COLUMNS)
    for role, chosen, what, candidates in (
        ("prompt", prompt_column, "prompt", PROMPT_COLUMNS),
        ("answer", answer_column, *answer),
    ):
        column = chosen or next((name for name in candidates if name in available), None)
        if column in available:
            mapping[role] = column
        elif chosen or role == "prompt" or reads_completions:
            raise InputError(
                f"data.{role}_column: {source} has no column {chosen or join_words(candidates)};"
                f" it has: {', '.join(available)}; set data.{role}_column to the one with the {what}s"
            )
    return mapping


def _to_row(
    uid: str, where: str, columns: Mapping[str, Any], mapping: Mapping[str, str], *, reads_completions: bool
) -> DatasetRow:
    prompt, answer = mapping["prompt"], mapping.get("answer")
    asked = _look_up(columns, prompt)
    if reads_completions and answer:
        start, _ = split_completion(_look_up(columns, answer), f"{where}: {answer}")
        asked = start if start or prompt == answer else asked
    return DatasetRow(
        uid=uid,
        prompt=_read_prompt(asked, f"{where}: {prompt}"),
        answer=_look_up(columns, answer) if answer else None,
        extra={name: value for name, value in columns.items() if name not in (prompt, answer)},
        where=where,
    )


def _look_up(columns: Mapping[str, Any], name: str) -> Any:
    if name in columns:
        return columns[name]
    outer, _, inner = name.partition(".")
    nested = columns.get(outer)
    return nested.get(inner) if isinstance(nested, Mapping) else None


def _read_prompt(value: Any, where: str) -> str | Messages:
    if isinstance(value, list):
        return read_messages(value, where)
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, str | None):
        raise InputError(f"{where}: the prompt is {'blank' if value else 'empty'}; remove the row")
    raise InputError(f"{where}: expected text or chat messages as prompt, got {value!r:.80}; correct or remove the row")
