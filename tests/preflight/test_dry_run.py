"""`grpo train --dry-run` reports the sizes and the memory of a run, and loads, compiles and writes nothing."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from app.mesh.program_cache import CompilationCounter
from app.model.architecture import forward_flops, lm_head_flops
from app.model.io.families import architecture_from_config
from app.model.quantization import QUANTIZE_BASE_SETTING
from app.preflight.dry_run import DryRunReport, make_dry_run_report
from settings import load
from tests.program import digest_of, here, settings
from tests.run_fixtures import NO_REPORT, TINY, launched, write_config
from tests.tiny import make_sample
from tests.tiny_directory import CONFIG, write_model

SHARDED = ("mesh.shape='2,2,2'", "algorithm.beta=0.1", "algorithm.epochs=2")
ADAPTERS = ("model.lora.rank=2", "algorithm.beta=0.1")
FIXED = (*SHARDED, "algorithm.rows_per_device=2", "score.rows_per_device=2")


def foreseen(config: Path, *overrides: str) -> DryRunReport:
    report = make_dry_run_report(load(str(config), overrides, {}), resume="never")
    assert report is not None
    return report


def held(tree: Any) -> int:
    """Returns the bytes of a tree of arrays on the fullest device."""
    on_device = dict.fromkeys(jax.devices(), 0)
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            on_device[shard.device] += shard.data.nbytes
    return max(on_device.values())


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(SHARDED, id="sharded"),
        pytest.param(("model.dtype=bfloat16",), id="bfloat16"),
        pytest.param((*ADAPTERS, "mesh.shape='2,4,1'"), id="adapters"),
        pytest.param(("algorithm.name=ppo", "mesh.shape='2,2,2'"), id="critic"),
        pytest.param(
            (*ADAPTERS, f"{QUANTIZE_BASE_SETTING}=nf4", "mesh.shape='1,4,2'"), id="nf4", marks=pytest.mark.slow
        ),
    ],
)
def test_dry_run_reports_the_bytes_of_the_real_arrays(config: Path, overrides: tuple[str, ...]) -> None:
    report = foreseen(config, *overrides)
    launch, learning = launched(config, *overrides)
    session, has_adapters = launch.session, overrides[: len(ADAPTERS)] == ADAPTERS
    states = {"": learning.policy.initial_state(session.scoring.initial_trained_params())}
    policy = session.scoring.full_params(states[""].params)
    if learning.critic is not None and session.scoring.critic is not None:
        states["critic"] = learning.critic.initial_state(session.scoring.critic.load_params(session.mesh))
        assert report.memory["critic"]["gradients"] == held(states["critic"].params)
    for phase in report.memory.values():
        assert phase["weights"] == held(policy)
        # With adapters, the policy's frozen weights are the reference.
        assert phase.get("reference", 0) in ((0,) if has_adapters else (0, held(policy)))
        for name, state in states.items():
            assert phase.get(name, held(state.params)) == held(state.params)
            assert phase[f"{name}_optimizer".removeprefix("_")] == held(state) - held(state.params)
    assert ("reference" in report.memory["update"]) == ("algorithm.beta=0.1" in overrides and not has_adapters)
    assert report.memory["update"]["gradients"] == held(states[""].params)
    decode_weights, slots = session.to_decode_weights(policy), session.continuous_batching
    assert slots is not None and report.memory["rollout"]["decode_weights"] == held(decode_weights)
    slots.engine.open(decode_weights, session.rollout_request())
    assert report.memory["rollout"]["kv_cache"] == held(slots.engine.runner.cache)
    slots.engine.close()
    assert report.checkpoint_bytes == sum(array.nbytes for array in jax.tree.leaves(states))
    assert report.num_trained_parameters == sum(x.size for x in jax.tree.leaves(states[""].params))


@pytest.mark.parametrize(
    "overrides", [FIXED, (*SHARDED, "algorithm.max_tokens_per_device=64")], ids=["fixed", "packed"]
)
def test_dry_run_reports_the_micro_batches_of_the_real_update(config: Path, overrides: tuple[str, ...]) -> None:
    overrides = (*overrides, "algorithm.mini_batch_prompts=2")
    summary = foreseen(config, *overrides).update
    launch, learning = launched(config, *overrides)
    longest = max(launch.inputs.prompts, key=lambda prompt: len(prompt.token_ids))
    length = launch.resolved.settings.rollout.max_new_tokens
    zeros = np.zeros(length, np.float32)
    # Two groups of four, whose prompts are different but equally long, so that groups do not share them.
    samples = [
        replace(
            make_sample(np.zeros(length), group_id=i // 4, advantages=zeros, policy_logprobs=zeros),
            prompt=replace(longest, token_ids=np.roll(longest.token_ids, i // 4)),
        )
        for i in range(8)
    ]
    micro_batches = learning.policy.updater.micro_batcher(samples, launch.session.mesh).local_plan.micro_batches
    assert len(micro_batches) == summary.count
    largest = max(micro_batches, key=lambda one: len(one.rows) * one.shape.num_tokens)
    assert (len(largest.rows), largest.shape.num_tokens) == (4 * summary.rows_per_device, summary.tokens_per_row)


def test_dry_run_report_counts_steps_samples_tokens_and_flops(full_config: Path) -> None:
    report = foreseen(full_config)
    assert (report.prompts_per_step, report.samples_per_step) == (4, 16)
    assert (report.steps, report.optimizer_steps, report.mini_batches_per_step) == (12, 48, 2)
    assert report.epochs_of_data == 12 * 4 / 40
    assert report.max_completion_tokens_per_step == 16 * 4
    assert report.num_held_out == 16
    assert set(report.score) == {"policy", "reference"}
    assert report.score["policy"].count * report.score["policy"].rows_per_device * 8 >= 8
    # A prompt counts once for the four samples that share it, in rollout, two scoring passes and two epochs of updates.
    prompt = round(report.prompt_tokens_per_step / 16)
    lengths = np.array([prompt, prompt + 4])
    architecture = architecture_from_config(CONFIG)
    of_prompt, of_sample = forward_flops(architecture)(lengths).tolist()
    forward = 4 * of_prompt + 16 * (of_sample - of_prompt) + 64 * lm_head_flops(architecture)
    assert report.max_flops_per_step == (3 + 2 * 3) * forward


def test_a_dry_run_compiles_loads_and_writes_nothing(tmp_path: Path) -> None:
    # No other test has compiled a program for these sizes.
    sizes = {"hidden_size": 56, "intermediate_size": 72, "num_hidden_layers": 1}
    config = write_config(tmp_path, TINY + NO_REPORT, write_model(tmp_path / "model", **sizes))
    before = digest_of(tmp_path)
    with closing(CompilationCounter()) as counter:
        result = here("train", "--config", config, "--dry-run", *settings(*SHARDED))
        assert counter.take_count() == 0
    assert (result.exit_code, result.stderr) == (0, "")
    assert digest_of(tmp_path) == before
    assert not (tmp_path / "runs").exists()


def test_text_of_a_dry_run_includes_the_launch_notices(config: Path) -> None:
    overrides = settings("algorithm.name=dapo", "critic.lam=0.5")
    result = here("train", "--config", config, "--dry-run", *overrides)
    lines = result.stdout.splitlines()
    # The group filter of dapo may need more prompts.
    assert lines[:3] == [
        f"run         {config.parent / 'runs' / 'tiny'}: 4 steps, 4 optimizer steps, at least 0.4 epochs of the data",
        " " * 12 + "dapo (Yu et al. 2025): clip_high 0.28 (grpo: 0.2), filter zero_variance (grpo: none)",
        " " * 12 + "no effect without algorithm.estimator gae: critic.lam = 0.5 (from --set)",
    ]
    assert any(line.startswith("peak: ") and " of its " in line for line in lines)
    assert "does not fit" not in result.stdout


def test_json_of_a_dry_run_has_only_the_phases_of_the_run(config: Path) -> None:
    report = json.loads(
        here("train", "--config", config, "--dry-run", "--json", *settings("eval.every_steps=0")).stdout
    )
    assert report == json.loads(json.dumps(foreseen(config, "eval.every_steps=0").to_dict()))
    assert report["peak_bytes"] == max(sum(phase.values()) for phase in report["memory"].values())
    assert (list(report["memory"]), report["evaluation"], report["score"]) == (["rollout", "update"], None, {})


def test_dry_run_reports_memory_that_does_not_fit_or_is_unknown(config: Path) -> None:
    report = foreseen(config)
    text = replace(report, available_bytes=report.peak_bytes // 2).to_text()
    assert "200.0 % of its" in text and "this does not fit: lower rollout.prompts_per_step" in text
    # A smaller batch does not make weights, moments or gradients smaller.
    update = report.memory["update"]
    text = replace(report, memory={"update": update}, available_bytes=sum(update.values()) // 2).to_text()
    assert "this does not fit: split the weights over more devices" in text
    text = replace(report, available_bytes=None).to_text()
    assert "on each device, whose memory is unknown" in text and "does not fit" not in text


def test_a_dry_run_fails_for_the_same_inputs_as_the_launch(finished: Path, config: Path) -> None:
    for override, message in (
        ("mesh.shape='3,1,1'", "mesh.shape"),
        ("data.max_prompt_length=2", "data.max_prompt_length"),
    ):
        result = here("train", "--config", config, "--dry-run", *settings(override))
        assert (result.exit_code, result.stdout) == (2, "") and message in result.stderr
    occupied = settings(f"run.dir={finished.parent}")
    before = digest_of(finished)
    assert "already holds a run" in here("train", "--config", config, "--dry-run", *occupied).stderr
    assert here("train", "--config", config, "--dry-run", "--resume", "auto", *occupied).exit_code == 0
    assert digest_of(finished) == before
