"""Micro-batches that every host cuts alike: same count, same shape, from all-gathered lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from app.batching.ladder import rung
from app.batching.pack import RowShape
from app.batching.plan import Plan, fixed_micro_batches
from app.flow import Sample
from app.mesh.placement import max_over_hosts, num_local_row_shards

SMALLEST_COMPLETION = 4


def common_row_shape(samples: Sequence[Sample]) -> RowShape:
    """The rung that holds the longest sample of any host, one sample a row."""
    tokens = max((len(s.prompt.token_ids) + len(s.completion_ids) for s in samples), default=1)
    completion_tokens = max((len(s.completion_ids) for s in samples), default=1)
    longest = max_over_hosts(np.asarray([tokens, completion_tokens]))
    return row_shape(int(longest[0]), int(longest[1]))


def row_shape(num_tokens: int, num_completion_tokens: int) -> RowShape:
    """The rungs that hold a sample of so many tokens, so many of them its completion's."""
    return RowShape(rung(num_tokens), rung(num_completion_tokens, smallest=SMALLEST_COMPLETION))


def plan_micro_batches(num_samples: int, mesh: Mesh, *, rows_per_device: int) -> Plan:
    """Fixed micro-batches of `rows_per_device` rows a device; as many on every host as the fullest needs."""
    rows = rows_per_device * num_local_row_shards(mesh)
    most = int(max_over_hosts(np.asarray(num_samples)))
    # Never more rows than there are samples for: a small batch is one small micro-batch.
    rows = min(rows, -(-most // num_local_row_shards(mesh)) * num_local_row_shards(mesh))
    return fixed_micro_batches(num_samples, rows_per_micro_batch=rows, num_micro_batches=-(-most // rows))
