"""Tests that adapters compute what merged kernels compute, and that new adapters change nothing."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.model.architecture import Architecture
from app.model.decode_weights import DecodeConversion
from app.model.decoder import DecoderDefinition, Params, flatten_by_path
from app.model.lora import LORA_A, LORA_B, LoRAConfig, combine_params, init_adapters, merge_adapters
from app.model.segment_layout import single_segment_layout
from settings.schema.model import PROJECTIONS
from tests.tiny import BIASED, EVEN, ODD, SWITCHED, make_mesh, random_params

FLOAT32 = jnp.dtype("float32")
EVERYWHERE = LoRAConfig(3, 6.0, PROJECTIONS)
SOME = LoRAConfig(2, 1.0, ("q_proj", "o_proj", "down_proj"))


def adapted(architecture: Architecture, lora: LoRAConfig) -> tuple[DecoderDefinition, DecoderDefinition]:
    return DecoderDefinition.create(architecture, lora=lora), DecoderDefinition.create(architecture)


def fresh(definition: DecoderDefinition, *, mesh_shape: tuple[int, int, int] = (1, 1, 1), seed: int = 0) -> Params:
    shardings = definition.trainable(definition.shardings(make_mesh(mesh_shape)))
    return init_adapters(definition.trainable(definition.shapes), shardings, seed=seed)


def logits(definition: DecoderDefinition, params: Params) -> jax.Array:
    def forward(params: Params) -> jax.Array:
        tokens = jnp.arange(14).reshape(2, 7) % definition.architecture.vocab_size
        decoder = definition.bind(params)
        return decoder.head.logits(decoder.hidden(tokens, single_segment_layout(tokens >= 0), dtype=FLOAT32))

    return jax.jit(forward)(params)


@pytest.mark.parametrize(("architecture", "lora"), [(BIASED, SOME), (SWITCHED, EVERYWHERE)], ids=["biased", "switched"])
def test_adapters_give_the_logits_of_merged_kernels(architecture, lora):
    definition, base = adapted(architecture, lora)
    params = random_params(definition)
    plain = merge_adapters(params, lora)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), plain) == jax.tree.map(lambda x: (x.shape, x.dtype), base.shapes)
    ours, expected = logits(definition, params), logits(base, plain)
    without = logits(base, definition.frozen(params))
    np.testing.assert_allclose(ours, expected, atol=1e-5 * float(jnp.abs(expected).max()))
    assert float(jnp.abs(expected - without).max()) > 0.1


def test_each_lora_target_changes_only_its_own_kernel():
    names = dict(zip(PROJECTIONS, ("query", "key", "value", "attention_output", "gate", "up", "down"), strict=True))
    for target, name in names.items():
        lora = LoRAConfig(2, 2.0, (target,))
        definition, _ = adapted(BIASED, lora)
        assert definition.adapter_paths == {("blocks", name, LORA_A), ("blocks", name, LORA_B)}
        params = random_params(definition)
        before, after = flatten_by_path(definition.frozen(params)), flatten_by_path(merge_adapters(params, lora))
        assert [path for path in before if not np.array_equal(before[path], after[path])] == [
            ("blocks", name, "kernel")
        ]


def test_new_adapters_do_not_change_the_output():
    definition, base = adapted(BIASED, EVERYWHERE)
    weights = random_params(base)
    whole = combine_params(fresh(definition), weights)
    np.testing.assert_array_equal(logits(definition, whole), logits(base, weights))
    jax.tree.map(np.testing.assert_array_equal, merge_adapters(whole, EVERYWHERE), weights)


def test_new_adapters_depend_only_on_seed_and_path():
    drawn = flatten_by_path(fresh(adapted(EVEN, EVERYWHERE)[0]))
    two = replace(EVERYWHERE, projections=("v_proj", "o_proj"))
    others = flatten_by_path(fresh(adapted(EVEN, two)[0], mesh_shape=(2, 2, 2)))
    assert others.keys() < drawn.keys() and len(others) == 4
    for path, x in others.items():
        np.testing.assert_array_equal(x, drawn[path])
    other_seed = flatten_by_path(fresh(adapted(EVEN, EVERYWHERE)[0], seed=1))
    downs = [path for path in drawn if path[-1] == LORA_A]
    assert len(downs) == 7
    for path in downs:
        inputs = int(np.prod(drawn[path].shape[1:-1]))
        assert 0.8 * inputs**-0.5 < float(jnp.abs(drawn[path]).max()) <= inputs**-0.5
        assert not np.array_equal(drawn[path], other_seed[path])
    # These adapters have equal shapes but different weights.
    assert not np.array_equal(drawn[("blocks", "gate", LORA_A)], drawn[("blocks", "up", LORA_A)])
    assert all(not np.any(drawn[path]) for path in drawn if path[-1] == LORA_B)


def test_different_lora_configs_have_different_texts():
    assert LoRAConfig(2, 16.0, ("q_proj",)).to_text() == "rank 2, alpha 16, q_proj"
    assert LoRAConfig(2, 16.0000001, ("q_proj",)).to_text() == "rank 2, alpha 16.0000001, q_proj"


def test_decode_weights_equal_kernels_merged_with_adapters():
    definition, base = adapted(EVEN, EVERYWHERE)
    params = random_params(definition)
    plain = jax.tree.leaves(DecodeConversion(base, make_mesh(), FLOAT32)(merge_adapters(params, EVERYWHERE)))
    mesh, merge = make_mesh((1, 2, 2)), functools.partial(merge_adapters, lora=EVERYWHERE)
    convert = DecodeConversion(base, mesh, FLOAT32, merge=merge)
    with jax.set_mesh(mesh):
        found = convert(jax.device_put(params, definition.shardings(mesh)))
    assert len(found.blocks) == EVEN.num_layers
    for ours, expected in zip(jax.tree.leaves(found), plain, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize("remat", ["minimal", "block"])
def test_the_backward_pass_saves_no_intermediate_results_of_adapters(remat):
    def kept_bytes(definition: DecoderDefinition, num_tokens: int) -> int:
        def forward(params: Params, frozen: Params) -> jax.Array:
            tokens = jnp.zeros((1, num_tokens), jnp.int32)
            decoder = definition.bind(combine_params(params, frozen))
            return decoder.hidden(tokens, single_segment_layout(tokens == 0), dtype=FLOAT32, remat=remat)

        parts = definition.trainable(definition.shapes), definition.frozen(definition.shapes)
        pull = jax.eval_shape(lambda p, f: jax.vjp(lambda p: forward(p, f), p)[1], *parts)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))

    # The difference for eight more tokens excludes weights and their gradients.
    with_adapters, without = (kept_bytes(one, 16) - kept_bytes(one, 8) for one in adapted(ODD, EVERYWHERE))
    assert 0 < with_adapters <= without
