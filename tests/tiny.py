"""Makes tiny models, meshes and samples for tests, without reading from disk."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, RowShape, TokenBudget, plan_token_budget
from app.batching.micro_batcher import sequence_lengths
from app.mesh.axis_rules import AXES
from app.model.architecture import Architecture, RopeConfig
from app.model.decode_weights import DecodeConversion, DecodeWeights
from app.model.decoder import DecoderDefinition, Params
from app.model.kv_cache import num_cache_shards
from app.records.sample import Prompt, Sample
from app.rollout.engine.continuous_batching import ContinuousBatchGenerator
from app.rollout.engine.engine import SlotEngine
from app.rollout.engine.shapes import make_slot_shapes
from app.rollout.request import GenerationRequest
from app.update.loss_aggregation import AggregationFn, StepTotals, token_mean
from app.update.policy_loss import PolicyBatch, PolicyLoss, clipped_surrogate
from app.update.updater import PolicyBatchPacker
from settings.schema.rollout import SegmentSettings

ODD = Architecture(
    family="llama",
    vocab_size=53,
    num_layers=2,
    model_dim=36,
    mlp_dim=44,
    num_query_heads=6,
    num_kv_heads=3,
    head_dim=10,
    rope=RopeConfig(theta=10_000.0),
    norm_epsilon=1e-5,
    max_positions=4096,
    tied_embeddings=True,
    qkv_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
)
"""A model whose sizes are not powers of two, and whose head_dim is not model_dim / heads."""

BIASED = replace(ODD, tied_embeddings=False, qkv_bias=True, attention_output_bias=True, mlp_bias=True)

SWITCHES: dict[str, Any] = {
    "family": "gemma3_text",
    "query_scale": 0.4,
    "attention_soft_cap": 2.0,
    "logit_soft_cap": 5.0,
    "query_key_norms": True,
    "post_norms": True,
    "centered_norms": True,
    "activation": "gelu_tanh",
    "scaled_embeddings": True,
    "windowed_rope": RopeConfig(theta=50.0),
}
"""All differences from Llama, except `windows`, which depend on the number of layers."""

SWITCHED = replace(ODD, num_layers=3, windows=(3, None, 4), **SWITCHES)

EXPERTS: dict[str, Any] = {
    "family": "qwen3_moe",
    "mlp_dim": 14,
    "num_experts": 8,
    "experts_per_token": 3,
    "normalized_routing": True,
    "query_key_norms": True,
}
"""All differences of a mixture of experts from Llama."""

MIXTURE = replace(ODD, **EXPERTS)

EVEN = replace(ODD, vocab_size=64, model_dim=32, mlp_dim=48, num_query_heads=4, num_kv_heads=2, head_dim=8)
"""A model whose weights can all be split over 8 devices by fsdp, or 2 by tp."""

PLAIN_LOSS = PolicyLoss(
    surrogate=functools.partial(clipped_surrogate, clip_low=0.2, clip_high=0.3),
    kl_estimator=None,
    beta=0.0,
    entropy_coef=0.0,
)
"""The clipped surrogate without penalty or bonus, with its ratio to the scored logprobs."""


def random_params(definition: DecoderDefinition, seed: int = 0) -> Params:
    """Returns weights far larger than initial ones, so that no distribution is nearly uniform and biases matter."""
    rng = np.random.default_rng(seed)
    center_of_scales = 0.0 if definition.architecture.centered_norms else 1.0

    def draw(path: Any, leaf: Any) -> jax.Array:
        center = center_of_scales if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(center, 0.2, leaf.shape).astype(np.float32))

    return jax.tree_util.tree_map_with_path(draw, definition.shapes)


def make_mesh(shape: tuple[int, int, int] = (1, 1, 1)) -> Mesh:
    """Returns a mesh of (dp, fsdp, tp) over the first virtual devices."""
    num_devices = int(np.prod(shape))
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:num_devices])


class TinyEngine:
    """Generates samples, each in a slot of its own, which end only by length unless `eos_ids` are given."""

    def __init__(
        self,
        definition: DecoderDefinition,
        mesh: Mesh | None = None,
        *,
        eos_ids: Sequence[int] = (),
        dtype: DTypeLike = jnp.float32,
        records_routes: bool = False,
        **of_conversion: Any,
    ):
        self.mesh, self.dtype = mesh or make_mesh(), jnp.dtype(dtype)
        self.definition = definition
        self.to_decode_weights = DecodeConversion(definition, self.mesh, self.dtype, **of_conversion)
        self._eos_ids, self._records_routes = eos_ids, records_routes
        self._generators: dict[tuple[int, ...], ContinuousBatchGenerator] = {}

    def generate(self, weights: DecodeWeights, prompts: Sequence[Prompt], request: GenerationRequest) -> list[Sample]:
        return self.of(prompts, request).generate(weights, prompts, request)

    def of(self, prompts: Sequence[Prompt], request: GenerationRequest) -> ContinuousBatchGenerator:
        shards = num_cache_shards(self.mesh, self.definition.architecture.num_kv_heads)
        num_rows = -(-len(prompts) * request.group_size // shards) * shards
        longest = max(len(prompt.token_ids) for prompt in prompts)
        sizes = num_rows, longest, int(np.max(request.max_new_tokens))
        if sizes not in self._generators:
            shapes = make_slot_shapes(
                num_rows,
                max_prompt_length=longest,
                max_new_tokens=sizes[-1],
                prefill_length_min=4,
                segment_max=64,
                exact=False,
                is_tiny=True,
                row_shards=shards,
            )._replace(records_routes=self._records_routes)
            engine = SlotEngine(
                self.definition, self.mesh, shapes, eos_ids=self._eos_ids, dtype=self.dtype, exact=False
            )
            rule = SegmentSettings.model_validate({"min": 1})
            self._generators[sizes] = ContinuousBatchGenerator(
                engine, decode_text=spell, stop_text=spell, segment_rule=rule
            )
        return self._generators[sizes]


def spell(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def make_prompt(uid: str, token_ids: ArrayLike) -> Prompt:
    token_ids = np.asarray(token_ids, np.int32)
    return Prompt(uid, token_ids, spell(token_ids.tolist()), None)


def random_prompts(num_prompts: int, *, vocab_size: int, longest: int = 9, seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [
        make_prompt(f"row-{i}", rng.integers(0, vocab_size, rng.integers(1, longest + 1))) for i in range(num_prompts)
    ]


def make_sample(
    completion_ids: ArrayLike,
    *,
    prompt_ids: ArrayLike = (1, 2),
    group_id: int = 0,
    sample_index: int = 0,
    **fields: Any,
) -> Sample:
    """Returns a sample whose other fields are zeros or empty."""
    ids = np.asarray(completion_ids, np.int32)
    fields.setdefault("behavior_logprobs", np.zeros(len(ids), np.float32))
    return Sample(
        prompt=make_prompt(f"row-{group_id}", prompt_ids),
        sample_index=sample_index,
        group_id=group_id,
        completion_ids=ids,
        completion=spell(ids.tolist()),
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
    """Returns samples with advantages and every kind of logprobs; `with_holes` masks some of their tokens."""
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


def plan_of(
    rows: Sequence[Sequence[int]], *, rows_per_micro_batch: int, num_tokens: int, num_targets: int
) -> MicroBatchPlan:
    """Returns a plan with these rows of sample indices and no shared prompts; empty rows fill the last micro-batch."""
    filled = [tuple((i,) for i in row) for row in rows]
    filled += [()] * (-len(filled) % rows_per_micro_batch)
    shape = RowShape(num_tokens, num_targets)
    return MicroBatchPlan(
        tuple(
            MicroBatch(tuple(filled[first : first + rows_per_micro_batch]), shape)
            for first in range(0, len(filled), rows_per_micro_batch)
        )
    )


def one_a_row(num_samples: int, **sizes: int) -> MicroBatchPlan:
    return plan_of([(i,) for i in range(num_samples)], **sizes)


def packed_plan(samples: Sequence[Sample], *, quota: int, row_length: int, share_prompts: bool) -> MicroBatchPlan:
    budget = TokenBudget(quota, row_length, share_prompts, balance=True)
    return plan_token_budget(sequence_lengths(samples), budget, lambda lengths: lengths**2, num_devices=1)


def pack_update(
    samples: Sequence[Sample], plan: MicroBatchPlan, *, weights: AggregationFn = token_mean
) -> list[PolicyBatch]:
    """Returns numpy micro-batches of an optimizer step, with the logprobs of policy and reference if there are any."""
    roles: list[Any] = [one for one in ("policy", "reference") if getattr(samples[0], f"{one}_logprobs") is not None]
    pack = PolicyBatchPacker(weights, roles, needs_sample_reducer=True, measures_mismatch="policy" not in roles)
    totals = StepTotals.from_samples(samples)
    return [pack(samples, micro_batch, totals) for micro_batch in plan.micro_batches]


def assert_trees_close(ours: Any, expected: Any, *, tolerance: float = 1e-5) -> None:
    """Asserts equal structure, and that every array is within `tolerance` of the other's largest entry."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(np.abs(b).max(initial=0.0))),
        ours,
        expected,
    )
