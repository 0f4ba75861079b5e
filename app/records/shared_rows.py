"""The fields of a data row in a sample file: long ones stand in the first sample of a prompt, not in each.

A row may have 100 kB of test cases, and a step many samples of each row.
"""

from __future__ import annotations

import hashlib
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
    holders: dict[str, tuple[bytes, str]] = {}
    for record in records:
        texts = {name: json.dumps(record[name], default=str) for name in ROW_FIELDS if name in record}
        long = {name: text for name, text in texts.items() if len(text) > MAX_REPEATED_CHARS}
        uid = str(record.get("uid"))
        prompt, digest = uid.rpartition("/s")[0], hashlib.sha256(json.dumps([long, [*texts]]).encode()).digest()
        before, holder = holders.get(prompt, (b"", uid))
        if long and prompt and before == digest and holder != uid:
            yield {name: value for name, value in record.items() if name not in long} | {ROW_OF: holder}
        else:
            holders[prompt] = digest, uid
            yield record


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
