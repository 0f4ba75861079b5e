"""Makes every host write to the compilation cache, so that later tests find its programs; imported by a host's program.

JAX lets only the first process write, because all processes usually compile the same programs. On CPUs each process has
its own keys, so the others would find nothing, and the first would wait for them.
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
