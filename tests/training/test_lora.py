"""Tests of a run with `model.lora`: only adapters are trained, saved and resumed, and the base is the reference."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.checkpoint.saved_policy import PolicyCheckpoint, load_policy_params
from app.checkpoint.train_progress import RunState, TrainProgress
from app.model.architecture import forward_flops, lm_head_flops, token_flops
from app.model.lora import LORA_A, LORA_B, merge_adapters
from app.records.sample import Sample
from app.records.sample_json import sample_from_record
from app.tracking.performance import make_step_flops
from app.training.initial_state import load_reference_params
from app.training.learner import LearnerGroup
from app.training.setup import RunSetup, prepare_run
from settings import InputError, load
from tests.program import (
    digest_of,
    here,
    metrics_of,
    of_tiny,
    records_of,
    saved_state,
    settings,
    train_here,
)
from tests.run_fixtures import NO_REPORT, TINY, write_config
from tests.training.test_slot_engine import SLOTS, texts
from tests.training.test_two_hosts import assert_same_steps
from tests.two_hosts import run_on_two_hosts

LORA = ("model.lora.rank=2", "optimizer.learning_rate=1e-2")
PENALISED = (*LORA, "algorithm.beta=0.05", "algorithm.epochs=2")
"""Settings with which policy and reference are both scored in every step."""
UNJUDGED = ("eval.every_steps=0", "checkpoint.best_metric=null")
NUM_ADAPTERS = 14
"""Number of arrays: two for each of the seven kernels."""
NUM_WEIGHTS = 1856
"""Number of weights in the adapters: 2 layers x rank 2 x (inputs + outputs of each kernel)."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A run of four steps without interruption, which tests must not change."""
    folder = tmp_path_factory.mktemp("lora")
    result = train_here(write_config(folder, TINY + NO_REPORT, tiny_model), *PENALISED)
    assert result.exit_code == 0, result.stderr
    assert "model.lora: 1,856 weights are trained (rank 2, alpha 16, q_proj" in result.stderr
    return folder / "runs" / "tiny"


def launched(config: Path, *overrides: str) -> tuple[RunSetup, LearnerGroup]:
    resolved = load(str(config), overrides, {})
    with prepare_run(resolved, resume="auto") as launch:
        return launch, launch.learning


def test_a_checkpoint_holds_adapters_and_their_moments_and_no_weight_of_the_model(run: Path) -> None:
    first, last = saved_state(run, 2), saved_state(run, 4)
    arrays = {name: array for name, array in last.items() if array.ndim}
    assert len(arrays) == 3 * NUM_ADAPTERS
    assert all(name.endswith((f"['{LORA_A}']", f"['{LORA_B}']")) for name in arrays)
    # Both matrices of all of them learn.
    assert [name for name in arrays if np.array_equal(first[name], arrays[name])] == []
    assert sum(array.nbytes for array in arrays.values()) == 3 * 4 * NUM_WEIGHTS


def test_a_run_begins_with_the_model_as_it_is(run: Path, finished: Path) -> None:
    with_adapters, without = (metrics_of(one)[0] for one in (run, finished))
    evaluated = {name for name in without if name.startswith("eval/")}
    assert len(evaluated) >= 5
    assert {name: with_adapters[name] for name in evaluated} == {name: without[name] for name in evaluated}
    # The first update starts where the reference is, and later ones do not.
    assert all(line["rollout/sampler_scorer_logprob_diff_max"] <= 1e-4 for line in metrics_of(run)[1:])
    assert 0 < metrics_of(run)[1]["policy/kl"] < metrics_of(run)[-1]["policy/kl"]


@pytest.mark.parametrize(
    ("overrides", "now"),
    [
        (("model.lora.rank=4",), r"rank 4, alpha 16, q_proj .*"),
        ((), "none"),
    ],
    ids=["rank", "all_weights"],
)
def test_other_adapters_than_those_that_were_saved_are_refused(
    run: Path, config: Path, overrides: tuple[str, ...], now: str
) -> None:
    resumed = config.parent / "runs" / "tiny"
    shutil.copytree(run, resumed, symlinks=True)
    before = digest_of(resumed)
    of_run = ("algorithm.beta=0.05", "algorithm.epochs=2", "optimizer.learning_rate=1e-2")
    result = train_here(config, *of_run, *overrides, resume="must")
    assert result.exit_code == 2
    assert "--resume: model.lora (rank 2, alpha 16, q_proj k_proj" in result.stderr
    assert "-> " + now.removesuffix(".*") in result.stderr
    assert digest_of(resumed) == before
    launch, _ = launched(config, *overrides, "run.name=other")
    with pytest.raises(InputError, match=rf"--checkpoint: .* holds adapters of rank 2, .*model\.lora requests {now}"):
        PolicyCheckpoint.open(run).check_compatible(launch.session.model_spec)


def test_the_reference_is_the_model_without_its_adapters_and_no_copy(run: Path, config: Path) -> None:
    launch, learning = launched(config, *PENALISED)
    session = launch.session
    state = RunState(learning.policy.initial_state(session.scoring.initial_trained_params()))
    reference = load_reference_params(state, TrainProgress(step=0, position=0, fingerprints={}), session.scoring)
    assert reference is not None and reference is session.scoring.frozen_params
    trained = load_policy_params(PolicyCheckpoint.open(run), session.scoring)
    frozen = session.model_spec.policy_definition.frozen(trained)
    assert all(a is b for a, b in zip(jax.tree.leaves(frozen), jax.tree.leaves(reference), strict=True))
    records = records_of(run / "rollouts" / "step_000001.jsonl")[:4]
    samples = [sample_from_record(record, where="") for record in records]
    bare, learning = launched(config, "run.name=bare", "algorithm.beta=0.05", "algorithm.epochs=2")
    cut = learning.score_batchers["reference"]
    scored, _ = session.scoring.score(reference, samples, "reference", batcher=cut)
    expected, _ = bare.session.scoring.score(bare.session.scoring.load_params(), samples, "reference", batcher=cut)
    of_reference = field_of(scored, "reference_logprobs")
    np.testing.assert_array_equal(of_reference, field_of(expected, "reference_logprobs"))
    policy, _ = session.scoring.score(trained, samples, "policy", batcher=cut)
    plain, _ = bare.session.scoring.score(
        merge_adapters(trained, session.model_spec.policy_definition.lora), samples, "policy", batcher=cut
    )
    of_policy = field_of(policy, "policy_logprobs")
    np.testing.assert_allclose(of_policy, field_of(plain, "policy_logprobs"), atol=1e-5)
    assert np.abs(of_policy - of_reference).max() > 1e-3


@pytest.mark.parametrize("step", [0, 1])
def test_a_reference_in_the_compute_type_has_the_logprobs_of_one_in_float32(
    step: int, config: Path, finished: Path
) -> None:
    launch, learning = launched(config, "run.name=half", "algorithm.beta=0.1", "model.dtype=bfloat16")
    session = launch.session
    params = session.scoring.initial_trained_params()
    state = RunState(learning.policy.initial_state(params))
    reference = load_reference_params(state, TrainProgress(step=step, position=0, fingerprints={}), session.scoring)
    assert reference is not None
    assert {leaf.dtype for leaf in jax.tree.leaves(reference)} == {jnp.dtype("bfloat16")}
    records = records_of(finished / "rollouts" / "step_000001.jsonl")[:4]
    samples = [sample_from_record(record, where="") for record in records]
    cut = learning.score_batchers["reference"]
    halves, floats = (session.scoring.score(one, samples, "reference", batcher=cut)[0] for one in (reference, params))
    np.testing.assert_array_equal(field_of(halves, "reference_logprobs"), field_of(floats, "reference_logprobs"))


def field_of(samples: Sequence[Sample], name: str) -> np.ndarray:
    """Returns a field of all tokens."""
    return np.concatenate([getattr(sample, name) for sample in samples])


@pytest.mark.slow
def test_beside_adapters_a_critic_learns_with_all_its_weights(config: Path) -> None:
    """The samples are generated with slots."""
    ppo = ("algorithm.name=ppo", "algorithm.beta=0.05", "critic.learning_rate=1e-2", SLOTS, *UNJUDGED)
    result = train_here(config, *LORA, *ppo, "run.steps=3", "checkpoint.every_steps=1", "checkpoint.keep=3")
    assert result.exit_code == 0, result.stderr
    run = config.parent / "runs" / "tiny"
    first, last = (saved_state(run, step) for step in (1, 3))
    matrices = [name for name in last if last[name].ndim]
    policy = [name for name in matrices if name.startswith("['policy']")]
    critic = [name for name in matrices if name.startswith("['critic']")]
    assert len(policy) == 3 * NUM_ADAPTERS and len(critic) == 3 * 12
    assert all(name.endswith((f"['{LORA_A}']", f"['{LORA_B}']")) for name in policy)
    assert [name for name in (*policy, *critic) if np.array_equal(first[name], last[name])] == []
    lines = metrics_of(run)
    assert [line["perf/compilations"] for line in lines[1:]] == [0, 0]
    # The second and third step draw from adapters that have moved.
    assert all(0 < line["rollout/sampler_scorer_logprob_diff_max"] <= 1e-4 for line in lines)


def test_work_is_counted_for_what_learns_and_for_what_only_passes_gradients_on(config: Path) -> None:
    launch, _ = launched(config, *LORA, "algorithm.beta=0.05")
    architecture, lengths = launch.session.model_spec.architecture, np.array([1, 5])
    work = make_step_flops(launch.resolved.settings, launch.session, None)
    reference, update = work.passes
    forward, matrices = forward_flops(architecture)(lengths), token_flops(architecture) * lengths
    for merged in (work.rollout, reference):
        assert merged.sequence_flops(lengths).tolist() == forward.tolist()
        assert merged.head_flops == lm_head_flops(architecture)
    # Attention and adapters have all gradients, matrices and LM head only those of their inputs.
    expected = 2 * matrices + 3 * (forward - matrices + 2 * NUM_WEIGHTS * lengths)
    assert update.sequence_flops(lengths).tolist() == expected.tolist()
    assert update.head_flops == 2 * lm_head_flops(architecture)


def test_without_a_checkpoint_the_model_is_sampled_and_scored_as_it_is(
    sampled: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out, note = tmp_path / "samples.jsonl", "note: model.lora.rank = 2 (from --set) has no effect here"
    chosen = (*of_tiny(tiny_model), *settings("model.lora.rank=2"))
    result = here("rollout", *chosen, "--limit", "6", "--out", out)
    assert result.exit_code == 0 and note in result.stderr, result.stderr
    assert texts(out) == texts(sampled)
    result = here("score", *chosen, "--input", out, "--out", tmp_path / "scored.jsonl")
    assert result.exit_code == 0 and note in result.stderr, result.stderr
    for record in records_of(tmp_path / "scored.jsonl"):
        np.testing.assert_allclose(record["policy_logprobs"], record["behavior_logprobs"], atol=1e-4)


def test_a_rank_beyond_the_model_is_refused(config: Path) -> None:
    result = train_here(config, "model.lora.rank=33")
    assert result.exit_code == 2
    assert "model.lora.rank: 33 is more than the model's width 32" in result.stderr
    assert not (config.parent / "runs").exists()


@pytest.mark.two_hosts
def test_two_hosts_train_the_adapters_that_one_would(run: Path, config: Path) -> None:
    chosen = settings(*PENALISED, "rollout.prompts_per_step=2", "run.steps=2")
    hosts = run_on_two_hosts("train", "--config", config, *chosen)
    assert [host.exit_code for host in hosts] == [0, 0], hosts
    two = config.parent / "runs" / "tiny"
    assert_same_steps(two, run, steps=range(3))
    assert PolicyCheckpoint.open(two).checksums.keys() == PolicyCheckpoint.open(run).checksums.keys()
