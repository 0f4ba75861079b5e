"""Long fields of a data row in a sample file are stored only in the first sample of a prompt.

A row may have 100 kB of test cases, and a step many samples of each row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from settings.errors import InputError

ROW_FIELDS = ("answer", "columns")
"""Fields of a sample's record that are the same in all samples of a row and may be large."""
ROW_OF = "row_of"
"""The field in place of long `ROW_FIELDS`: the uid of an earlier sample in the same file that has them."""
MAX_REPEATED_CHARS = 256
"""Fields with at most this much JSON are repeated in every sample, so that small rows are readable in any line."""


def share_rows(records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yields the records of one file, with `row_of` in place of long fields that equal an earlier record's."""
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
    # In a file, 1, 1.0 and True differ. Most samples of a prompt share the same objects.
    values = zip(row.values(), held.values(), strict=True)
    return [*row] == [*held] and all(one is other or repr(one) == repr(other) for one, other in values)


class SharedRows:
    """Restores the shared fields of the records of one file, in order."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}

    def restore(self, record: Mapping[str, Any], *, where: str) -> Mapping[str, Any]:
        """Returns the record with all fields of its row, and without `row_of`.

        Raises:
            InputError: no earlier record has the uid in `row_of`; the message starts with `where`.
        """
        row = {name: record[name] for name in ROW_FIELDS if name in record}
        holder, uid = record.get(ROW_OF), record.get("uid")
        if holder is None:
            if row and isinstance(uid, str):
                self._rows[uid] = row
            return record
        if not isinstance(holder, str) or holder not in self._rows:
            raise InputError(
                f"{where}: {ROW_OF}: no earlier line has the sample {holder!r:.80} with the answer and columns of "
                f"this one; keep that line before this one, or replace {ROW_OF} by these fields"
            )
        return {**self._rows[holder], **{name: value for name, value in record.items() if name != ROW_OF}}
