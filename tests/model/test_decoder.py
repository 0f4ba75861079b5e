import contextlib
import functools
import math
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jaxtyping import Array

from app.batching.forward_passes import row_logprobs
from app.batching.token_batch import TokenBatch
from app.mesh.placement import abstract_arrays
from app.model import decoder
from app.model.architecture import Architecture
from app.model.attention.pairs import Blocking
from app.model.decode_weights import DecodeConversion
from app.model.decoder import DecoderDefinition, Params
from app.model.layers import contract_dims, rope_frequencies
from app.model.lora import LoRAConfig, combine_params
from app.model.prefill_and_decode import decode_step, prefill
from app.model.segment_layout import single_segment_layout
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.score.scorer import Scorer
from settings.schema.model import PROJECTIONS
from tests import tiny
from tests.layouts import layout_of

FLOAT32 = jnp.dtype("float32")

# The row has a prompt with three completions, a single sample and padding; its length is odd and exceeds a block.
SHARED = layout_of([[(40, (30, 21, 33)), (9, (14,))]], num_tokens=151)
WINDOWED = replace(tiny.SWITCHED, windows=(35, None, 60))
EVERYTHING = replace(
    WINDOWED,
    **tiny.EXPERTS | {"family": "gemma3_text"},
    tied_embeddings=False,
    qkv_bias=True,
    attention_output_bias=True,
)
"""Architecture with every switch, biases and experts, whose windows are shorter than long rows."""
SWITCHED_EXPERTS = replace(EVERYTHING, windows=tiny.SWITCHED.windows)


def slow_hidden_states(arch: Architecture, params: Params, token_ids: np.ndarray) -> np.ndarray:
    """Computes hidden states in float64, one sequence, head and layer at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    positions = np.arange(len(token_ids))

    def norm(x, weights):
        if weights is None:
            return x
        scale = weights["scale"] + arch.centered_norms
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + arch.norm_epsilon) * scale

    def turn(x, rope):
        angles = positions[:, None] * rope_frequencies(rope, arch.head_dim).astype(np.float64)
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def activate(x):
        if arch.activation == "silu":
            return x / (1 + np.exp(-x))
        return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))

    def mix_experts(token, experts):
        odds = np.exp(experts["router"] @ token)
        chosen = np.argsort(-odds)[: arch.experts_per_token]
        total = odds[chosen].sum() if arch.normalized_routing else odds.sum()
        gate, up, down = (experts[name]["kernel"] for name in ("gate", "up", "down"))
        return sum(odds[e] / total * (activate(token @ gate[e]) * (token @ up[e])) @ down[e] for e in chosen)

    x = params["embedding"][token_ids] * (arch.model_dim**0.5 if arch.scaled_embeddings else 1.0)
    for layer, window in enumerate(arch.layer_windows):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        rope = arch.rope if window is None else arch.windowed_rope or arch.rope
        distance = positions[:, None] - positions[None, :]
        visible = (distance >= 0) & (distance < (window or len(token_ids)))

        def project(name, y, inputs=1, block=block):
            return np.tensordot(y, block[name]["kernel"], axes=inputs) + block[name].get("bias", 0.0)

        y = norm(x, block["attention_norm"])
        query, key, value = (project(name, y) for name in ("query", "key", "value"))
        query, key = norm(query, block.get("query_norm")), norm(key, block.get("key_norm"))
        mixed = np.zeros(query.shape)
        for head in range(arch.num_query_heads):
            shared = head * arch.num_kv_heads // arch.num_query_heads
            scores = turn(query[:, head], rope) @ turn(key[:, shared], rope).T
            scores *= arch.query_scale or arch.head_dim**-0.5
            if arch.attention_soft_cap:
                scores = arch.attention_soft_cap * np.tanh(scores / arch.attention_soft_cap)
            weights = np.where(visible, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
            mixed[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ value[:, shared]
        x = x + norm(project("attention_output", mixed, inputs=2), block.get("attention_post_norm"))
        y = norm(x, block["mlp_norm"])
        if arch.num_experts is None:
            y = project("down", activate(project("gate", y)) * project("up", y))
        else:
            y = np.stack([mix_experts(token, block["experts"]) for token in y])
        x = x + norm(y, block.get("mlp_post_norm"))
    return norm(x, params["final_norm"])


@pytest.mark.parametrize("architecture", [tiny.BIASED, EVERYTHING], ids=["biases", "every-switch-and-experts"])
def test_decoder_on_packed_rows_equals_a_slow_decoder_in_float64(architecture):
    definition = DecoderDefinition.create(architecture)
    params = tiny.random_params(definition)
    token_ids = np.random.default_rng(3).integers(0, architecture.vocab_size, (1, 151))
    run = jax.jit(lambda params: definition.bind(params).hidden(token_ids, SHARED, dtype=FLOAT32)[0])
    packed = np.asarray(run(params))
    assert np.isfinite(packed).all()
    segment_ids, branch_ids, _ = (np.asarray(x)[0] for x in SHARED)
    for segment, branch in ((1, 1), (1, 2), (1, 3), (2, 0)):
        places = np.flatnonzero((segment_ids == segment) & np.isin(branch_ids, (0, branch)))
        alone = slow_hidden_states(architecture, params, token_ids[0, places])
        np.testing.assert_allclose(packed[places], alone, atol=2e-5)


def test_remat_saves_memory_without_changing_gradients():
    definition = DecoderDefinition.create(tiny.BIASED)
    params = tiny.random_params(definition)
    token_ids = np.random.default_rng(4).integers(0, tiny.BIASED.vocab_size, (2, 40)).astype(np.int32)
    weights = np.random.default_rng(5).normal(size=(2, 39)).astype(np.float32)
    layout = single_segment_layout(np.ones(token_ids.shape, bool))
    indices, targets = np.broadcast_to(np.arange(39), (2, 39)), token_ids[:, 1:]
    rows = TokenBatch(token_ids, layout, indices, targets, indices >= 0)

    def compiled(remat: str, dtype: str = "float32") -> Any:
        def loss(params: Params) -> Array:
            how = {"dtype": jnp.dtype(dtype), "remat": remat, "logits_chunk": 10}
            logprobs, *_ = row_logprobs(definition.bind(params), rows, temperature=1.0, **how)
            return jnp.sum(logprobs * weights)

        return jax.jit(jax.value_and_grad(loss)).lower(params).compile()

    kept, *recomputed = programs = [compiled(remat) for remat in ("none", "minimal", "block")]
    for program in recomputed:
        tiny.assert_trees_close(program(params), kept(params))
    temporary_bytes = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert temporary_bytes[1] < 0.8 * temporary_bytes[0]
    assert temporary_bytes[2] < 0.8 * temporary_bytes[1]
    # XLA's CPU compiler would store bfloat16 arrays that are written layer by layer as float32.
    arrays = re.findall(r"(\w+)\[([\d,]+)\]", compiled("minimal", "bfloat16").as_text())
    held = {dtype for dtype, dims in arrays if math.prod(map(int, dims.split(","))) == 2 * 2 * 40 * 44}
    assert "u16" in held and "f32" not in held


TWO_ROWS = jax.tree.map(lambda x: np.tile(x, (2, 1)), layout_of([[(30, (11, 16)), (9, (6,))]], num_tokens=76))
"""Rows of one attention block and a part of another, with a shared prompt and padding."""
NETWORK = DecoderDefinition.create(
    replace(WINDOWED, windows=(20, None, 40)), lora=LoRAConfig(3, 6.0, PROJECTIONS), quantization="int8"
)


def gradient(mesh: Mesh | None = None) -> Any:
    """Returns a loss, hidden states, and the gradient of the adapters of a network with random quantized kernels."""
    rng = np.random.default_rng(7)
    codes = lambda x, of: x if of.dtype == FLOAT32 else rng.integers(-1, 2, of.shape).astype(of.dtype)  # noqa: E731
    params = jax.tree.map(codes, tiny.random_params(NETWORK), NETWORK.shapes)
    token_ids = rng.integers(0, NETWORK.architecture.vocab_size, (2, 76))
    is_token = (TWO_ROWS.segment_ids != 0)[..., None]

    def loss(trained: Params, frozen: Params) -> tuple[Array, Array]:
        network = NETWORK.bind(combine_params(trained, frozen))
        hidden = jnp.where(is_token, network.hidden(token_ids, TWO_ROWS, dtype=FLOAT32, remat="block"), 0.0)
        return jnp.sum(jnp.sin(hidden)), hidden

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        params = params if mesh is None else jax.device_put(params, NETWORK.shardings(mesh))
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(NETWORK.trainable(params), NETWORK.frozen(params))


on_one_device = functools.cache(gradient)


def test_splitting_residuals_by_tokens_over_tp_does_not_change_results():
    tiny.assert_trees_close(gradient(tiny.make_mesh((1, 2, 2))), on_one_device())


@pytest.mark.parametrize(("num_tokens", "kept"), [(40, 10), (41, 41)], ids=["divides", "does-not-divide"])
def test_each_tp_device_keeps_residuals_of_its_share_of_tokens_if_tp_divides_them(num_tokens, kept):
    definition, mesh = DecoderDefinition.create(replace(tiny.EVEN, num_layers=3)), tiny.make_mesh((1, 1, 4))

    def loss(params, token_ids):
        layout = single_segment_layout(jnp.ones(token_ids.shape, bool))
        return jnp.sum(definition.bind(params).hidden(token_ids, layout, dtype=FLOAT32, remat="block"))

    shapes = abstract_arrays(definition.shapes, definition.shardings(mesh)), jnp.zeros((2, num_tokens), jnp.int32)
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text() or ""
    assert set(re.findall(r"f32\[3,2,(\d+),32\]", text)) == {str(kept)}


@pytest.mark.usefixtures("interpreted")
def test_the_decoder_with_kernels_equals_the_decoder_in_xla(monkeypatch):
    expected = on_one_device()
    monkeypatch.setattr(decoder, "architecture_blocking", lambda *_: Blocking(16, 1, kernel="tpu"))
    tiny.assert_trees_close(gradient(), expected)


LENGTHS = np.array([1, 5, 4])
"""Lengths of the prompts; every row is decoded up to 9 tokens."""


class Compiled:
    def __init__(self, architecture: Architecture, *, outputs_first: bool = False):
        definition = DecoderDefinition.create(architecture)
        params = tiny.random_params(definition)
        decoding = definition.with_outputs_first() if outputs_first else definition
        self.weights = DecodeConversion(decoding, tiny.make_mesh(), FLOAT32)(params)
        self.prefill = jax.jit(functools.partial(prefill, decoding))
        self.decode_step = jax.jit(functools.partial(decode_step, decoding))
        whole = single_segment_layout(np.ones((3, 9), bool))
        self.expected = np.asarray(
            jax.jit(definition.bind(params).hidden, static_argnames="dtype")(token_ids(), whole, dtype=FLOAT32)
        )


compiled = functools.cache(Compiled)


@functools.cache
def token_ids(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, tiny.ODD.vocab_size, (3, 9)).astype(np.int32)


def right_padded(size: int, filler: int = 0) -> np.ndarray:
    """Returns the prompts, padded on the right with `filler`."""
    rows = np.full((3, size), filler, np.int32)
    for row, length in enumerate(LENGTHS):
        rows[row, :length] = token_ids()[row, :length]
    return rows


def grown(cache, size: int, filler: float = 0.0):
    """Returns the cache with `size` tokens, whose new entries are arbitrary."""
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2]), (0, 0)), constant_values=filler)  # noqa: E731
    return jax.tree.map(pad, cache)


@pytest.mark.parametrize("outputs_first", [False, True], ids=["inputs-first", "outputs-first"])
@pytest.mark.parametrize("architecture", [tiny.BIASED, SWITCHED_EXPERTS], ids=["biases", "every-switch-and-experts"])
def test_prefill_and_decode_equal_one_forward_pass(architecture, outputs_first):
    model = compiled(architecture, outputs_first=outputs_first)
    expected = model.expected
    hidden, cache, _ = model.prefill(model.weights, right_padded(6), LENGTHS)
    np.testing.assert_allclose(hidden, expected[np.arange(3), LENGTHS - 1], atol=2e-5)
    cache = grown(cache, 12, filler=100.0)
    for step in range(9 - LENGTHS.max()):
        positions = LENGTHS + step
        hidden, cache, _ = model.decode_step(
            *(model.weights, cache, token_ids()[np.arange(3), positions], positions.astype(np.int32), np.ones(3, bool)),
            np.arange(3, dtype=np.int32)[:, None],
        )
        np.testing.assert_allclose(hidden, expected[np.arange(3), positions], atol=2e-5)


def test_prefill_ignores_padding_and_accepts_empty_prompts():
    model = compiled(SWITCHED_EXPERTS)
    empty = model.prefill(model.weights, right_padded(6), np.zeros(3, np.int32))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(empty[:2]))
    plain, plain_cache, _ = model.prefill(model.weights, right_padded(6), LENGTHS)
    other, other_cache, _ = model.prefill(model.weights, right_padded(11, filler=7), LENGTHS)
    np.testing.assert_allclose(other, plain, atol=1e-6)
    for row, length in enumerate(LENGTHS):
        head = lambda x, row=row, length=length: x[row, :, :length]  # noqa: E731
        close = functools.partial(np.testing.assert_allclose, atol=1e-6)
        jax.tree.map(close, jax.tree.map(head, other_cache), jax.tree.map(head, plain_cache))


def test_decode_weights_exist_once_in_the_compute_dtype():
    definition = DecoderDefinition.create(tiny.ODD)
    convert = DecodeConversion(definition, tiny.make_mesh(), jnp.dtype("bfloat16"))
    weights = convert(tiny.random_params(definition))
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == definition.num_parameters


def test_bfloat16_matmuls_on_a_cpu_have_float32_results_and_correct_gradients():
    rng = np.random.default_rng(0)
    x, matrix = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((3, 5, 2, 8), (2, 8, 6)))

    def total(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return jnp.square(contract_dims(x, matrix, num_dims=2).astype(jnp.float32)).sum()

    gradient = jax.value_and_grad(total, argnums=(0, 1))
    products = re.findall(
        r"dot_general.*?: \((.*?)\) -> tensor<.*x(\w+)>", jax.jit(gradient).lower(x, matrix).as_text()
    )
    assert [out for _, out in products] == ["f32"] * 3 and not any("f32" in operands for operands, _ in products)
    found, exact = gradient(x, matrix), gradient(x.astype(jnp.float32), matrix.astype(jnp.float32))
    for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(np.float32(ours), expected, atol=0.01 * np.abs(expected).max())


@pytest.mark.parametrize("outputs_first", [False, True], ids=["inputs-first", "outputs-first"])
def test_sampler_and_scorer_in_bfloat16_agree_and_stay_near_float32(outputs_first):
    definition = DecoderDefinition.create(tiny.SWITCHED)
    params = tiny.random_params(definition)
    prompts = tiny.random_prompts(6, vocab_size=tiny.SWITCHED.vocab_size)
    decoding = definition.with_outputs_first() if outputs_first else definition
    engine = tiny.TinyEngine(decoding, dtype=jnp.dtype("bfloat16"))
    rules = {"rules": SamplingRules(temperature=1.0), "seed": 0, "policy_version": 0}
    request = GenerationRequest(group_size=2, max_new_tokens=20, **rules)
    samples = engine.generate(engine.to_decode_weights(params), prompts, request)
    sampled = np.concatenate([sample.behavior_logprobs for sample in samples])

    def scored(dtype: str) -> np.ndarray:
        scorer = Scorer(definition, tiny.make_mesh(), dtype=jnp.dtype(dtype), logits_chunk=8)
        plan = tiny.packed_plan(samples, quota=256, row_length=128, share_prompts=True)
        return np.concatenate(scorer.per_token(params, samples, plan, temperature=1.0))

    in_bfloat16, in_float32 = scored("bfloat16"), scored("float32")
    assert in_float32.std() > 0.5
    # bfloat16 keeps 8 bits: about 0.4 % of a unit at each of some twenty roundings.
    assert np.abs(in_bfloat16 - in_float32).max() < 0.2
    assert np.abs(in_bfloat16 - in_float32).mean() < 0.04
    assert 0 < np.abs(sampled - in_bfloat16).max() < 0.1
    assert np.abs(sampled - in_bfloat16).mean() < 0.02
