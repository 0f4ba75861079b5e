"""Tests quantized kernels: precision, equality on any mesh, and memory."""

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
from app.model.quantization import CODES, SCALES, check_quantization, check_qwix_installed
from app.model.segment_layout import single_segment_layout
from app.records.versions import NOT_INSTALLED
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from settings.errors import InputError
from settings.schema.model import PROJECTIONS, Quantization
from tests.model.io.tensors_in_memory import Held, random_file
from tests.quantized import dequantized_params
from tests.tiny import BIASED, EVEN, TinyEngine, make_mesh, make_prompt

pytest.importorskip("qwix", reason="Qwix is not installed: pip install -e '.[qlora]'")

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


@pytest.mark.parametrize(("architecture", "quantization"), [(WIDE, "int8"), (WIDE, "nf4"), (EVEN, "nf4")])
def test_each_quantized_weight_has_the_nearest_code(architecture: Architecture, quantization: Quantization) -> None:
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
def test_int8_takes_a_byte_for_each_weight_and_nf4_half_a_byte(quantization: Quantization) -> None:
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


@pytest.mark.parametrize(
    ("quantization", "dtype", "mesh_shape", "tolerance"),
    [
        *(("int8", "float32", (2, 2, 2), 1e-5), ("nf4", "float32", (2, 2, 2), 1e-5)),
        # Codes of int8 are exact in bfloat16, where kernels in floats are rounded.
        *(("int8", "bfloat16", (1, 1, 1), 5e-2), ("nf4", "bfloat16", (1, 1, 1), 2e-2)),
    ],
)
def test_a_quantized_network_equals_a_network_with_dequantized_kernels(quantization, dtype, mesh_shape, tolerance):
    architecture = replace(WIDE, qkv_bias=True, attention_output_bias=True, mlp_bias=True)
    definition, params, exact = loaded(architecture, quantization, mesh_shape)
    # Codes are equal on every mesh, and sharded like kernels.
    jax.tree.map(np.testing.assert_array_equal, params, loaded(architecture, quantization)[1])
    shardings = definition.shardings(make_mesh(mesh_shape))
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), params, shardings))
    of_dtype = FLOAT32 if quantization == "int8" else jnp.dtype(dtype)
    expected = logits(definition.unquantized, dequantized_params(definition, params), dtype=of_dtype)
    with jax.set_mesh(make_mesh(mesh_shape)):
        found = logits(definition, params, dtype=jnp.dtype(dtype))
    np.testing.assert_allclose(found, expected, atol=tolerance * float(jnp.abs(expected).max()))
    assert not np.allclose(found, logits(definition.unquantized, exact), atol=1e-3)


@pytest.mark.parametrize(("quantization", "remat"), [("int8", "none"), ("nf4", "minimal"), ("int8", "block")])
def test_the_backward_pass_saves_no_dequantized_kernel(quantization: Quantization, remat: str) -> None:
    definition = DecoderDefinition.create(WIDE, lora=LORA, quantization=quantization)

    def forward(trained: Params, frozen: Params) -> jax.Array:
        tokens = jnp.zeros((1, 4), jnp.int32)
        decoder = definition.bind(combine_params(trained, frozen))
        return decoder.hidden(tokens, single_segment_layout(tokens == 0), dtype=FLOAT32, remat=remat)

    parts = definition.trainable(definition.shapes), definition.frozen(definition.shapes)
    pull = jax.eval_shape(lambda trained, frozen: jax.vjp(lambda t: forward(t, frozen), trained)[1], *parts)
    kernels = {x.shape for path, x in flatten_by_path(definition.unquantized.shapes).items() if path[-1] == "kernel"}
    kept = [x for x in jax.tree.leaves(pull) if x.dtype == FLOAT32]
    assert kept and not [x.shape for x in kept if x.shape in kernels]


PAIR = GenerationRequest(rules=SamplingRules(1.0), seed=0, policy_version=0, group_size=2, max_new_tokens=4)


def test_few_kernels_are_dequantized_at_once_while_decoding() -> None:
    architecture = replace(EVEN, num_layers=6, model_dim=256, mlp_dim=512)
    used = []
    for quantization in (None, "int8", "nf4"):
        definition = DecoderDefinition.create(architecture, quantization=quantization)
        slots = TinyEngine(definition).of([make_prompt("row", range(4))], PAIR)
        lowered = slots.engine.programs.lower_programs(truncates=False, recomputes=False)["decode"]
        found: Any = lowered.compile().memory_analysis()
        used.append(found.temp_size_in_bytes)
    blocks = flatten_by_path(DecoderDefinition.create(architecture).shapes["blocks"])
    a_third = sum(4 * x.size for path, x in blocks.items() if path[-1] == "kernel") / 3
    assert max(used[1:]) - used[0] <= a_third


@EACH
def test_decode_weights_keep_the_codes_and_scales_of_quantized_kernels(quantization: Quantization) -> None:
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
def test_both_operands_of_a_quantized_matmul_have_the_compute_dtype(quantization: Quantization) -> None:
    how: Any = {"bias": False, "stack": {}, "lora": None, "quantization": quantization}
    projection = Projection(nnx.Rngs(0), {"embed": 64}, {"mlp": 8}, **how)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(projection(x).astype(jnp.float32))

    text = jax.jit(jax.grad(total)).lower(jnp.ones((1, 2, 64), jnp.bfloat16)).as_text()
    products = [line.rpartition(" : ")[2] for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products and not any("f32" in types.partition("->")[0] for types in products)


def test_nf4_refuses_a_model_width_that_no_tile_divides() -> None:
    with pytest.raises(InputError, match=r"quantize_base: nf4 needs a model width .* got 36; set it to int8"):
        check_quantization("nf4", model_dim=BIASED.model_dim)
    check_quantization("int8", model_dim=BIASED.model_dim)
    check_quantization("nf4", model_dim=48)


def test_error_about_missing_qwix_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_qwix_installed()
    for found, text in ((NOT_INSTALLED, "is not installed;"), ("0.0.9", "0.0.9 is installed;")):
        monkeypatch.setattr(app.model.quantization, "version_of", lambda name, found=found: found)
        with pytest.raises(InputError, match=rf"{text}.*pip install -e '\.\[qlora\]'"):
            check_qwix_installed()
