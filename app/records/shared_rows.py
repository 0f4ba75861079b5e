"""The fields of a data row in a sample file: long ones stand in the first sample of a prompt, not in each.

A row may have 100 kB of test cases, and a step many samples of each row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from settings.errors import InputError

ROW_FIELDS = ("answer", "columns")
"""Fields of a sample's record that are the same in all samples of a row, and of any size."""
ROW_OF = "row_of"
"""The field of a record without them: the uid of an earlier sample of the file, which has them."""
MAX_REPEATED_CHARS = 256
"""Longest JSON of a field that every sample has, so that small rows can be read in any line."""


def share_rows(records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yields the records of one file, with `row_of` in place of the long fields that an earlier one has."""
    holders: dict[str, tuple[str, dict[str, Any], list[str]]] = {}
    for record in records:
        uid, row = str(record.get("uid")), {name: record[name] for name in ROW_FIELDS if name in record}
        prompt = uid.rpartition("/s")[0]
        holder, held, long = holders.get(prompt, (uid, {}, []))
        if holder != uid and _are_same(row, held):
            yield {name: x for name, x in record.items() if name not in long} | {ROW_OF: holder} if long else record
        else:
            long = [name for name in row if len(json.dumps(row[name], default=str)) > MAX_REPEATED_CHARS]
            holders[prompt] = uid, row, long
            yield record


def _are_same(row: Mapping[str, Any], held: Mapping[str, Any]) -> bool:
    # In a file, 1, 1.0 and True are different. Most samples of a prompt have the same objects.
    values = zip(row.values(), held.values(), strict=True)
    return [*row] == [*held] and all(one is other or repr(one) == repr(other) for one, other in values)


class SharedRows:
    """Gives the records of one file, in its order, the fields that an earlier one has for them."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}

    def restore(self, record: Mapping[str, Any], *, where: str) -> Mapping[str, Any]:
        """Returns the record with all fields of its row, and without `row_of`.

        Raises:
            InputError: no earlier record is the one that `row_of` names; the message starts with `where`.
        """
        row = {name: record[name] for name in ROW_FIELDS if name in record}
        holder, uid = record.get(ROW_OF), record.get("uid")
        if holder is None:
            if row and isinstance(uid, str):
                self._rows[uid] = row
            return record
        if not isinstance(holder, str) or holder not in self._rows:
            raise InputError(
                f"{where}: {ROW_OF}: no earlier line is the sample {holder!r:.80}, which has answer and columns of "
                f"this one; keep that line before this one, or replace {ROW_OF} by these fields"
            )
        return {**self._rows[holder], **{name: value for name, value in record.items() if name != ROW_OF}}
