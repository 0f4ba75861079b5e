"""Tests runs with `model.lora`, also with a quantized base: trained weights, refused settings and the reference."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.checkpoint.saved_policy import PolicyCheckpoint, load_trained_params, read_policy_source
from app.checkpoint.train_progress import RunState, TrainProgress
from app.model.architecture import forward_flops
from app.model.decode_weights import DecodeWeights
from app.model.decoder import Params
from app.model.io.hf_weights import load_weights
from app.model.lora import LORA_A, LORA_B, combine_params, merge_adapters
from app.model.prefill_and_decode import prefill
from app.records.sample import Sample
from app.records.sample_json import sample_from_record
from app.runtime import model_spec
from app.runtime.model_spec import read_model_spec
from app.runtime.session import Session
from app.tracking.performance import make_step_flops
from app.training.initial_state import load_reference_params
from settings import load
from tests.program import digest_of, here, metrics_of, records_of, run_of, saved_state, settings, succeeded, train_here
from tests.quantized import dequantized_params
from tests.replays import step_file
from tests.run_fixtures import LORA as OF_ADAPTED
from tests.run_fixtures import NO_REPORT, TINY, launched, write_config
from tests.tiny import make_mesh

LORA = ("model.lora.rank=2", "optimizer.learning_rate=1e-2")
SAVED = tuple(f"model.lora.{name}={value}" for name, value in OF_ADAPTED.items())
"""Adapters of the run `adapted`."""
NUM_WEIGHTS = 1856
"""Number of weights in adapters of rank 2: 2 layers x rank 2 x (inputs + outputs of each kernel)."""
START = TrainProgress(step=0, position=0, fingerprints={})


def some_samples(run: Path) -> list[Sample]:
    return [sample_from_record(record, where="") for record in records_of(step_file(run, 1))[:4]]


def field_of(samples: Sequence[Sample], name: str) -> np.ndarray:
    return np.concatenate([getattr(sample, name) for sample in samples])


def test_a_run_with_adapters_starts_from_the_base_model(adapted: Path, finished: Path) -> None:
    with_adapters, without = (metrics_of(one)[0] for one in (adapted, finished))
    evaluated = {name for name in without if name.startswith("eval/")}
    assert len(evaluated) >= 5
    assert {name: with_adapters[name] for name in evaluated} == {name: without[name] for name in evaluated}
    assert all(line["rollout/sampler_scorer_logprob_diff_max"] <= 1e-4 for line in metrics_of(adapted)[1:])


@pytest.mark.parametrize(("rank", "now"), [(4, "rank 4, alpha 6, q_proj "), (0, "none")])
def test_resume_refuses_adapters_that_differ_from_the_saved_ones(
    adapted: Path, config: Path, rank: int, now: str
) -> None:
    resumed = run_of(config)
    shutil.copytree(adapted, resumed, symlinks=True)
    before = digest_of(resumed)
    lora = (*SAVED[1:], f"model.lora.rank={rank}") if rank else ()
    result = train_here(config, *lora, "run.steps=3", "optimizer.learning_rate=0.1", resume="must")
    assert result.exit_code == 2
    assert "--resume: model.lora (rank 3, alpha 6, q_proj v_proj" in result.stderr
    assert "-> " + now in result.stderr
    assert digest_of(resumed) == before


def test_the_reference_is_the_model_without_adapters_and_not_a_copy(adapted: Path, config: Path) -> None:
    penalty = ("algorithm.beta=0.05", "algorithm.epochs=2")
    launch, learning = launched(config, *SAVED, *penalty)
    session = launch.session
    state = RunState(learning.policy.initial_state(session.scoring.initial_trained_params()))
    reference = load_reference_params(state, START, launch)
    assert reference is not None and reference is session.scoring.frozen_params
    adapters = load_trained_params(PolicyCheckpoint.open(adapted), session.model_spec, session.mesh)
    trained = session.scoring.full_params(adapters)
    frozen = session.model_spec.policy_definition.frozen(trained)
    assert all(a is b for a, b in zip(jax.tree.leaves(frozen), jax.tree.leaves(reference), strict=True))
    samples = some_samples(adapted)
    bare, learning = launched(config, "run.name=bare", *penalty)
    cut = learning.score_batchers["reference"]
    scored, _ = session.scoring.score(reference, samples, "reference", batcher=cut)
    expected, _ = bare.session.scoring.score(bare.session.scoring.load_params(), samples, "reference", batcher=cut)
    of_reference = field_of(scored, "reference_logprobs")
    np.testing.assert_array_equal(of_reference, field_of(expected, "reference_logprobs"))
    policy, _ = session.scoring.score(trained, samples, "policy", batcher=cut)
    merged = merge_adapters(trained, session.model_spec.policy_definition.lora)
    plain, _ = bare.session.scoring.score(merged, samples, "policy", batcher=cut)
    of_policy = field_of(policy, "policy_logprobs")
    np.testing.assert_allclose(of_policy, field_of(plain, "policy_logprobs"), atol=1e-5)
    assert np.abs(of_policy - of_reference).max() > 1e-3


def test_a_reference_in_the_compute_dtype_scores_like_float32(config: Path, finished: Path) -> None:
    launch, learning = launched(config, "run.name=half", "algorithm.beta=0.1", "model.dtype=bfloat16")
    session = launch.session
    params = session.scoring.initial_trained_params()
    state = RunState(learning.policy.initial_state(params))
    cut, samples = learning.score_batchers["reference"], some_samples(finished)
    floats, _ = session.scoring.score(params, samples, "reference", batcher=cut)
    # The reference is either copied from a fresh state or loaded again.
    for step in (0, 1):
        reference = load_reference_params(state, TrainProgress(step=step, position=0, fingerprints={}), launch)
        assert reference is not None
        assert {leaf.dtype for leaf in jax.tree.leaves(reference)} == {jnp.dtype("bfloat16")}
        halves, _ = session.scoring.score(reference, samples, "reference", batcher=cut)
        np.testing.assert_array_equal(field_of(halves, "reference_logprobs"), field_of(floats, "reference_logprobs"))


def test_a_frozen_base_in_the_compute_dtype_scores_like_float32(config: Path, finished: Path) -> None:
    launch, learning = launched(config, *LORA, "run.name=half-base", "model.dtype=bfloat16", "algorithm.beta=0.1")
    scoring = launch.session.scoring
    adapters, cut = with_small_adapters(launch.session), learning.score_batchers["reference"]
    assert {leaf.dtype for leaf in jax.tree.leaves(adapters)} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(scoring.frozen_params)} == {jnp.dtype("bfloat16")}
    in_floats = load_weights(scoring.model_spec.definition, scoring.model_spec.files.weights, scoring.mesh)
    halves, floats = (
        scoring.score(combine_params(adapters, base), some_samples(finished), "policy", batcher=cut)[0]
        for base in (scoring.frozen_params, in_floats)
    )
    np.testing.assert_array_equal(field_of(halves, "policy_logprobs"), field_of(floats, "policy_logprobs"))


def with_small_adapters(session: Session) -> Params:
    """Returns adapters like those after a few steps: the entries of B are about 1e-4."""
    draw = np.random.default_rng(0)
    return jax.tree.map_with_path(
        lambda path, x: jnp.asarray(draw.normal(0, 1e-4, x.shape), x.dtype) if path[-1].key == LORA_B else x,
        session.scoring.initial_trained_params(),
    )


def logprobs_by_the_sampler(session: Session, params: Params) -> np.ndarray:
    """Returns logprobs under the weights that the sampler decodes with, computed in float32."""
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), session.to_decode_weights(params))
    ids = jnp.arange(24, dtype=jnp.int32).reshape(4, 6)
    definition = session.to_decode_weights.definition

    @jax.jit
    def logprobs_of(weights: DecodeWeights) -> jax.Array:
        hidden, *_ = prefill(definition, weights, ids, jnp.full(4, 6, jnp.int32))
        return jax.nn.log_softmax(definition.bind(weights.params).head.logits(hidden))

    return np.asarray(logprobs_of(exact))


def test_a_bfloat16_sampler_follows_small_policy_updates(config: Path) -> None:
    session, exact = (
        launched(config, *LORA, f"model.dtype={dtype}", f"run.name={dtype}")[0].session
        for dtype in ("bfloat16", "float32")
    )
    # Like in published models, all weights are representable in bfloat16.
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), session.scoring.frozen_params)
    fresh, moved = session.scoring.initial_trained_params(), with_small_adapters(session)
    shift, expected = (
        logprobs_by_the_sampler(one, combine_params(moved, base))
        - logprobs_by_the_sampler(one, combine_params(fresh, base))
        for one in (session, exact)
    )
    assert np.abs(expected).max() > 1e-5
    np.testing.assert_allclose(shift, expected, atol=0.02 * np.abs(expected).max())
    # In float32 the adapters are merged into the weights for decoding.
    assert exact.to_decode_weights.definition is exact.model_spec.definition


BASE = "model.lora.quantize_base"
INT8, NF4 = f"{BASE}=int8", f"{BASE}=nf4"
PENALTY = ("algorithm.beta=0.05",)
"""Settings with which the reference is scored in every step."""
QLORA = (*LORA, *PENALTY, INT8)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Returns the directory of a run of two steps with a quantized base, which tests must not change."""
    pytest.importorskip("qwix", reason="Qwix is not installed: pip install -e '.[qlora]'")
    folder = tmp_path_factory.mktemp("qlora")
    chosen = (*QLORA, "run.steps=2", "checkpoint.every_steps=1")
    result = succeeded(train_here(write_config(folder, TINY + NO_REPORT, tiny_model), *chosen))
    assert "are frozen, with the layers' matrices in int8" in result.stderr
    return folder / "runs" / "tiny"


def test_a_run_with_a_quantized_base_trains_and_saves_only_adapters(quantized: Path, tmp_path: Path) -> None:
    first, last = saved_state(quantized, 1), saved_state(quantized, 2)
    arrays = {name: array for name, array in last.items() if array.ndim}
    # Each of the seven kernels has two adapter arrays, and each array has two moments.
    assert len(arrays) == 3 * 14
    assert all(name.endswith((f"['{LORA_A}']", f"['{LORA_B}']")) for name in arrays)
    assert sum(array.nbytes for array in arrays.values()) == 3 * 4 * NUM_WEIGHTS
    assert [name for name in arrays if np.array_equal(first[name], arrays[name])] == []
    lines = metrics_of(quantized)[1:]
    assert all(0 < line["rollout/sampler_scorer_logprob_diff_max"] <= 1e-4 for line in lines)
    assert abs(lines[0]["policy/kl"]) < 1e-6 < lines[-1]["policy/kl"]
    assert [line["perf/compilations"] for line in lines[1:]] == [0]
    # `grpo eval` of the saved policy gives the accuracy of its run.
    result = succeeded(here("evaluate", "--checkpoint", quantized, "--out", tmp_path / "found.jsonl", "--json"))
    logged = {name: value for name, value in metrics_of(quantized)[-1].items() if name.startswith("eval/")}
    del logged["eval/num_prompts"]
    found = json.loads(result.stdout)["metrics"]
    assert logged and {name: found[name] for name in logged} == logged


def test_a_run_with_adapters_refuses_another_quantized_base_or_quantizer(
    quantized: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = run_of(config)
    shutil.copytree(quantized, resumed, symlinks=True)
    before = digest_of(resumed)
    result = train_here(config, *LORA, *PENALTY, NF4, resume="must")
    assert result.exit_code == 2
    shown = " ".join(result.stderr.split())
    assert "--resume: model.lora (rank 2, alpha 16, q_proj" in shown and "down_proj, beside int8 -> rank 2" in shown
    assert re.findall(r", beside \w+", shown.partition("->")[2]) == [", beside nf4"]
    evaluated = here("evaluate", "--checkpoint", quantized, *settings(NF4))
    assert evaluated.exit_code == 2 and "beside int8, but model.lora requests rank 2" in evaluated.stderr

    had = PolicyCheckpoint.open(quantized).progress.fingerprints[model_spec.QUANTIZER_FINGERPRINT]
    monkeypatch.setattr(model_spec, "version_of", lambda name: "999.0")
    result = train_here(config, *QLORA, resume="must")
    assert result.exit_code == 2
    assert f"codes of quantized kernels ({had} -> 999.0) changed" in " ".join(result.stderr.split())
    evaluated = here("evaluate", "--checkpoint", quantized)
    assert evaluated.exit_code == 2 and f"run pip install 'qwix=={had}'" in evaluated.stderr
    assert digest_of(resumed) == before


def test_the_reference_is_the_quantized_base_and_not_a_copy(quantized: Path, config: Path) -> None:
    launch, learning = launched(config, *LORA, *PENALTY, NF4)
    session = launch.session
    state = RunState(learning.policy.initial_state(session.scoring.initial_trained_params()))
    reference = load_reference_params(state, START, launch)
    assert reference is not None and reference is session.scoring.frozen_params
    floats = dequantized_params(session.model_spec.reference_definition, reference)
    samples = some_samples(quantized)
    bare, learning = launched(config, "run.name=bare", *PENALTY)
    cut = learning.score_batchers["reference"]
    scored, _ = session.scoring.score(reference, samples, "reference", batcher=cut)
    expected, exact = (
        bare.session.scoring.score(params, samples, "reference", batcher=cut)[0]
        for params in (floats, bare.session.scoring.load_params())
    )
    found = field_of(scored, "reference_logprobs")
    np.testing.assert_allclose(found, field_of(expected, "reference_logprobs"), atol=1e-5)
    assert np.abs(field_of(exact, "reference_logprobs") - found).max() > 1e-3
    # Scales and codes do not count as floating-point work, but the adapters do.
    assert session.to_decode_weights.definition is session.model_spec.policy_definition
    one = np.ones(1, np.int64)
    work = make_step_flops(launch.resolved.settings, session, None).rollout
    assert work.sequence_flops(one) == forward_flops(session.model_spec.architecture)(one) + 2 * NUM_WEIGHTS


def test_adapters_are_merged_into_the_unquantized_base(quantized: Path, config: Path, tmp_path: Path) -> None:
    result = here("export", "--checkpoint", quantized, "--out", tmp_path / "out")
    assert result.exit_code == 0 and "note: the adapters were trained on" in result.stderr, result.stderr
    mesh, resolved = make_mesh(), load(str(config), [f"model.path={tmp_path / 'out'}"], {})
    model = read_model_spec(resolved.settings)
    found = load_weights(model.definition, model.files.weights, mesh)
    launch, _ = launched(config, *QLORA)
    session = launch.session
    policy = session.model_spec.policy_definition
    adapters = load_trained_params(PolicyCheckpoint.open(quantized), session.model_spec, session.mesh)
    own = load_weights(session.model_spec.definition, session.model_spec.files.weights, mesh)
    whole = merge_adapters(combine_params(*(jax.tree.map(np.asarray, one) for one in (adapters, own))), policy.lora)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, whole)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"the adapters were trained on base weights quantized to int8 ({BASE})" in card
    assert f'| `{BASE}` | `"int8"` |' in card


def test_a_model_without_adapters_is_not_quantized(tiny_model: Path) -> None:
    short = ["data.max_prompt_length=16", "rollout.max_new_tokens=4"]
    chosen = load(None, [f"model.path={tiny_model}", "model.lora.rank=2", INT8, *short], {}).settings
    assert read_model_spec(chosen).without_adapters.reference_definition.quantization is None
    assert read_policy_source(chosen, None).model.policy_definition.quantization is None
