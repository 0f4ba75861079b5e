"""Which backend `auto` takes."""

from __future__ import annotations

from typing import NamedTuple

from app.advantage.gae.chunked import CHUNK_SIZE


class Choice(NamedTuple):
    backend: str
    chunk_size: int
    why: str


def choose(backend: str, shape: tuple[int, ...], *, per_token_decay: bool, chunk_size: int | None = None) -> Choice:
    """The backend that was asked for, or for `auto` the one that is fastest here."""
    if backend != "auto":
        return Choice(backend, chunk_size or CHUNK_SIZE, "asked for")
    return Choice("chunked", chunk_size or CHUNK_SIZE, "no other backend is built")
