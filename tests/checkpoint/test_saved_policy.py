"""Tests that a saved policy is found by any of its paths and read without the rest of the state."""

import copy
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from app.checkpoint.checkpoints import Checkpoints
from app.checkpoint.retention import LatestAndBestPolicy
from app.checkpoint.saved_policy import PolicyCheckpoint
from app.checkpoint.train_progress import TrainProgress
from app.mesh.placement import abstract_arrays
from app.prompts.tokenizer import Tokenizer
from app.runtime.model_spec import ModelSpec, read_model_spec
from settings import InputError, Settings
from tests.checkpoints import SHAPES, make_state, shardings


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    return read_model_spec(Settings())


def save(run: Path, *steps: int, model: ModelSpec, critic: bool = False, best: int | None = None) -> None:
    fingerprints = {"model": model.files.fingerprint, "tokenizer": model.tokenizer.fingerprint}

    def both(one: Any, other: Any) -> Any:
        return {"policy": one["policy"]} | ({"critic": other["policy"]} if critic else {})

    checkpoints = Checkpoints(
        run / "checkpoints",
        policy=LatestAndBestPolicy(5, "eval/accuracy"),
        layout=abstract_arrays(both(SHAPES, SHAPES), both(shardings(2), shardings(2))),
    )
    for step in steps:
        evaluation = None if best is None else {"eval/accuracy": float(step == best)}
        progress = TrainProgress(step=step, position=step, fingerprints=fingerprints, evaluation=evaluation)
        checkpoints.save(both(make_state(step, 2), make_state(100 + step, 2)), progress)
    checkpoints.finish()
    checkpoints.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: ModelSpec) -> Path:
    """Returns a run with checkpoints of steps 2, 4 and 6, of which 4 is the best; tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    save(folder, 2, 4, 6, model=model, best=4)
    return folder


@pytest.fixture(scope="module")
def with_critic(tmp_path_factory: pytest.TempPathFactory, model: ModelSpec) -> Path:
    """Returns a run with a critic and a checkpoint of step 3, never evaluated; tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    save(folder, 3, model=model, critic=True)
    return folder


def read(path: Path, num_devices: int = 1) -> Any:
    layout = abstract_arrays(SHAPES, shardings(num_devices))
    return PolicyCheckpoint.open(path).restore_params(layout["policy"].params)


def test_a_checkpoint_is_found_by_run_folder_step_or_best_link(run: Path) -> None:
    for name, step in (("", 6), ("checkpoints", 6), ("checkpoints/2", 2), ("checkpoints/best", 4)):
        found = PolicyCheckpoint.open(run / name)
        assert (found.step, found.run.path) == (step, run.resolve())


def assert_same(found: Any, expected: Any, where: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, wanted, sharding in zip(*map(jax.tree.leaves, (found, expected, where)), strict=True):
        np.testing.assert_array_equal(leaf, wanted)
        assert leaf.sharding == sharding


def test_policy_weights_are_read_bit_for_bit_on_any_mesh(run: Path, with_critic: Path) -> None:
    for path, step, num_devices in ((run, 6, 1), (with_critic, 3, 4)):
        where = shardings(num_devices)["policy"].params
        assert_same(read(path, num_devices), make_state(step)["policy"].params, where)


def test_a_folder_without_a_checkpoint_is_refused(run: Path) -> None:
    for path, message in (
        (run / "checkpoints" / "8", "there is no folder"),
        (run / "checkpoints" / "2" / "state", "contains no checkpoint"),
    ):
        with pytest.raises(InputError, match=f"--checkpoint: .*{message}.*give <run>/checkpoints/<step>"):
            PolicyCheckpoint.open(path)


def test_checkpoints_with_flipped_bits_or_a_truncated_record_are_refused(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run / "checkpoints" / "6", tmp_path / "checkpoints" / "6")
    # Flips bits everywhere: the files also contain the moments, which are not read, at unknown places.
    for arrays in (folder / "state").rglob("d/*"):
        content = bytearray(arrays.read_bytes())
        for place in range(0, len(content), 100):
            content[place] ^= 1
        arrays.write_bytes(content)
    with pytest.raises(InputError, match=r"--checkpoint: .*6 is damaged"):
        read(folder)
    os.truncate(folder / "progress" / "metadata", 10)
    with pytest.raises(InputError, match="6 cannot be read as a checkpoint of this program"):
        read(folder)


def no_tokenizer() -> Tokenizer:
    raise InputError("there is no tokenizer")


def test_a_checkpoint_is_refused_with_another_tokenizer(run: Path, model: ModelSpec) -> None:
    saved = PolicyCheckpoint.open(run)
    saved.check_compatible(model)
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.fingerprint = "x"
    with pytest.raises(InputError, match="another tokenizer"):
        saved.check_compatible(replace(model, load_tokenizer=lambda: tokenizer), needs_tokenizer=False)
    without = replace(model, load_tokenizer=no_tokenizer)
    saved.check_compatible(without, needs_tokenizer=False)
    with pytest.raises(InputError, match="there is no tokenizer"):
        saved.check_compatible(without)


def named(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, abstract_arrays(SHAPES, shardings(4))["policy"])


def test_only_requested_and_saved_networks_are_read(run: Path, with_critic: Path) -> None:
    for path, roles, seeds in (
        (run, ("policy", "critic"), {"policy": 6}),
        (with_critic, ("policy",), {"policy": 3}),
        (with_critic, ("policy", "critic"), {"policy": 3, "critic": 103}),
    ):
        found = PolicyCheckpoint.open(path).restore_states(named(*roles))
        assert found.keys() == seeds.keys()
        for name, seed in seeds.items():
            assert_same(found[name], make_state(seed)["policy"], shardings(4)["policy"])


def test_a_checkpoint_without_a_needed_array_is_refused(run: Path) -> None:
    policy = named("policy")["policy"]
    more = replace(policy, params={**policy.params, "extra": policy.num_updates})
    with pytest.raises(InputError, match=r"--checkpoint: .*6 has no array policy/params/extra, because its run"):
        PolicyCheckpoint.open(run).restore_states({"policy": more})
