"""Tests distillation from a teacher: the gradient, whole runs and refused settings."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.batching.sample_exchange import fetch_rows
from app.checkpoint.train_progress import RunState, TrainProgress
from app.mesh.placement import bytes_per_device
from app.model.decoder import Params, flatten_by_path
from app.model.io.hf_weights import expected_tensors, from_hf_layout
from app.records.sample import Sample
from app.training import setup
from app.training.initial_state import load_reference_params
from settings import load
from settings.schema.algorithm import ScoredRole
from tests import program
from tests.model.reference import import_reference
from tests.run_fixtures import NO_REPORT, TINY, launched, write_config
from tests.tiny import assert_trees_close, make_sample
from tests.tiny_directory import write_model
from tests.training.test_bad_input import refused

OTHER_SIZES: dict[str, Any] = {
    **{"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6},
    **{"num_key_value_heads": 3, "vocab_size": 30, "tie_word_embeddings": True},
}
"""A teacher that shares only its tokens with the student; its vocabulary is padded by six more rows."""
NUM_WEIGHTS = 24 * 48 + 48 + 3 * (2 * 48 + 48 * 8 * (6 + 3 + 3 + 6) + 3 * 48 * 40)
DISTILL = ("algorithm.name=distill", "reward.functions=[{name: arithmetic, weight: 0}]")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "teacher", seed=5, **OTHER_SIZES)


def every_pair_of_tokens(vocab_size: int) -> list[Sample]:
    pairs = np.stack(np.divmod(np.arange(vocab_size**2), vocab_size), axis=1)
    return [
        make_sample(pair, prompt_ids=(5, 6, 7), group_id=i // 4, sample_index=i % 4, reward=0.0)
        for i, pair in enumerate(pairs)
    ]


def float64_gradient(student: Path, teacher: Path, prompt: np.ndarray, *, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns the exact gradients of KL(policy || teacher) for the first token and for the second token.

    The second one is averaged over first tokens, whose probabilities get no gradient.
    """
    torch, transformers = import_reference()
    networks = [transformers.AutoModelForCausalLM.from_pretrained(one, dtype="float64") for one in (student, teacher)]
    rows = torch.from_numpy(np.stack([np.append(prompt, token) for token in range(vocab_size)]).astype(np.int64))
    policy, target = (one(rows).logits[:, -2:, :vocab_size].log_softmax(-1) for one in networks)
    kl = (policy.exp() * (policy - target.detach())).sum(-1)
    first = policy[0, 0].exp().detach()
    (kl[0, 0] + (first * kl[:, 1]).sum()).backward()
    return {name: weight.grad.numpy() for name, weight in networks[0].named_parameters()}


def test_expected_gradient_of_distillation_equals_the_gradient_of_the_reverse_kl(
    config: Path, tiny_model: Path, teacher: Path
):
    launch, learning = launched(config, *DISTILL, f"reference.path={teacher}")
    scoring, definition = launch.session.scoring, launch.session.model_spec.definition
    params, samples = scoring.initial_trained_params(), every_pair_of_tokens(24)
    state = RunState(learning.policy.initial_state(scoring.initial_trained_params()))
    frozen = load_reference_params(state, TrainProgress(step=0, position=0, fingerprints={}), launch)
    assert frozen is not None
    weights: dict[ScoredRole, Params] = {"policy": params, "reference": frozen}
    for role, batcher in learning.score_batchers.items():
        samples, _ = scoring.score(weights[role], samples, role, batcher=batcher)
    samples, metrics, kl_coef = learning.advantage_estimator(samples, launch.resolved.settings.algorithm.beta)
    assert (metrics["advantage/std"], kl_coef) == (0, 1)
    # Each pair is weighted by its probability under the policy.
    chances = np.exp([np.sum(np.asarray(sample.policy_logprobs, np.float64)) for sample in samples])
    assert chances.sum() == pytest.approx(1, abs=1e-5)
    advantages = [np.asarray(sample.advantages) for sample in samples] * chances[:, None].astype(np.float32)
    samples = [replace(sample, advantages=own) for sample, own in zip(samples, advantages, strict=True)]
    updater, num_tokens = learning.policy.updater, 2 * len(samples)
    plan = updater.micro_batcher(samples, updater.mesh)
    batches = updater.place(samples, fetch_rows(samples, plan, updater.pack.fields, updater.pack.route_shape))
    with jax.set_mesh(updater.mesh):
        total = learning.policy.update_step.accumulate(params, batches, jnp.float32(1), {})
    expected = float64_gradient(tiny_model, teacher, samples[0].prompt.token_ids, vocab_size=24)
    found = flatten_by_path(jax.device_get(total.gradients))
    for entry in expected_tensors(definition):
        ours = found[entry.path] if entry.layer is None else found[entry.path][entry.layer]
        wanted = from_hf_layout(expected[entry.name], entry.path, ours.shape)
        assert_trees_close(ours * num_tokens, wanted)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, teacher: Path) -> Path:
    """Returns the directory of a run with four steps of distillation, which tests must not change."""
    folder = tmp_path_factory.mktemp("distilled")
    config = write_config(folder, TINY + NO_REPORT, tiny_model)
    result = program.succeeded(program.train_here(config, *DISTILL, f"reference.path={teacher}"))
    note = f"reference.path: the teacher is teacher (llama), with {NUM_WEIGHTS:,} own weights"
    assert note in result.stderr and "  kl to the teacher " in result.stderr
    assert "distill (Lu 2025): kl_in advantage (grpo: loss)" in result.stderr
    return folder / "runs" / "tiny"


def test_the_student_comes_closer_to_its_teacher_without_a_reward(distilled: Path) -> None:
    start, *lines = program.metrics_of(distilled)
    assert start["eval/accuracy"] is not None
    kls = [line["policy/teacher_kl"] for line in lines]
    assert kls[-1] < 0.9 * kls[0]
    for line in lines:
        assert (line["reward/mean"], line["policy/kl_coef"], line["policy/kl"]) == (0, 1, None)
        assert line["policy/grad_norm"] > 0 and line["time/score_reference_s"] > 0
    (sample, *_) = program.records_of(distilled / "rollouts" / "step_000001.jsonl")
    difference = np.subtract(sample["reference_logprobs"], sample["policy_logprobs"])
    np.testing.assert_allclose(sample["advantages"], difference, rtol=1e-5)


def test_a_resumed_run_keeps_its_teacher(distilled: Path, teacher: Path, config: Path) -> None:
    run = program.copy_until(distilled, program.run_of(config), step=2)
    chosen = (*DISTILL, "run.name=tiny")
    before = program.digest_of(run)
    other = write_model(config.parent / "other", seed=6, **OTHER_SIZES)
    result = program.train_here(config, *chosen, f"reference.path={other}", resume="must")
    assert result.exit_code == 2
    assert "the teacher, the model of reference.path changed since this run was started" in result.stderr
    assert "or continue with the new ones with --allow-changed reference" in result.stderr
    assert program.digest_of(run) == before
    # The same model under another path is accepted.
    moved = shutil.copytree(teacher, config.parent / "moved")
    program.succeeded(program.train_here(config, *chosen, f"reference.path={moved}", resume="must"))
    program.assert_same_run(run, distilled, step=4)


def test_a_reward_adds_its_advantage_to_the_kl_of_each_token(distilled: Path, teacher: Path, config: Path) -> None:
    mixed = ("algorithm.name=distill", "algorithm.beta=0.5", f"reference.path={teacher}", "run.steps=1")
    program.succeeded(program.train_here(config, *mixed, *program.UNJUDGED))
    records = program.records_of(program.run_of(config) / "rollouts" / "step_000001.jsonl")
    earned = []
    for group in range(4):
        members = [one for one in records if one["group_id"] == group]
        rewards = np.array([one["reward"] for one in members])
        earned.append(rewards.std())
        for one, reward in zip(members, rewards, strict=True):
            task = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            kl = np.subtract(one["policy_logprobs"], one["reference_logprobs"])
            np.testing.assert_allclose(one["advantages"], task - 0.5 * kl, rtol=1e-5, atol=1e-5)
    assert max(earned) > 0


@pytest.mark.parametrize("more", [("model.lora.rank=2",), ("score.reference.offload=true", "mesh.shape='1,4,2'")])
def test_a_teacher_remains_a_separate_model_with_adapters_or_offloading(
    distilled: Path, teacher: Path, config: Path, more: tuple[str, ...]
) -> None:
    chosen = ("reward.functions=[]", *more, f"reference.path={teacher}", "run.steps=1", *program.UNJUDGED)
    # One sample per prompt is enough, because distillation does not compare samples of a group.
    result = program.train_here(
        config, "algorithm.name=distill", *chosen, "rollout.group_size=1", "rollout.prompts_per_step=16"
    )
    assert "score.reference.offload = " not in program.succeeded(result).stderr
    run = program.run_of(config)
    (line,) = program.metrics_of(run)
    assert line["policy/teacher_kl"] > 0.1 and not any(name.startswith("reward/arithmetic") for name in line)
    samples, scored = run / "rollouts" / "step_000001.jsonl", config.parent / "scored.jsonl"
    settings = program.settings(f"model.path={load(str(config), [], {}).settings.model.path}")
    settings += program.settings(f"reference.path={teacher}")
    program.succeeded(program.here("score", "--input", samples, "--out", scored, "--role", "reference", *settings))
    for before, after in zip(*map(program.records_of, (samples, scored)), strict=True):
        np.testing.assert_allclose(before["reference_logprobs"], after["reference_logprobs"], atol=1e-5)


def test_dry_run_inspect_mesh_and_doctor_name_and_count_the_teacher(config: Path, teacher: Path) -> None:
    chosen = (*DISTILL, f"reference.path={teacher}", "mesh.shape='1,4,2'")
    scoring = launched(config, *chosen)[0].session.scoring
    reference = bytes_per_device(scoring.load_reference())
    given = ("--config", config, "--json", *program.settings(*chosen))
    planned, placed = (
        json.loads(program.succeeded(program.here(*command, *given)).stdout)
        for command in (("train", "--dry-run"), ("inspect-mesh",))
    )
    for report in (planned, placed):
        assert {phase["reference"] for phase in report["memory"].values()} == {reference}
        assert [note for note in report["notes"] if note.startswith("reference.path: the teacher is teacher (llama)")]
    with_tp = program.settings(*chosen, "mesh.shape='1,2,4'")
    result = program.here("doctor", "--config", config, "--json", *with_tp)
    checks = {one["check"]: one for one in json.loads(result.stdout)["checks"]}
    assert checks["teacher"]["found"] == f"{teacher}: its tokens are the policy's"
    assert "tp = 4 divides neither the 6 query heads nor the 3 kv heads of teacher" in checks["mesh"]["found"]


def test_a_teacher_that_is_missing_incompatible_or_too_large_is_refused(
    config: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = partial(refused, config, *DISTILL)

    def altered(name: str, file: str, **changes: Any) -> str:
        folder = shutil.copytree(teacher, config.parent / name)
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
        return f"reference.path={folder}"

    swapped = altered("swapped", "config.json")
    tokenizer = config.parent / "swapped" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"7":', '"x":').replace('"8":', '"7":').replace('"x":', '"8":'))
    assert "swapped is '8', but '7' in " in refusal(swapped)
    small = write_model(config.parent / "small", vocab_size=22)
    assert "small has 22 tokens, fewer than the 24 of" in refusal(f"reference.path={small}")
    assert "model_type='mamba' is not supported" in refusal(altered("unknown", "config.json", model_type="mamba"))
    short = write_model(config.parent / "short", max_position_embeddings=8)
    assert "= 20 tokens, but the context of reference.path" in refusal(f"reference.path={short}")
    assert "reference.path: 'gone.gguf' is neither" in refusal("reference.path=gone.gguf")
    local = refusal(f"reference.path={teacher}", "reference.revision=v1")
    assert "reference.revision: " in local and "is not on the hub, so it has no revisions" in local
    assert "reference.path = None (from the default): algorithm.name = 'distill'" in refusal()
    monkeypatch.setattr(setup, "device_memory_bytes", lambda: 10_000)
    full = refusal(f"reference.path={teacher}")
    assert "on each device, the teacher's weights (19.3 KiB) and the other networks (25.0 KiB) exceed the" in full
    assert "available 9.8 KiB; set optimizer.offload: true, choose a smaller teacher" in full
