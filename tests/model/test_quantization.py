"""Tests of quantized kernels: precision, equality on any mesh, and memory."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import app.model.quantization
from app.mesh.placement import bytes_per_device
from app.model.architecture import Architecture
from app.model.decode_weights import DecodeConversion
from app.model.decoder import DecoderDefinition, Params, Projection, flatten_by_path
from app.model.io.hf_weights import load_weights
from app.model.lora import LoRAConfig, combine_params
from app.model.quantization import CODES, SCALES, KernelQuantizer, check_quantization, check_qwix_installed
from app.model.segment_layout import single_segment_layout
from app.records.versions import NOT_INSTALLED
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from settings.errors import InputError
from settings.schema.model import PROJECTIONS, Quantization
from tests.model.io.test_hf_weights import Held, random_file
from tests.quantized import dequantized, dequantized_params
from tests.tiny import BIASED, EVEN, make_engine, make_mesh, make_prompt, random_params, random_prompts

qwix = pytest.importorskip("qwix", reason="Qwix is not installed: pip install -e '.[qlora]'")

FLOAT32 = jnp.dtype("float32")
WIDE = replace(EVEN, model_dim=128)
"""A model with a width of two tiles."""
LORA = LoRAConfig(3, 6.0, PROJECTIONS)
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
"""Codes of nf4. Source: Dettmers et al. 2023, appendix E."""

EACH = pytest.mark.parametrize("quantization", ["int8", "nf4"])


def loaded(
    architecture: Architecture, quantization: Quantization, mesh_shape: tuple[int, int, int] = (1, 1, 1)
) -> tuple[DecoderDefinition, Params, Params]:
    """Returns a network with quantized random weights, and the original weights."""
    params, tensors = random_file(architecture)
    definition = DecoderDefinition.create(architecture, quantization=quantization)
    return definition, load_weights(definition, Held(tensors), make_mesh(mesh_shape)), params


def nearest_int8(kernel: np.ndarray, inputs: tuple[int, ...]) -> np.ndarray:
    scale = np.abs(kernel).max(axis=inputs, keepdims=True) / 127.5
    return scale * np.clip(np.rint(kernel / scale), -128, 127)


def nearest_nf4(kernel: np.ndarray, axis: int) -> np.ndarray:
    tiles = np.moveaxis(kernel, axis, -1)
    tiles = tiles.reshape(*tiles.shape[:-1], -1, np.gcd(64, kernel.shape[axis]))
    scale = np.abs(tiles).max(axis=-1, keepdims=True)
    codes = np.abs(tiles[..., None] / scale[..., None] - NF4).argmin(axis=-1)
    whole = (scale * NF4[codes]).reshape(np.moveaxis(kernel, axis, -1).shape)
    return np.moveaxis(whole, -1, axis)


@EACH
@pytest.mark.parametrize("architecture", [EVEN, WIDE], ids=["a_tile", "two_tiles"])
def test_each_weight_is_as_near_as_the_nearest_code(architecture: Architecture, quantization: Quantization) -> None:
    definition, params, exact = loaded(architecture, quantization)
    found, exact = flatten_by_path(dequantized_params(definition, params)), flatten_by_path(exact)
    dims = flatten_by_path(definition.unquantized.dims)
    assert found.keys() == exact.keys()
    num_outputs = {"query": 2, "key": 2, "value": 2}
    for path, kernel in exact.items():
        if path[-1] != "kernel":
            np.testing.assert_array_equal(found[path], kernel)
            continue
        kernel = np.asarray(kernel, np.float64)
        inputs = tuple(range(1, kernel.ndim - num_outputs.get(path[-2], 1)))
        axis = dims[path].index("embed")
        nearest = nearest_int8(kernel, inputs) if quantization == "int8" else nearest_nf4(kernel, axis)
        error, least = np.abs(found[path] - kernel), np.abs(nearest - kernel)
        assert (error <= least + 1e-6 * np.abs(kernel).max()).all()
        assert error.max() > 0


@EACH
@pytest.mark.parametrize("mesh_shape", [(1, 8, 1), (2, 2, 2)], ids=str)
def test_codes_are_the_same_on_every_mesh(quantization: Quantization, mesh_shape: tuple[int, int, int]) -> None:
    _, one, _ = loaded(WIDE, quantization)
    definition, split, _ = loaded(WIDE, quantization, mesh_shape)
    jax.tree.map(np.testing.assert_array_equal, split, one)
    shardings = definition.shardings(make_mesh(mesh_shape))
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), split, shardings))


@EACH
def test_a_device_holds_a_byte_for_each_weight_or_half_of_one_and_scales(quantization: Quantization) -> None:
    definition, params, exact = loaded(WIDE, quantization)
    flat, kernels = flatten_by_path(params), [x for path, x in flatten_by_path(exact).items() if path[-1] == "kernel"]
    num_weights = sum(kernel.size for kernel in kernels)
    in_codes = bytes_per_device([x for path, x in flat.items() if path[-1] == CODES])
    in_scales = bytes_per_device([x for path, x in flat.items() if path[-1] == SCALES])
    if quantization == "int8":
        outputs = sum(flat[*path[:-1], SCALES].size for path in flat if path[-1] == CODES)
        assert (in_codes, in_scales) == (num_weights, 4 * outputs) and outputs < num_weights / 32
    else:
        assert (in_codes, in_scales) == (num_weights // 2, 4 * num_weights // 64)
    assert sum(x.nbytes for x in jax.tree.leaves(params)) == bytes_per_device(params)
    assert definition.num_parameters == definition.unquantized.num_parameters


def logits(definition: DecoderDefinition, params: Params, *, dtype: Any = FLOAT32) -> jax.Array:
    def forward(params: Params) -> jax.Array:
        tokens = jnp.arange(28).reshape(4, 7) % definition.architecture.vocab_size
        decoder = definition.bind(params)
        return decoder.head.logits(decoder.hidden(tokens, single_segment_layout(tokens >= 0), dtype=dtype))

    return jax.jit(forward)(params)


@EACH
@pytest.mark.parametrize(
    ("dtype", "mesh_shape", "tolerance"),
    [("float32", (1, 1, 1), 1e-5), ("float32", (2, 2, 2), 1e-5), ("bfloat16", (1, 1, 1), 2e-2)],
    ids=str,
)
def test_a_network_computes_what_its_kernels_in_floats_would(
    quantization: Quantization, dtype: str, mesh_shape: tuple[int, int, int], tolerance: float
) -> None:
    architecture = replace(WIDE, qkv_bias=True, attention_output_bias=True, mlp_bias=True)
    definition, params, exact = loaded(architecture, quantization, mesh_shape)
    of_dtype = jnp.dtype(dtype)
    if quantization == "int8" and dtype == "bfloat16":
        # Codes are exact in bfloat16, where kernels in floats are rounded: only in float32 do the two compute the same.
        of_dtype, tolerance = FLOAT32, 5e-2
    expected = logits(definition.unquantized, dequantized_params(definition, params), dtype=of_dtype)
    with jax.set_mesh(make_mesh(mesh_shape)):
        found = logits(definition, params, dtype=jnp.dtype(dtype))
    np.testing.assert_allclose(found, expected, atol=tolerance * float(jnp.abs(expected).max()))
    assert not np.allclose(found, logits(definition.unquantized, exact), atol=1e-3)


@EACH
@pytest.mark.parametrize("remat", ["none", "minimal", "block"])
def test_the_backward_pass_keeps_no_kernel_in_floats(quantization: Quantization, remat: str) -> None:
    definition = DecoderDefinition.create(WIDE, lora=LORA, quantization=quantization)

    def forward(trained: Params, frozen: Params) -> jax.Array:
        tokens = jnp.zeros((1, 4), jnp.int32)
        return definition.bind(combine_params(trained, frozen)).hidden(
            tokens, single_segment_layout(tokens == 0), dtype=FLOAT32, remat=remat
        )

    parts = definition.trainable(definition.shapes), definition.frozen(definition.shapes)
    pull = jax.eval_shape(lambda trained, frozen: jax.vjp(lambda t: forward(t, frozen), trained)[1], *parts)
    kernels = {x.shape for path, x in flatten_by_path(definition.unquantized.shapes).items() if path[-1] == "kernel"}
    kept = [x for x in jax.tree.leaves(pull) if x.dtype == FLOAT32]
    assert kept and not [x.shape for x in kept if x.shape in kernels]


PAIR = GenerationRequest(rules=SamplingRules(1.0), seed=0, policy_version=0, group_size=2, max_new_tokens=4)


@functools.cache
def compiled(program: str, quantization: Quantization | None, mesh_shape: tuple[int, int, int]) -> tuple[int, int]:
    """Returns the temporary bytes of a rollout program on each device, and the bytes of its share of float kernels."""
    architecture = replace(EVEN, num_layers=6, model_dim=256, mlp_dim=512)
    definition = DecoderDefinition.create(architecture, quantization=quantization)
    engine = make_engine(definition, mesh=make_mesh(mesh_shape))
    slots = engine.of([make_prompt("row", range(4))], PAIR)
    lowered = slots.engine.programs.lower_programs(truncates=False, recomputes=False)
    found: Any = lowered[program].compile().memory_analysis()
    blocks = flatten_by_path(definition.unquantized.shapes["blocks"])
    in_floats = sum(4 * x.size for path, x in blocks.items() if path[-1] == "kernel")
    return found.temp_size_in_bytes, in_floats // mesh_shape[2]


@EACH
@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_no_more_than_some_kernels_are_floats_in_a_rollout(
    quantization: Quantization, mesh_shape: tuple[int, int, int], program: str
) -> None:
    used, in_floats = compiled(program, quantization, mesh_shape)
    without, _ = compiled(program, None, mesh_shape)
    assert used - without <= in_floats / 3


@EACH
@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_samples_are_those_of_the_kernels_in_floats(
    quantization: Quantization, mesh_shape: tuple[int, int, int]
) -> None:
    """The network has adapters that are not merged."""
    base, held, _ = loaded(WIDE, quantization, mesh_shape)
    adapted, mesh = DecoderDefinition.create(WIDE, lora=LORA, quantization=quantization), make_mesh(mesh_shape)
    adapters = adapted.trainable(random_params(adapted.unquantized))
    whole = combine_params(jax.device_put(adapters, adapted.trainable(adapted.shardings(mesh))), held)
    floats = combine_params(adapters, dequantized_params(base, held))
    prompts = random_prompts(2, vocab_size=WIDE.vocab_size)
    both = []
    for definition, params, on in ((adapted, whole, mesh), (adapted.unquantized, floats, make_mesh())):
        engine = make_engine(definition, on)
        both.append(
            engine.generate(
                engine.to_decode_weights(params),
                prompts,
                GenerationRequest(group_size=2, max_new_tokens=6, rules=SamplingRules(1.0), seed=1, policy_version=0),
            )
        )
    for ours, expected in zip(*both, strict=True):
        assert ours.completion == expected.completion
        np.testing.assert_allclose(ours.behavior_logprobs, expected.behavior_logprobs, atol=1e-4)


@EACH
def test_codes_and_scales_decode_as_they_are_in_any_compute_type(quantization: Quantization) -> None:
    definition, params, _ = loaded(WIDE, quantization)
    found = DecodeConversion(definition, make_mesh(), jnp.dtype("bfloat16"))(params)
    stacked = flatten_by_path(params["blocks"])
    for path, x in flatten_by_path(found.blocks[1]).items():
        if path[-1] in (CODES, SCALES):
            assert x.dtype == stacked[path].dtype
            np.testing.assert_array_equal(x, stacked[path][1])
        else:
            assert x.dtype == jnp.bfloat16


@EACH
def test_both_factors_of_each_product_have_the_compute_type(quantization: Quantization) -> None:
    kernel = {"inputs": {"embed": 64}, "outputs": {"mlp": 8}}
    projection = Projection(nnx.Rngs(0), **kernel, bias=False, stack={}, lora=None, quantization=quantization)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(projection(x).astype(jnp.float32))

    text = jax.jit(jax.grad(total)).lower(jnp.ones((1, 2, 64), jnp.bfloat16)).as_text()
    products = [line.rpartition(" : ")[2] for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products and not any("f32" in types for types in products)


@pytest.mark.parametrize("shape", [(64, 4, 48), (4, 16, 64)])
def test_codes_of_8_bits_are_those_of_qwix(shape: tuple[int, ...]) -> None:
    inputs, outputs = (("embed",), ("query_heads", "head")) if shape[0] == 64 else (("query_heads", "head"), ("embed",))
    kernel = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    found = KernelQuantizer("int8", (*inputs, *outputs), outputs).quantize(kernel)
    expected = qwix.quantize(kernel, "int8", channelwise_axes=list(range(len(inputs), 3)), tiled_axes={})
    np.testing.assert_array_equal(found[CODES], expected.qvalue)
    np.testing.assert_array_equal(found[SCALES], expected.scale.reshape(found[SCALES].shape))


def test_two_codes_of_a_byte_are_told_apart() -> None:
    """All sixteen codes are stored, and neighbours differ."""
    held = KernelQuantizer("nf4", ("embed", "mlp"), ("embed", "mlp"))
    kernel = np.tile(NF4, 4)[:, None] * np.array([[1.0, 0.5, 4.0]])
    found = held.quantize(kernel.astype(np.float32))
    assert found[CODES].dtype == np.uint8 and found[CODES].shape == (32, 3)
    np.testing.assert_array_equal(found[CODES][:8, 0], [16 * (2 * i + 1) + 2 * i for i in range(8)])
    np.testing.assert_allclose(dequantized(held, found[CODES], found[SCALES]), kernel, rtol=1e-6)


def test_a_width_that_no_tile_divides_is_refused() -> None:
    with pytest.raises(InputError, match=r"quantize_base: nf4 needs a model width .* got 36; set it to int8"):
        check_quantization("nf4", model_dim=BIASED.model_dim)
    check_quantization("int8", model_dim=BIASED.model_dim)
    check_quantization("nf4", model_dim=48)


@pytest.mark.parametrize(("found", "text"), [(NOT_INSTALLED, "is not installed;"), ("0.0.9", "0.0.9 is installed;")])
def test_without_qwix_the_extra_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch, found: str, text: str) -> None:
    check_qwix_installed()
    monkeypatch.setattr(app.model.quantization, "version_of", lambda name: found)
    with pytest.raises(InputError, match=r"pip install -e '\.\[qlora\]'") as error:
        check_qwix_installed()
    assert text in str(error.value)
