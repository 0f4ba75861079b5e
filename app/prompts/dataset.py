"""Data sets of questions and reference answers: JSON Lines, Parquet, or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from app.prompts.chat import read_messages
from app.records.jsonl import read_jsonl
from app.records.parquet import read_parquet
from app.records.sample import Messages
from settings.errors import InputError
from settings.schema.model import split_revision

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "reward_model.ground_truth")
"""Default column names, in order of preference; a dot denotes a field of a nested object, as in verl's files."""
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
DEFAULT_CONFIGS = {"openai/gsm8k": "main", "gsm8k": "main"}
"""Configurations of hub data sets that have several and no default."""


@dataclass(frozen=True, slots=True, eq=False)
class DatasetRow:
    """A question of a data set, before the chat template is applied."""

    uid: str
    prompt: str | Messages
    answer: str | None
    """Reference answer as in the data set; reward functions parse it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other columns whose values can be represented in JSON."""
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
        """Returns the source, the number of rows and the columns as text; of a mixture, one line per part."""
        if self.parts:
            return "\n".join(part.to_text() for part in self.parts)
        columns = ", ".join(f"{role} from {column}" for role, column in self.column_mapping.items())
        num_unanswered = sum(row.answer is None for row in self.rows)
        missing = f", {num_unanswered:,} without an answer" if 0 < num_unanswered < len(self.rows) else ""
        return f"{self.source}: {len(self.rows):,} rows ({columns}{missing})"


RawRow = tuple[str, Mapping[str, Any]]
"""Location of a row, for the start of error messages, and its columns."""


def load_dataset(
    source: str,
    *,
    split: str = "train",
    prompt_column: str | None = None,
    answer_column: str | None = None,
) -> Dataset:
    """Reads a data set and finds its prompt and answer columns.

    Args:
        source: `hf:<hub id>[:<config>][@<revision>]`, or the path of a .jsonl, .json (lines) or .parquet file.
        split: split of a hub data set; a file has only one.
        prompt_column: None for the first of `PROMPT_COLUMNS` that exists.
        answer_column: None for the first of `ANSWER_COLUMNS` that exists; there may be none.

    Raises:
        InputError: the source does not exist, is empty or malformed, or a row has no usable prompt.
    """
    if source.startswith("hf:"):
        stem, raw_rows = _read_hub(source, split)
    else:
        stem, raw_rows = Path(source).stem, _read_file(source)
    if not raw_rows:
        raise InputError(f"data.source: {source} holds no rows")
    mapping = _choose_columns(source, raw_rows, prompt_column, answer_column)
    rows = [_to_row(f"{stem}/{index}", *raw, mapping) for index, raw in enumerate(raw_rows)]
    return Dataset(rows=rows, column_mapping=mapping, source=source)


def _read_file(source: str) -> list[RawRow]:
    path = Path(source)
    if not path.exists():
        hint = f"; for a hub data set, write hf:{source}" if source.count("/") == 1 and not path.suffix else ""
        raise InputError(f"data.source: {path.absolute()}: no such file{hint}")
    if path.suffix.lower() not in FILE_SUFFIXES or not path.is_file():
        raise InputError(
            f"data.source: {path.absolute()}: expected a file ending in {', '.join(FILE_SUFFIXES)},"
            " `hf:<hub id>` or `builtin:arithmetic`"
        )
    if path.suffix.lower() == ".parquet":
        try:
            return list(read_parquet(path))
        except InputError as error:
            raise InputError(f"data.source: {error}") from error
    return [(f"{path}:{line}", record) for line, record in read_jsonl(path)]


def split_hub_source(source: str) -> tuple[str, str | None, str | None]:
    """Returns hub id, configuration and revision of `hf:<hub id>[:<config>][@<revision>]`."""
    name, revision = split_revision(source.removeprefix("hf:"))
    hub_id, _, config = name.partition(":")
    return hub_id, config or None, revision


def _read_hub(source: str, split: str) -> tuple[str, list[RawRow]]:
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
            f"data.source: {source} (split {split!r}) cannot be loaded: {error}. Without a network, set it to the"
            " path of a .jsonl or .parquet file, or use builtin:arithmetic"
        ) from error
    rows = [(f"{source} {split} row {i}", record) for i, record in enumerate(table.to_list())]
    return f"{Path(hub_id).name}/{split}", rows


def _choose_columns(
    source: str, raw_rows: Sequence[RawRow], prompt_column: str | None, answer_column: str | None
) -> dict[str, str]:
    # Columns of all rows, with fields of nested objects as `outer.inner`, in order of appearance.
    available: dict[str, None] = {}
    for _, columns in raw_rows:
        for name, value in columns.items():
            available[name] = None
            if isinstance(value, Mapping):
                available |= {f"{name}.{inner}": None for inner in value}
    mapping = {}
    for role, chosen, candidates in (
        ("prompt", prompt_column, PROMPT_COLUMNS),
        ("answer", answer_column, ANSWER_COLUMNS),
    ):
        column = chosen or next((name for name in candidates if name in available), None)
        if column in available:
            mapping[role] = column
        elif chosen or role == "prompt":
            raise InputError(
                f"data.{role}_column: {source} has no column {chosen or ' | '.join(candidates)};"
                f" it has: {', '.join(available)}; set data.{role}_column to the one with the {role}s"
            )
    return mapping


def _to_row(uid: str, where: str, columns: Mapping[str, Any], mapping: Mapping[str, str]) -> DatasetRow:
    prompt, answer = mapping["prompt"], mapping.get("answer")
    return DatasetRow(
        uid=uid,
        prompt=_read_prompt(_look_up(columns, prompt), f"{where}: {prompt}"),
        answer=_read_answer(_look_up(columns, answer), f"{where}: {answer}") if answer else None,
        extra={name: value for name, value in columns.items() if name not in (prompt, answer) and _is_json(value)},
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
        raise InputError(f"{where}: the prompt is {'blank' if value else 'empty'}")
    raise InputError(f"{where}: expected text or a list of chat messages, got {type(value).__name__}")


def _read_answer(value: Any, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise InputError(f"{where}: expected text, a number or null, got {type(value).__name__}")


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
