"""Tests that exported tensors equal those from which the parameters were loaded, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from app.export.hf_tensors import HfTensors
from app.model.decoder import DecoderDefinition
from app.model.io.hf_weights import load_weights
from tests.model.io.test_hf_weights import Held, in_hugging_face_names, random_file
from tests.tiny import BIASED, EVEN, MIXTURE, ODD, SWITCHED, make_mesh

ARCHITECTURES = pytest.mark.parametrize(
    "architecture",
    [ODD, BIASED, EVEN, SWITCHED, MIXTURE, replace(MIXTURE, family="mixtral", query_key_norms=False)],
    ids=["odd-tied", "odd-untied-biases", "even-tied", "every-switch", "qwen3_moe", "mixtral"],
)


@pytest.mark.parametrize(
    ("architecture", "mesh_shape"), [(BIASED, (2, 2, 2)), (SWITCHED, (1, 8, 1)), (MIXTURE, (1, 2, 4))]
)
def test_what_lies_on_many_devices_goes_out_bit_for_bit(architecture, mesh_shape):
    _, tensors = random_file(architecture)
    definition = DecoderDefinition.create(architecture)
    out = HfTensors(definition, load_weights(definition, Held(tensors), make_mesh(mesh_shape)))
    assert out.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(out.read(name), tensor, err_msg=name, strict=True)


@ARCHITECTURES
def test_parameters_go_out_under_the_names_of_hugging_face_and_come_back(architecture):
    params, _ = random_file(architecture)
    definition = DecoderDefinition.create(architecture)
    out = HfTensors(definition, params)
    expected = in_hugging_face_names(architecture, params)
    assert set(out.shapes) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(out.read(name), tensor, err_msg=name, strict=True)
    jax.tree.map(np.testing.assert_array_equal, load_weights(definition, out, make_mesh()), params)
