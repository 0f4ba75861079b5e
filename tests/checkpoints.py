"""Makes checkpoints of a small state whose arrays identify their step."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from app.checkpoint.checkpoints import Checkpoints, check_fingerprints
from app.checkpoint.retention import LatestAndBestPolicy
from app.checkpoint.train_progress import NetworkStates, TrainProgress
from app.mesh.placement import abstract_arrays
from app.update.optimizer import TrainState
from tests.tiny import make_mesh

FINGERPRINTS = {"model": "m", "tokenizer": "t", "data": "d"}


def empty_state() -> dict[str, TrainState]:
    params = {"kernel": jnp.zeros((8, 512)), "scale": jnp.zeros(8)}
    return {"policy": TrainState(params, optax.adam(1e-3).init(params), *[jnp.zeros((), jnp.int32)] * 3)}


SHAPES = jax.eval_shape(empty_state)


def make_state(seed: int, num_devices: int = 1) -> dict[str, TrainState]:
    """Returns a state, split over the devices, in which every array differs from that of another seed."""
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda x: (seed + rng.normal(size=x.shape)).astype(x.dtype), SHAPES)
    return jax.device_put(state, shardings(num_devices))


def shardings(num_devices: int) -> dict[str, TrainState]:
    mesh = make_mesh((1, num_devices, 1))
    return jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec("fsdp") if x.ndim else PartitionSpec()), SHAPES)


def opened(folder: Path, *, keep: int = 3, num_devices: int = 1, best: str | None = None) -> Checkpoints:
    policy = LatestAndBestPolicy(keep, best)
    return Checkpoints(folder, policy=policy, layout=abstract_arrays(SHAPES, shardings(num_devices)))


def progress(step: int, accuracy: float | None = None) -> TrainProgress:
    evaluation = None if accuracy is None else {"eval/accuracy": accuracy}
    return TrainProgress(step=step, position=4 * step, fingerprints=FINGERPRINTS, wandb_id="w", evaluation=evaluation)


def write(folder: Path, *steps: int, keep: int = 3, num_devices: int = 1) -> None:
    checkpoints = opened(folder, keep=keep, num_devices=num_devices)
    for step in steps:
        checkpoints.save(make_state(step, num_devices), progress(step))
    checkpoints.finish()
    checkpoints.close()


def write_evaluated(folder: Path, accuracies: dict[int, float | None], *, keep: int = 1) -> None:
    """Writes checkpoints one after another in one process; those with an accuracy were evaluated."""
    checkpoints = opened(folder, keep=keep, best="eval/accuracy")
    for step, accuracy in accuracies.items():
        checkpoints.save(make_state(step), progress(step, accuracy))
    checkpoints.finish()
    checkpoints.close()


def steps_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_same(state: NetworkStates, expected: NetworkStates) -> None:
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, wanted)
        assert leaf.dtype == wanted.dtype


def of_this_run(saved: TrainProgress) -> None:
    check_fingerprints(saved.fingerprints, FINGERPRINTS)


def restored(checkpoints: Checkpoints) -> tuple[NetworkStates, TrainProgress]:
    found = checkpoints.restore(of_this_run)
    assert found is not None
    return found
