"""Splits items over hosts."""

from __future__ import annotations

import jax


def host_shard(num_items: int, *, host: int | None = None) -> range:
    """Returns a host's contiguous share of the items, this host's by default. Lengths differ by one at most."""
    each, rest = divmod(num_items, jax.process_count())
    host = jax.process_index() if host is None else host
    first = host * each + min(host, rest)
    return range(first, first + each + (host < rest))


def max_shard_size(num_items: int) -> int:
    """Returns the largest number of items assigned to one host."""
    return -(-num_items // jax.process_count())
