"""Updates whose moments are in host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from app.mesh.axis_rules import AXES
from app.mesh.chips import parse_slice
from app.mesh.devices import compile_only_devices, program_memory_bytes
from app.mesh.placement import HOST_MEMORY, abstract_arrays, bytes_per_device
from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition
from app.model.lora import LoRAConfig
from app.update.optimizer import (
    TrainState,
    init_train_state,
    make_optimizer,
    make_schedule,
    train_state_shardings,
    update_at_once,
    update_by_layer,
)
from app.update.policy_loss import LossStats
from app.update.step import POLICY_METRICS, AccumulatedGradients, apply_gradients
from settings.schema.algorithm import OptimizerSettings
from tests.tiny import EVEN, EXPERTS, ODD, assert_trees_close, make_mesh, random_params

DEEP = replace(ODD, num_layers=3)
ROUNDED = {"first_moment": "bfloat16", "second_moment": "bfloat16"}
ADAPTERS = LoRAConfig(2, 4.0, ("q_proj", "down_proj"))


class Update:
    """The program of an update, and the layout of its state."""

    def __init__(self, definition: DecoderDefinition, mesh: Mesh, *, offload: bool, **settings: Any):
        chosen = OptimizerSettings(learning_rate=0.01, **settings)
        schedule = make_schedule(chosen, num_updates=4)
        self.optimizer = make_optimizer(chosen, schedule)
        shapes, shardings = map(definition.trainable, (definition.shapes, definition.shardings(mesh)))
        self.layout = train_state_shardings(self.optimizer, shapes, shardings, mesh, offload=offload)

        run_update = update_by_layer if offload else update_at_once

        def apply(state: TrainState, gradients: Any) -> tuple[TrainState, dict[str, Any]]:
            total = AccumulatedGradients(gradients, LossStats({"loss": jnp.float32(1)}, {}))
            return apply_gradients(state, total, self.optimizer, schedule, POLICY_METRICS, run_update=run_update)

        self.program = jax.jit(apply, donate_argnums=0, out_shardings=(self.layout, None))


def memory_kinds(state: TrainState) -> set[tuple[bool, str]]:
    """Returns (whether it is a moment, kind of memory) of every array."""
    arrays = jax.tree.leaves_with_path(state)
    is_moment = lambda keys: any(getattr(key, "name", "") in ("mu", "nu") for key in keys)  # noqa: E731
    return {(is_moment(keys), x.sharding.memory_kind) for keys, x in arrays}


def updated(
    definition: DecoderDefinition,
    shape: tuple[int, int, int],
    *,
    offload: bool,
    spoiled: int,
    **types: Any,
) -> tuple[TrainState, list[dict[str, float]]]:
    """Returns the state after 4 updates, and their metrics; some gradients are clipped, and one is not finite."""
    run = Update(definition, make_mesh(shape), offload=offload, weight_decay=0.1, beta2=0.9, warmup_steps=2, **types)
    weights = jax.device_put(definition.trainable(random_params(definition)), run.layout.params)
    state, metrics = init_train_state(run.optimizer, weights, run.layout), []
    for i in range(4):
        rng = np.random.default_rng(i)
        gradients = jax.tree.map(lambda x, rng=rng, i=i: np.float32(rng.normal(size=x.shape) * 0.1**i), weights)
        if i == spoiled:
            gradients = jax.tree.map(lambda x: x * np.float32(np.nan), gradients)
        state, measured = run.program(state, jax.device_put(gradients, run.layout.params))
        metrics.append({name: float(value) for name, value in measured.items()})
    assert memory_kinds(state) == {(False, "device"), (True, HOST_MEMORY if offload else "device")}
    return jax.tree.map(np.asarray, state), metrics


@pytest.mark.parametrize(
    ("architecture", "lora", "shape", "types"),
    [
        (DEEP, None, (1, 1, 1), {}),
        (EVEN, None, (1, 2, 2), ROUNDED),
        (replace(EVEN, **EXPERTS), None, (1, 2, 2), {}),
        (DEEP, ADAPTERS, (1, 1, 1), ROUNDED),
    ],
    ids=["one-device", "all-axes", "experts", "adapters"],
)
def test_moments_in_host_memory_change_no_update(
    architecture: Architecture, lora: LoRAConfig | None, shape: tuple[int, int, int], types: dict[str, str]
) -> None:
    definition = DecoderDefinition.create(architecture, lora=lora)
    here, expected = updated(definition, shape, offload=False, spoiled=1, **types)
    away, metrics = updated(definition, shape, offload=True, spoiled=1, **types)
    assert [one["policy/nonfinite_updates"] for one in metrics] == [0, 1, 1, 1]
    assert [one["policy/grad_norm"] > 1 for one in (*metrics[:1], *metrics[2:])].count(True) in (1, 2)
    np.testing.assert_equal(metrics, expected)
    jax.tree.map(np.testing.assert_array_equal, away.optimizer, here.optimizer)
    counts = [int(value) for path, value in optax.tree.get_all_with_path(away.optimizer, "count")]
    assert (int(away.num_updates), set(counts)) == (3, {3})
    # XLA may add a product to a weight in one rounding or in two, depending on the loop around it.
    assert_trees_close(away.params, here.params, tolerance=3e-7)


@pytest.mark.parametrize("slice", ["v5e-8", pytest.param("v6e-8", marks=pytest.mark.slow)])
def test_a_tpu_holds_the_moments_of_one_layer_at_a_time(slice: str) -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")
    sizes = {"model_dim": 512, "mlp_dim": 4096, "vocab_size": 1024, "num_layers": 16}
    definition = DecoderDefinition.create(replace(EVEN, **sizes))
    mesh = Mesh(np.array(compile_only_devices(parse_slice(slice))).reshape(1, 4, 2), AXES)
    found = {}
    for offload in (False, True):
        run = Update(definition, mesh, offload=offload)
        params = abstract_arrays(definition.shapes, run.layout.params)
        optimizer = abstract_arrays(jax.eval_shape(run.optimizer.init, params), run.layout.optimizer)
        counter: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=run.layout.num_updates)
        program = run.program.lower(TrainState(params, optimizer, counter, counter, counter), params).compile()
        found[offload] = program_memory_bytes(program)
        weights = bytes_per_device(params)
    # Weights, gradients and two moments; moments of a layer are there twice, and those of the next, before and after.
    assert found[False] == pytest.approx(4 * weights, rel=0.05)
    assert found[True] < (2 + 2 * 4 / 16) * weights
