"""Tiny models, meshes and samples that tests share. Nothing here is read from disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from app.flow import Prompt, Sample
from app.mesh.axis_rules import AXES
from app.policy.architecture import Architecture, Rope
from app.policy.decoder import DecoderDefinition, Params
from app.rollout.engine import Engine

ODD = Architecture(
    family="llama",
    vocab_size=53,
    num_layers=2,
    model_dim=36,
    mlp_dim=44,
    num_query_heads=6,
    num_kv_heads=3,
    head_dim=10,
    rope=Rope(theta=10_000.0),
    norm_epsilon=1e-5,
    max_positions=4096,
    tied_embeddings=True,
    qkv_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
)
"""No size is a power of two and head_dim is not model_dim / heads."""

BIASED = replace(ODD, tied_embeddings=False, qkv_bias=True, attention_output_bias=True, mlp_bias=True)

EVEN = replace(ODD, vocab_size=64, model_dim=32, mlp_dim=48, num_query_heads=4, num_kv_heads=2, head_dim=8)
"""Every weight can be split over 8 devices along fsdp, or 2 along tp."""


def random_params(definition: DecoderDefinition, seed: int = 0) -> Params:
    """Weights far larger than a fresh model's, so that no distribution is close to uniform and every bias counts."""
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(
            rng.normal(float(path[-1].key == "scale"), 0.2, leaf.shape).astype(np.float32)
        ),
        definition.shapes,
    )


def make_mesh(shape: tuple[int, int, int] = (1, 1, 1)) -> Mesh:
    """dp, fsdp, tp over the first virtual devices."""
    num_devices = int(np.prod(shape))
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:num_devices])


def make_engine(definition: DecoderDefinition, mesh: Mesh | None = None, **changes: Any) -> Engine:
    """Completions end only by length unless `eos_ids` are given."""
    settings = {"eos_ids": (), "decode_text": spell, "dtype": jnp.dtype("float32"), "prefill_length_min": 4}
    return Engine(definition, mesh or make_mesh(), **(settings | changes))


def spell(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def make_prompt(uid: str, token_ids: Sequence[int]) -> Prompt:
    return Prompt(uid, np.asarray(token_ids, np.int32), spell(token_ids), None)


def random_prompts(num_prompts: int, *, vocab_size: int, longest: int = 9, seed: int = 0) -> list[Prompt]:
    """Of 1 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    return [
        make_prompt(f"row-{i}", rng.integers(0, vocab_size, rng.integers(1, longest + 1)))
        for i in range(num_prompts)
    ]


def make_sample(
    completion_ids: Sequence[int],
    *,
    prompt_ids: Sequence[int] = (1, 2),
    group_id: int = 0,
    sample_index: int = 0,
    **fields: Any,
) -> Sample:
    """Fields that are not given hold what the sampler would not write: zeros or nothing."""
    completion_ids = np.asarray(completion_ids, np.int32)
    fields.setdefault("behavior_logprobs", np.zeros(len(completion_ids), np.float32))
    return Sample(
        prompt=make_prompt(f"row-{group_id}", prompt_ids),
        sample_index=sample_index,
        group_id=group_id,
        completion_ids=completion_ids,
        completion=spell(completion_ids.tolist()),
        finish_reason="length",
        policy_version=0,
        **fields,
    )


def random_samples(
    num_groups: int,
    group_size: int,
    *,
    vocab_size: int,
    longest_prompt: int = 7,
    longest_completion: int = 9,
    with_holes: bool = False,
    seed: int = 0,
) -> list[Sample]:
    """Credited samples with every kind of logprobs filled in; `with_holes` masks some of their tokens."""
    rng = np.random.default_rng(seed)

    def logprobs(length: int) -> np.ndarray:
        return -rng.exponential(2.0, length).astype(np.float32)

    samples = []
    for group in range(num_groups):
        prompt_ids = rng.integers(0, vocab_size, rng.integers(1, longest_prompt + 1))
        for index in range(group_size):
            length = int(rng.integers(1, longest_completion + 1))
            mask = rng.random(length) < 0.7 if with_holes else np.ones(length, bool)
            samples.append(
                make_sample(
                    rng.integers(0, vocab_size, length),
                    prompt_ids=prompt_ids,
                    group_id=group,
                    sample_index=index,
                    behavior_logprobs=logprobs(length),
                    policy_logprobs=logprobs(length),
                    reference_logprobs=logprobs(length),
                    loss_mask=mask if with_holes else None,
                    reward=float(rng.normal()),
                    advantages=np.where(mask, np.float32(rng.normal()), np.float32(0)),
                )
            )
    return samples
