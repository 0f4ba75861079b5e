"""Counts the FLOPs, loop iterations and grid steps of one call of a program on the device with the most work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Bool, Int32

from app.batching.micro_batch_plan import MicroBatch
from app.batching.token_batch import pack_tokens
from app.mesh.device_mesh import num_hosts
from app.mesh.placement import num_local_row_shards
from app.model.architecture import Architecture, lm_head_flops, pair_flops, token_flops
from app.model.attention.cached import decode_block_size
from app.model.attention.dense import ATTENTION_SCOPE
from app.model.attention.packed import architecture_blocking, make_block_pairs
from app.model.attention.pairs import Blocking
from app.model.kv_cache import abstract_cache, cache_shapes
from app.model.segment_layout import SegmentLayout
from app.model.token_logprobs import LM_HEAD_SCOPE
from app.preflight.attention_check import longest_samples
from app.preflight.phase_memory import StepOutline, largest_micro_batch
from app.records.sample import Sample
from app.rollout.engine.shapes import BatchShape
from app.runtime.scoring import set_compute_dtype
from scripts.bench.kernel_time import ROUTED_ROWS

BACKWARD_FACTOR = 3
"""FLOPs of forward plus backward pass as a multiple of the forward pass, without recomputation."""


@dataclass(frozen=True)
class ProgramWork:
    """The work of one call on the device with the most work."""

    model_flops: int
    """FLOPs of the network's matmuls, and of attention between visible pairs of tokens."""
    turns: Mapping[str, int]
    """Name scope in compiled programs -> number of loop iterations or grid steps, where it depends on the rows;
    `ROUTED_ROWS` -> number of rows that are routed to the experts of a device."""


def work_of_program(step: StepOutline, phase: str, name: str) -> ProgramWork:
    """Returns the work of the program `name` in a phase of a step whose samples all have the maximum length."""
    session, reward_model = step.session, step.reward_model
    settings, mesh = session.settings, session.mesh
    if phase in ("rollout", "evaluation"):
        evaluates = phase == "evaluation"
        shape = step.evaluation if evaluates else step.rollout
        assert shape is not None
        generator = session.evaluation_generator if evaluates else session.generator
        generates_on = generator.engine.programs.mesh
        if name == "recompute":
            shape = shape._replace(num_prompts=1, prompt_length=shape.cache_length)
        works = generation_work(session.model_spec.architecture, generates_on, settings.model.dtype, shape)
        return works["decode" if name == "decode" else "prefill"]
    if name == "optimizer":
        return ProgramWork(0, {})
    role: Any = {"critic": "critic", "update": "policy"}.get(phase, name)
    if phase == "reward":
        assert reward_model is not None
        architecture, plan = reward_model.architecture, step.reward
    else:
        plans = {"critic": step.critic_update, "update": step.update}
        architecture, plan = session.scoring.architecture_of(role), plans.get(phase) or step.scores[role]
    assert plan is not None
    # The reward model reads one more token.
    completion = settings.rollout.max_new_tokens + (phase == "reward")
    # One plan is made for the samples of all hosts, and the rows of this host may contain any of them.
    num_samples = settings.rollout.prompts_per_step * settings.rollout.group_size * num_hosts(mesh)
    samples = longest_samples(num_samples, prompt=step.longest_prompt, completion=completion)
    return packed_pass_work(
        *(architecture, mesh, set_compute_dtype(settings), samples, largest_micro_batch(plan)),
        logits_chunk=settings.model.logits_chunk if role in ("policy", "reference") else None,
        has_gradients=phase in ("critic", "update"),
    )


def packed_pass_work(
    architecture: Architecture,
    mesh: Mesh,
    dtype: DTypeLike,
    samples: list[Sample],
    micro_batch: MicroBatch,
    *,
    logits_chunk: int | None,
    has_gradients: bool,
) -> ProgramWork:
    """Returns the work of a pass over a micro-batch of packed rows.

    Args:
        dtype: the compute dtype.
        logits_chunk: `model.logits_chunk`; None for a network without LM head.
        has_gradients: whether the pass is forward and backward.
    """
    batch = pack_tokens(samples, micro_batch)
    targets = batch.logits_indices >= 0
    work = max(
        (
            _rows_work(architecture, mesh, dtype, part, num_logits=0 if logits_chunk is None else int(has_target.sum()))
            for part, has_target in _by_device(mesh, batch.layout, targets)
        ),
        key=lambda one: one.model_flops,
    )
    turns = dict(work.turns)
    if logits_chunk is not None:
        rows_on_device = len(targets) // num_local_row_shards(mesh)
        chunk = min(max(1, logits_chunk // rows_on_device), targets.shape[1])
        padded = np.pad(targets, ((0, 0), (0, int(-targets.shape[1] % chunk))))
        turns[LM_HEAD_SCOPE] = int(padded.reshape(len(targets), -1, chunk).any(axis=(0, 2)).sum())
    return ProgramWork(work.model_flops * (BACKWARD_FACTOR if has_gradients else 1), turns)


def generation_work(
    architecture: Architecture, mesh: Mesh, dtype: DTypeLike, shape: BatchShape
) -> dict[str, ProgramWork]:
    """Returns the work of a `prefill` of the longest prompts, and of a `decode` step of all rows at full length."""
    a, parts = architecture, num_local_row_shards(mesh)
    ones = np.ones((-(-shape.num_prompts // parts), shape.prompt_length), np.int32)
    positions = np.broadcast_to(np.arange(shape.prompt_length, dtype=np.int32), ones.shape)
    # Logits are computed by the decode program.
    prefill = _rows_work(a, mesh, dtype, SegmentLayout(ones, np.zeros_like(ones), positions), num_logits=0)
    length, rows = shape.cache_length, -(-shape.num_rows // parts)
    seen = [min(length, window or length) for window in a.layer_windows]
    flops = token_flops(a) + pair_flops(a) * sum(seen) + lm_head_flops(a)
    turns = _routed_rows(a, mesh, rows)
    with jax.set_mesh(mesh):
        if size := decode_block_size(a, shape.block_size or length, dtype):
            # This is the mean over layers of the blocks that a row sees; windows may start within a block.
            blocks = np.mean([-(-length // size) - (length - tokens) // size for tokens in seen])
            cache = abstract_cache(cache_shapes(a, shape.num_rows * num_hosts(mesh), length, dtype), mesh)[0].keys
            turns[ATTENTION_SCOPE] = math.ceil(cache.sharding.shard_shape(cache.shape)[0] * blocks)
    return {
        "prefill": prefill,
        "decode": ProgramWork(rows * flops // mesh.shape["tp"], turns),
    }


def _rows_work(
    architecture: Architecture, mesh: Mesh, dtype: DTypeLike, layout: SegmentLayout, *, num_logits: int
) -> ProgramWork:
    is_token = layout.segment_ids != 0
    # A token sees itself and all earlier positions within the window of its layer.
    seen = np.where(is_token, layout.positions + 1, 0)
    windows = Counter(architecture.layer_windows)
    pairs = sum(n * int((seen if w is None else np.minimum(seen, w)).sum()) for w, n in windows.items())
    flops = token_flops(architecture) * int(is_token.sum()) + pair_flops(architecture) * pairs
    flops += lm_head_flops(architecture) * num_logits
    with jax.set_mesh(mesh):
        blocking = architecture_blocking(architecture, is_token.shape[1], dtype)
    return ProgramWork(
        flops // mesh.shape["tp"],
        {
            ATTENTION_SCOPE: -(
                -_visible_pairs(layout, architecture.layer_windows, blocking) // blocking.pairs_per_iteration
            ),
            **_routed_rows(architecture, mesh, int(is_token.sum())),
        },
    )


def _visible_pairs(layout: SegmentLayout, windows: Sequence[int | None], blocking: Blocking) -> int:
    """Returns the mean number of block pairs per layer computed on a device, rounded up to a whole number."""
    num_layers = Counter(windows)
    pairs = make_block_pairs(layout, num_layers, blocking)
    if pairs is None:
        return len(layout.segment_ids)
    return math.ceil(np.average(pairs.num_pairs.sum(axis=1), weights=list(num_layers.values())))


def _routed_rows(architecture: Architecture, mesh: Mesh, num_tokens: int) -> dict[str, int]:
    if architecture.num_experts is None:
        return {}
    return {ROUTED_ROWS: num_tokens * architecture.experts_per_token // mesh.shape["tp"]}


def _by_device(
    mesh: Mesh, layout: SegmentLayout, targets: Bool[np.ndarray, "R C"]
) -> list[tuple[SegmentLayout, Int32[np.ndarray, "r C"]]]:
    num_devices = num_local_row_shards(mesh)
    parts = [np.split(x, num_devices) for x in (*layout, targets)]
    return [(SegmentLayout(*part[:3]), part[3]) for part in zip(*parts, strict=True)]
