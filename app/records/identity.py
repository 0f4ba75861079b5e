"""The identity of a computation: everything that determines its result, as named JSON values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.records.sample import Prompt

Identity = Mapping[str, Any]
"""Maps names to JSON values. Computations with equal identities have equal results; a missing name counts as None."""

MODEL, TOKENIZER, CHECKPOINT, PROMPTS = "the model's files", "the tokenizer", "the checkpoint", "the prompts"
"""Names of values in the identity of a policy's samples."""
MAX_SHOWN_CHARS = 60
"""Maximum number of characters of a value in a message."""


def different_names(before: Identity, now: Identity) -> list[str]:
    """Returns the names of the values that differ, in the order of `before`; names only in `now` come last."""
    return [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]


def first_difference(before: Identity, now: Identity) -> str | None:
    """Returns the first difference as text, such as `run.seed was 0 there, and is 1 now`; None if there is none."""
    names = different_names(before, now)
    if not names:
        return None
    values = [repr(one.get(names[0])) for one in (before, now)]
    was, is_now = (x if len(x) <= MAX_SHOWN_CHARS else f"{x[: MAX_SHOWN_CHARS - 3]}..." for x in values)
    return f"{names[0]} was {was} there, and is {is_now} now"


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Returns, as text, the number of prompts and a digest of all fields that affect samples and rewards."""
    digest = hashlib.sha256()
    for prompt in prompts:
        fields = [prompt.uid, prompt.token_ids.tolist(), prompt.source, prompt.answer, dict(prompt.extra)]
        digest.update(json.dumps(fields, sort_keys=True).encode() + b"\n")
    return f"{len(prompts)} prompts, {digest.hexdigest()[:16]}"


def plugin_file_digests(setting: str, names: Iterable[str | None]) -> dict[str, str]:
    """Returns the file digest of each `path/to/file.py:name` in a setting; skips `module:name`."""
    files = {name: Path(name.rpartition(":")[0]) for name in names if name is not None}
    return {
        f"{setting}: the file of {name}": hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for name, path in files.items()
        if path.is_file()
    }
