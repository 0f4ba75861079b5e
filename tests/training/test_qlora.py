"""Tests of a run with `model.lora.quantize_base`: adapters with kernels in 8 or 4 bits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from app.checkpoint.saved_policy import PolicyCheckpoint, load_policy_params, read_policy_source
from app.checkpoint.train_progress import RunState, TrainProgress
from app.model import quantization
from app.model.architecture import forward_flops
from app.model.io.hf_weights import load_weights
from app.model.lora import LORA_A, LORA_B, combine_params, merge_adapters
from app.records.sample_json import sample_from_record
from app.records.versions import NOT_INSTALLED
from app.runtime import model_spec
from app.runtime.model_spec import read_model_spec
from app.tracking.performance import make_step_flops
from app.training.initial_state import load_reference_params
from settings import load
from tests.program import (
    digest_of,
    here,
    metrics_of,
    records_of,
    saved_state,
    settings,
    train_here,
)
from tests.quantized import dequantized_params
from tests.run_fixtures import NO_REPORT, TINY, write_config
from tests.tiny import make_mesh
from tests.tiny_directory import write_model
from tests.training.test_lora import NUM_ADAPTERS, NUM_WEIGHTS, PENALISED, field_of, launched

pytest.importorskip("qwix", reason="Qwix is not installed: pip install -e '.[qlora]'")

BASE = "model.lora.quantize_base"
INT8, NF4 = f"{BASE}=int8", f"{BASE}=nf4"
QLORA = (*PENALISED, INT8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A run of four steps without interruption, which tests must not change."""
    folder = tmp_path_factory.mktemp("qlora")
    result = train_here(write_config(folder, TINY + NO_REPORT, tiny_model), *QLORA)
    assert result.exit_code == 0, result.stderr
    assert "are frozen, with the layers' matrices in int8" in result.stderr
    return folder / "runs" / "tiny"


def test_adapters_learn_and_are_all_that_is_saved(run: Path) -> None:
    first, last = saved_state(run, 2), saved_state(run, 4)
    arrays = {name: array for name, array in last.items() if array.ndim}
    assert len(arrays) == 3 * NUM_ADAPTERS
    assert all(name.endswith((f"['{LORA_A}']", f"['{LORA_B}']")) for name in arrays)
    assert [name for name in arrays if np.array_equal(first[name], arrays[name])] == []
    lines = metrics_of(run)[1:]
    assert all(0 < line["rollout/sampler_scorer_logprob_diff_max"] <= 1e-4 for line in lines)
    assert 0 < lines[0]["policy/kl"] < lines[-1]["policy/kl"]
    assert [line["perf/compilations"] for line in lines[1:]] == [0, 0, 0]


def test_another_base_than_the_one_that_adapters_learned_beside_is_refused(run: Path, config: Path) -> None:
    resumed = config.parent / "runs" / "tiny"
    shutil.copytree(run, resumed, symlinks=True)
    before = digest_of(resumed)
    result = train_here(config, *PENALISED, NF4, resume="must")
    assert result.exit_code == 2
    shown = " ".join(result.stderr.split())
    assert "--resume: model.lora (rank 2, alpha 16, q_proj" in shown and "down_proj, beside int8 -> rank 2" in shown
    new_value = shown.partition("->")[2]
    assert "down_proj" in new_value and re.findall(r", beside \w+", new_value) == [", beside nf4"]
    assert digest_of(resumed) == before
    evaluated = here("evaluate", "--checkpoint", run, *settings(NF4))
    assert evaluated.exit_code == 2 and "beside int8, but model.lora requests rank 2" in evaluated.stderr


def test_a_launch_without_qwix_is_refused_and_an_export_is_not(
    run: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "version_of", lambda name: NOT_INSTALLED)
    monkeypatch.setattr(model_spec, "version_of", lambda name: NOT_INSTALLED)
    for dry in ((), ("--dry-run",)):
        result = here("train", "--config", config, *dry, *settings(*QLORA))
        assert result.exit_code == 2
        assert "but it is not installed; run pip install -e '.[qlora]'" in result.stderr
    assert here("export", "--checkpoint", run, "--out", tmp_path / "out").exit_code == 0


def test_codes_that_another_qwix_would_find_are_refused(
    run: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    had = PolicyCheckpoint.open(run).progress.fingerprints[model_spec.QUANTIZER_FINGERPRINT]
    monkeypatch.setattr(model_spec, "version_of", lambda name: "999.0")
    resumed = config.parent / "runs" / "tiny"
    shutil.copytree(run, resumed, symlinks=True)
    result = train_here(config, *QLORA, resume="must")
    assert result.exit_code == 2
    assert f"codes of quantized kernels ({had} -> 999.0) changed" in " ".join(result.stderr.split())
    evaluated = here("evaluate", "--checkpoint", run)
    assert evaluated.exit_code == 2 and f"pip install 'qwix=={had}'" in evaluated.stderr


def test_a_width_that_no_tile_divides_is_refused(tmp_path: Path, config: Path) -> None:
    odd = write_model(tmp_path / "odd", hidden_size=36)
    result = train_here(config, f"model.path={odd}", "model.lora.rank=2", NF4)
    assert result.exit_code == 2
    assert f"{BASE}: nf4 needs a model width" in result.stderr


def test_the_reference_is_the_quantized_base_without_its_adapters_and_no_copy(run: Path, config: Path) -> None:
    launch, learning = launched(config, *PENALISED, NF4)
    session = launch.session
    state = RunState(learning.policy.initial_state(session.scoring.initial_trained_params()))
    reference = load_reference_params(state, TrainProgress(step=0, position=0, fingerprints={}), session.scoring)
    assert reference is not None and reference is session.scoring.frozen_params
    quantized = session.model_spec.reference_definition
    floats = dequantized_params(quantized, reference)
    records = records_of(run / "rollouts" / "step_000001.jsonl")[:4]
    samples = [sample_from_record(record, where="") for record in records]
    bare, learning = launched(config, "run.name=bare", "algorithm.beta=0.05", "algorithm.epochs=2")
    cut = learning.score_batchers["reference"]
    scored, _ = session.scoring.score(reference, samples, "reference", batcher=cut)
    expected, _ = bare.session.scoring.score(floats, samples, "reference", batcher=cut)
    np.testing.assert_allclose(
        field_of(scored, "reference_logprobs"), field_of(expected, "reference_logprobs"), atol=1e-5
    )
    exact, _ = bare.session.scoring.score(bare.session.scoring.load_params(), samples, "reference", batcher=cut)
    assert np.abs(field_of(exact, "reference_logprobs") - field_of(scored, "reference_logprobs")).max() > 1e-3


def test_adapters_beside_quantized_kernels_count_as_work(config: Path) -> None:
    launch, _ = launched(config, *PENALISED, INT8)
    session, one = launch.session, np.ones(1, np.int64)
    assert session.to_decode_weights.definition is session.model_spec.policy_definition
    # Their scales and codes do not count.
    work = make_step_flops(launch.resolved.settings, session, None).rollout
    blocks, adapters = forward_flops(session.model_spec.architecture)(one), 2 * NUM_WEIGHTS
    assert work.sequence_flops(one) == blocks + adapters


def test_merged_adapters_stand_beside_the_base_in_floats_and_the_card_says_so(
    run: Path, config: Path, tmp_path: Path, tiny_model: Path
) -> None:
    result = here("export", "--checkpoint", run, "--out", tmp_path / "out")
    assert result.exit_code == 0 and "note: the adapters were trained on" in result.stderr, result.stderr
    mesh, resolved = make_mesh(), load(str(config), [f"model.path={tmp_path / 'out'}"], {})
    model = read_model_spec(resolved.settings)
    found = load_weights(model.definition, model.files.weights, mesh)
    launch, _ = launched(config, *QLORA)
    session = launch.session
    adapters = session.model_spec.policy_definition.trainable(
        load_policy_params(PolicyCheckpoint.open(run), session.scoring)
    )
    own = load_weights(session.model_spec.definition, session.model_spec.files.weights, mesh)
    whole = merge_adapters(
        combine_params(jax.tree.map(np.asarray, adapters), jax.tree.map(np.asarray, own)),
        session.model_spec.policy_definition.lora,
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, whole)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"the adapters were trained on base weights quantized to int8 ({BASE})" in card
    assert f'| `{BASE}` | `"int8"` |' in card
    assert here("export", "--checkpoint", run, "--out", tmp_path / "alone", "--adapter").exit_code == 0
    assert f"weights quantized to int8 ({BASE})" in (tmp_path / "alone" / "README.md").read_text()


def test_a_saved_policy_is_evaluated_as_its_run_did(run: Path, tmp_path: Path) -> None:
    result = here("evaluate", "--checkpoint", run, "--out", tmp_path / "found.jsonl", "--json")
    assert result.exit_code == 0, result.stderr
    logged = {name: value for name, value in metrics_of(run)[-1].items() if name.startswith("eval/")}
    del logged["eval/num_prompts"]
    found = json.loads(result.stdout)["metrics"]
    assert logged and {name: found[name] for name in logged} == logged


def test_an_evaluation_of_the_model_alone_has_floats(tiny_model: Path) -> None:
    chosen = load(None, [f"model.path={tiny_model}", "model.lora.rank=2", INT8], {}).settings
    assert read_model_spec(chosen).without_adapters.reference_definition.quantization is None
    assert read_policy_source(chosen, None).model.policy_definition.quantization is None
