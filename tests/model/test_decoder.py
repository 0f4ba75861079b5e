from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from app.batching.forward_passes import row_logprobs
from app.batching.token_batch import TokenBatch
from app.mesh.placement import abstract_arrays
from app.model import decoder
from app.model.architecture import Architecture
from app.model.attention.pairs import Blocking
from app.model.decoder import DecoderDefinition, Params, ValueDecoder
from app.model.layers import rope_frequencies
from app.model.lora import LoRAConfig, combine_params
from app.model.segment_layout import SegmentLayout, single_segment_layout
from settings.schema.model import PROJECTIONS
from tests.layouts import layout_of
from tests.tiny import BIASED, EVEN, MIXTURE, ODD, SWITCHED, assert_trees_close, make_mesh, random_params

ARCHITECTURES = pytest.mark.parametrize(
    "architecture", [ODD, BIASED, SWITCHED, MIXTURE], ids=["tied", "untied-biases", "every-switch", "experts"]
)
FLOAT32 = jnp.dtype("float32")


@functools.cache
def hidden_function(architecture: Architecture, remat: str = "none"):
    definition = DecoderDefinition.create(architecture)
    return jax.jit(lambda params, *rows: definition.bind(params).hidden(*rows, dtype=FLOAT32, remat=remat))


def hidden_states(architecture: Architecture, params: Params, token_ids, layout: SegmentLayout | None = None):
    token_ids = np.atleast_2d(token_ids)
    layout = layout or single_segment_layout(np.ones(token_ids.shape, bool))
    return np.asarray(hidden_function(architecture)(params, token_ids, layout))


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


@ARCHITECTURES
def test_neighbours_in_a_row_and_padding_change_nothing(architecture):
    params = random_params(DecoderDefinition.create(architecture))
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, architecture.vocab_size, length) for length in (3, 5, 2)]
    row = np.concatenate([*sequences, [7, 7]])
    positions = np.concatenate([*(np.arange(len(s)) for s in sequences), [0, 0]])
    segment_ids = np.concatenate([*(np.full(len(s), i) for i, s in enumerate(sequences, start=1)), [0, 0]])
    layout = SegmentLayout(segment_ids[None], np.zeros((1, len(row)), np.int32), positions[None])
    packed = hidden_states(architecture, params, row, layout)[0]
    start = 0
    for sequence in sequences:
        alone = slow_hidden_states(architecture, params, sequence)
        np.testing.assert_allclose(packed[start : start + len(sequence)], alone, atol=2e-5)
        start += len(sequence)
    assert np.isfinite(packed).all()


def test_recomputing_changes_neither_logprobs_nor_gradients_and_saves_memory():
    definition = DecoderDefinition.create(BIASED)
    params = random_params(definition)
    token_ids = np.random.default_rng(4).integers(0, BIASED.vocab_size, (2, 40)).astype(np.int32)
    weights = np.random.default_rng(5).normal(size=(2, 39)).astype(np.float32)
    segments, branches, positions = single_segment_layout(np.ones(token_ids.shape, bool))
    indices, targets = np.broadcast_to(np.arange(39), (2, 39)), token_ids[:, 1:]
    rows = TokenBatch(token_ids, positions, segments, branches, indices, targets, indices >= 0)

    def compiled(remat: str) -> Any:
        def loss(params: Params) -> Array:
            how = {"dtype": jnp.dtype("float32"), "remat": remat, "logits_chunk": 10}
            logprobs, *_ = row_logprobs(definition.bind(params), rows, temperature=1.0, **how)
            return jnp.sum(logprobs * weights)

        return jax.jit(jax.value_and_grad(loss)).lower(params).compile()

    kept, minimal, block = programs = [compiled(remat) for remat in ("none", "minimal", "block")]
    for recomputed in (minimal, block):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(a).max()),
            kept(params),
            recomputed(params),
        )
    temporary_bytes = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert temporary_bytes[1] < 0.8 * temporary_bytes[0]
    assert temporary_bytes[2] < 0.8 * temporary_bytes[1]


@ARCHITECTURES
def test_weights_held_in_the_compute_type_give_the_logprobs_of_those_in_float32(architecture):
    definition, dtype = DecoderDefinition.create(architecture), jnp.dtype("bfloat16")
    params = random_params(definition)
    held = jax.tree.map(lambda leaf, x: x.astype(leaf.dtype), definition.held_in(dtype).shapes, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(held)} == {dtype}
    token_ids = np.random.default_rng(7).integers(0, architecture.vocab_size, (1, 151))
    segments, branches, positions = SHARED
    indices, targets = np.arange(150)[None], token_ids[:, 1:]
    rows = TokenBatch(token_ids, positions, segments, branches, indices, targets, indices >= 0)
    how: Any = {"temperature": 0.7, "dtype": dtype, "remat": "none", "logits_chunk": 40}
    logprobs = jax.jit(lambda params: row_logprobs(definition.bind(params), rows, **how)[0])
    np.testing.assert_array_equal(logprobs(held), logprobs(params))


def test_parameters_are_counted_by_hand():
    attention = 36 * 60 + 2 * 36 * 30 + 60 * 36
    mlp = 3 * 36 * 44
    norms = 2 * 36
    assert DecoderDefinition.create(ODD).num_parameters == 53 * 36 + 2 * (attention + mlp + norms) + 36
    biases = 60 + 2 * 30 + 36 + 2 * 44 + 36
    expected = 2 * 53 * 36 + 2 * (attention + mlp + norms + biases) + 36
    assert DecoderDefinition.create(BIASED).num_parameters == expected
    norms = 4 * 36 + 2 * 10
    expected = 53 * 36 + 3 * (attention + mlp + norms) + 36
    assert DecoderDefinition.create(SWITCHED).num_parameters == expected
    experts, norms = 8 * (3 * 36 * 14 + 36), 2 * 36 + 2 * 10
    expected = 53 * 36 + 2 * (attention + experts + norms) + 36
    assert DecoderDefinition.create(MIXTURE).num_parameters == expected


def test_fresh_weights_follow_the_seed_and_fit_the_definition():
    definition = DecoderDefinition.create(BIASED)
    first, again, other = (definition.initialise(seed) for seed in (0, 0, 1))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), first) == jax.tree.map(
        lambda x: (x.shape, x.dtype), definition.shapes
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embedding"], other["embedding"])
    layers = first["blocks"]["gate"]["kernel"]
    assert not np.array_equal(layers[0], layers[1])
    assert np.std(layers) == pytest.approx(0.02, rel=0.1)


# Of a prompt and three completions, and of a lone sample: longer than a block of attention, and odd.
SHARED = layout_of([[(40, (30, 21, 33)), (9, (14,))]], num_tokens=151)


def lone_rows(token_ids: np.ndarray, layout: SegmentLayout) -> tuple[np.ndarray, SegmentLayout, np.ndarray]:
    """Returns each sample of a row with shared prompts in its own row, and the positions of its tokens in the shared
    row."""
    segment_ids, branch_ids, _ = (np.asarray(x)[0] for x in layout)
    branches = sorted({(s, b) for s, b in zip(segment_ids, branch_ids, strict=True) if s > 0})
    branches = [(s, b) for s, b in branches if b > 0 or (s, 1) not in branches]
    places = [np.flatnonzero((segment_ids == s) & np.isin(branch_ids, (0, b))) for s, b in branches]
    at = np.full((len(places), 80), -1)
    for row, place in enumerate(places):
        at[row, : len(place)] = place
    return token_ids[0, np.maximum(at, 0)], single_segment_layout(jnp.asarray(at >= 0)), at


def test_completions_behind_a_shared_prompt_are_what_they_are_alone():
    architecture = replace(SWITCHED, windows=(35, None, 60))
    params = random_params(DecoderDefinition.create(architecture))
    token_ids = np.random.default_rng(3).integers(0, architecture.vocab_size, (1, 151))
    alone_ids, alone_layout, at = lone_rows(token_ids, SHARED)
    assert at.shape[0] == 4
    shared = hidden_states(architecture, params, token_ids, SHARED)[0]
    alone = hidden_states(architecture, params, alone_ids, alone_layout)
    np.testing.assert_allclose(shared[at[at >= 0]], alone[at >= 0], atol=2e-5)

    # A prompt's token stands in several lone rows: each is asked for its share.
    cotangents = np.random.default_rng(4).normal(size=shared.shape).astype(np.float32)
    shares = cotangents / np.maximum(np.bincount(at[at >= 0], minlength=151), 1)[:, None]
    cotangents_alone = np.where((at >= 0)[..., None], shares[np.maximum(at, 0)], 0.0)
    cotangents[np.asarray(SHARED.segment_ids)[0] == 0] = 0.0

    def gradient(cotangents, *rows):
        return jax.grad(lambda params: jnp.sum(cotangents * hidden_function(architecture)(params, *rows)))(params)

    assert_trees_close(gradient(cotangents, token_ids, SHARED), gradient(cotangents_alone, alone_ids, alone_layout))


ADAPTERS = LoRAConfig(3, 6.0, PROJECTIONS)
DIVISIBLE = layout_of([[(40, (30, 21, 33)), (9, (14,))]], num_tokens=152)


def drawn(definition: DecoderDefinition) -> Params:
    """Returns random weights; codes of quantized kernels are random, too."""
    rng = np.random.default_rng(7)
    codes = lambda x, of: x if of.dtype == FLOAT32 else jnp.asarray(rng.integers(-1, 2, of.shape), of.dtype)  # noqa: E731
    return jax.tree.map(codes, random_params(definition), definition.shapes)


@pytest.mark.parametrize(
    ("definition", "shape"),
    [
        (DecoderDefinition.create(replace(SWITCHED, windows=(35, None, 60))), (1, 2, 2)),
        (DecoderDefinition.create(replace(EVEN, num_layers=2)), (2, 1, 4)),
        (DecoderDefinition.create(replace(MIXTURE, num_layers=2), ValueDecoder), (1, 4, 2)),
        (DecoderDefinition.create(replace(BIASED, num_layers=2), lora=ADAPTERS), (2, 2, 2)),
        (DecoderDefinition.create(replace(EVEN, num_layers=2), lora=ADAPTERS, quantization="int8"), (2, 2, 2)),
    ],
    ids=["windows", "key-heads-that-do-not-divide", "experts-and-a-value-head", "adapters", "quantized"],
)
def test_residuals_split_over_tp_by_tokens_change_neither_hidden_states_nor_gradients(definition, shape):
    params = drawn(definition)
    token_ids = np.random.default_rng(5).integers(0, definition.architecture.vocab_size, (4, 152))
    layout = jax.tree.map(lambda x: jnp.tile(x, (4, 1)), DIVISIBLE)

    @jax.jit
    def gradient(trained, frozen):
        def loss(trained):
            network = definition.bind(combine_params(trained, frozen))
            hidden = network.hidden(token_ids, layout, dtype=FLOAT32, remat="block")
            return jnp.sum(jnp.sin(hidden)), hidden

        return jax.value_and_grad(loss, has_aux=True)(trained)

    parts = definition.trainable(params), definition.frozen(params)
    mesh = make_mesh(shape)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, definition.shardings(mesh))
        ours = gradient(definition.trainable(placed), definition.frozen(placed))
    assert_trees_close(ours, gradient(*parts))


@pytest.mark.parametrize(("num_tokens", "kept"), [(40, 10), (41, 41)], ids=["divides", "does-not-divide"])
def test_each_device_along_tp_keeps_its_share_of_the_tokens_of_every_layer_if_tp_divides_them(num_tokens, kept):
    definition, mesh = DecoderDefinition.create(replace(EVEN, num_layers=3)), make_mesh((1, 1, 4))

    def loss(params, token_ids):
        layout = single_segment_layout(jnp.ones(token_ids.shape, bool))
        return jnp.sum(definition.bind(params).hidden(token_ids, layout, dtype=FLOAT32, remat="block"))

    shapes = abstract_arrays(definition.shapes, definition.shardings(mesh)), jnp.zeros((2, num_tokens), jnp.int32)
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text() or ""
    assert set(re.findall(r"f32\[3,2,(\d+),32\]", text)) == {str(kept)}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_kernels_give_layers_with_and_without_windows_what_xla_gives_them(platform, monkeypatch):
    architecture = replace(SWITCHED, windows=(20, None, 60))
    params = random_params(DecoderDefinition.create(architecture))
    rows = np.random.default_rng(6).integers(0, architecture.vocab_size, (1, 151)), SHARED
    is_token = (np.asarray(SHARED.segment_ids) != 0)[..., None]

    def gradient() -> Any:
        def loss(params):
            hidden = DecoderDefinition.create(architecture).bind(params).hidden(*rows, dtype=FLOAT32, remat="minimal")
            return jnp.sum(jnp.where(is_token, jnp.sin(hidden), 0.0))

        return jax.jit(jax.value_and_grad(loss))(params)

    expected = gradient()
    monkeypatch.setattr(decoder, "architecture_blocking", lambda *_: Blocking(16, 1, kernel=platform))
    assert_trees_close(gradient(), expected)
