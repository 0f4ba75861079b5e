"""Imported by the program of a host, so that it keeps what it compiles for the next test.

JAX has the first process alone write to a compilation cache, since elsewhere all would write the same. On CPUs each
process has keys of its own: the others would find nothing, and the first would wait for them.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from jax._src import compiler, distributed

_write = compiler._cache_write  # pyright: ignore[reportPrivateUsage]


def _write_as_the_first(*arguments: Any) -> None:
    with mock.patch.object(distributed.global_state, "process_id", 0):
        _write(*arguments)


setattr(compiler, "_cache_write", _write_as_the_first)  # noqa: B010  (a private name)
