"""Tests that `grpo train --dry-run` reports what a run does and stores, without doing it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.mesh.placement import abstract_arrays
from app.preflight.activation_memory import TEMPORARY_BUFFERS, NetworkPass, largest_micro_batch, residual_bytes
from app.preflight.dry_run import DryRunReport, make_dry_run_report
from app.preflight.memory import compute_step_shapes, memory_by_phase
from app.records.sample import Prompt, Sample
from app.tracking.compilation_counter import CompilationCounter
from app.training.learner import LearnerGroup, make_learner_group
from app.training.setup import RunSetup, prepare_run
from app.update.step import AccumulatedGradients
from settings import load
from tests.program import digest_of, here, settings
from tests.tiny import make_sample

SHARDED = ("mesh.shape='2,2,2'", "algorithm.beta=0.1", "algorithm.epochs=2")
FIXED = (*SHARDED, "algorithm.rows_per_device=2", "score.rows_per_device=2")


def launched(config: Path, *overrides: str) -> tuple[RunSetup, LearnerGroup]:
    resolved = load(str(config), overrides, {})
    with prepare_run(resolved, resume="never") as launch:
        return launch, make_learner_group(resolved.settings, launch.session)


def foreseen(config: Path, *overrides: str) -> DryRunReport:
    found = make_dry_run_report(load(str(config), overrides, {}), resume="never")
    assert found is not None
    return found


def held(tree: Any) -> int:
    """Returns the bytes that the fullest device really holds."""
    on_device = dict.fromkeys(jax.devices(), 0)
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            on_device[shard.device] += shard.data.nbytes
    return max(on_device.values())


def recording(function: Callable[..., Any], sizes: list[int], cache_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Wraps a function to record the size of the cache in its result."""

    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        sizes.append(held(cache_of(result)))
        return result

    return recorded


def longest_first(prompts: list[Prompt]) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: -len(prompt.token_ids))


@pytest.mark.parametrize("overrides", [SHARDED, ("model.dtype=bfloat16",)], ids=["dp_fsdp_tp", "bfloat16"])
def test_the_bytes_are_those_of_the_real_arrays(
    config: Path, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = foreseen(config, *overrides).memory
    launch, learning = launched(config, *overrides)
    session = launch.session
    params = session.load_params()
    state = learning.policy.initial_state(params)
    weights = session.engine.to_decode_weights(params)
    caches, slots = [], []
    engine = session.engine
    monkeypatch.setattr(engine, "_prefill", recording(engine._prefill, caches, lambda result: result[1]))
    monkeypatch.setattr(engine, "_open", recording(engine._open, slots, lambda result: result[1].cache))
    session.sample(weights, longest_first(list(launch.inputs.prompts))[:4], policy_version=0)
    for phase in memory.values():
        assert phase["weights"] == held(params)
        assert phase["optimizer"] == held(state) - held(params)
        assert phase.get("reference", held(params)) == held(params)
    assert memory["rollout"]["decode_weights"] == held(weights)
    assert [memory["rollout"]["prompt_cache"]] == caches
    assert [memory["rollout"]["kv_cache"]] == slots
    assert ("reference" in memory["update"]) == (overrides == SHARDED)


@pytest.mark.parametrize(
    "overrides", [FIXED, (*SHARDED, "algorithm.max_tokens_per_device=64")], ids=["fixed", "packed"]
)
def test_the_micro_batches_are_those_of_the_real_update(config: Path, overrides: tuple[str, ...]) -> None:
    overrides = (*overrides, "algorithm.mini_batch_prompts=2")
    foretold = foreseen(config, *overrides).update
    launch, learning = launched(config, *overrides)
    samples = longest_samples(launch, 8)
    micro_batches = learning.policy.updater.micro_batcher(samples, launch.session.mesh).local_plan.micro_batches
    assert len(micro_batches) == foretold.count
    fullest = max(micro_batches, key=lambda one: len(one.rows) * one.shape.num_tokens)
    assert (len(fullest.rows), fullest.shape.num_tokens) == (4 * foretold.rows_per_device, foretold.tokens_per_row)


def longest_samples(launch: RunSetup, count: int) -> list[Sample]:
    """Returns groups of four samples of the maximum length."""
    prompts = longest_first(list(launch.inputs.prompts))
    length = launch.resolved.settings.rollout.max_new_tokens
    zeros = np.zeros(length, np.float32)
    made = [
        make_sample(np.zeros(length), group_id=i // 4, advantages=zeros, policy_logprobs=zeros) for i in range(count)
    ]
    # Other words of the same length, so that groups do not share them.
    longest = prompts[0].token_ids
    return [replace(s, prompt=replace(prompts[0], token_ids=np.roll(longest, s.group_id))) for s in made]


def test_it_counts_what_a_run_does(full_config: Path) -> None:
    report = foreseen(full_config)
    assert (report.prompts_per_step, report.samples_per_step) == (4, 16)
    assert (report.steps, report.optimizer_steps, report.mini_batches_per_step) == (12, 48, 2)
    assert report.epochs_of_data == 12 * 4 / 40
    assert report.max_completion_tokens_per_step == 16 * 4
    assert report.num_held_out == 16
    assert set(report.score) == {"policy", "reference"}
    assert report.score["policy"].count * report.score["policy"].rows_per_device * 8 >= 8
    # A prompt counts once for the four samples that share it, in every pass.
    tokens = report.prompt_tokens_per_step / 4 + 64
    passes = 2 * 3 * tokens + 6 * tokens * 2
    assert report.max_flops_per_step == pytest.approx(report.num_parameters * passes)


def test_nothing_is_scored_or_evaluated_where_nothing_asks_for_it(config: Path) -> None:
    report = foreseen(config, "eval.every_steps=0")
    assert list(report.memory) == ["rollout", "update"]
    assert report.evaluation is None and report.score == {}


def test_nothing_is_compiled_loaded_or_written(config: Path, tiny_model: Path) -> None:
    before = digest_of(config.parent)
    jax.clear_caches()
    with closing(CompilationCounter()) as counter:
        result = here("train", "--config", config, "--dry-run", *settings(*SHARDED))
        assert counter.take_count() == 0
    assert result.exit_code == 0, result.stderr
    assert digest_of(config.parent) == before
    assert not (config.parent / "runs").exists()


def test_a_person_reads_a_table(config: Path) -> None:
    result = here("train", "--config", config, "--dry-run")
    lines = result.stdout.splitlines()
    assert (
        lines[0] == f"run         {config.parent / 'runs' / 'tiny'}: 4 steps, 4 optimizer steps, 0.4 epochs of the data"
    )
    header = next(i for i, line in enumerate(lines) if line.startswith("MiB on each device"))
    assert lines[header].split()[-3:] == ["rollout", "evaluation", "update"]
    assert lines[header + 1].startswith("weights   ")
    assert any(line.startswith("in all ") for line in lines)
    assert any(line.startswith("peak ") and " of its " in line for line in lines)
    assert "does not fit" not in result.stdout
    assert result.stderr == ""


def test_a_table_tells_what_a_launch_tells_and_that_a_filter_asks_for_more_prompts(config: Path) -> None:
    chosen = settings("algorithm.name=dapo", "algorithm.vtrace_max_ratio=2")
    lines = here("train", "--config", config, "--dry-run", *chosen).stdout.splitlines()
    assert lines[0].endswith("4 optimizer steps, at least 0.4 epochs of the data")
    assert lines[1].strip() == "dapo (Yu et al. 2025): clip_high 0.28 (grpo: 0.2), filter zero_variance (grpo: none)"
    assert lines[2].strip() == (
        "no effect under algorithm.name = 'dapo' (from --set): algorithm.vtrace_max_ratio = 2.0 (from --set)"
    )


def test_a_program_reads_the_same_as_json(config: Path) -> None:
    found = json.loads(here("train", "--config", config, "--dry-run", "--json").stdout)
    assert found == json.loads(json.dumps(foreseen(config).to_dict()))
    assert found["peak_bytes"] == max(sum(phase.values()) for phase in found["memory"].values())


def test_what_does_not_fit_is_said_and_what_is_not_known_is_not_guessed(config: Path) -> None:
    report = foreseen(config)
    text = replace(report, available_bytes=report.peak_bytes // 2).to_text()
    assert "200% of its" in text and "this does not fit: lower algorithm.max_tokens_per_device" in text
    fixed = foreseen(config, *FIXED)
    text = replace(fixed, available_bytes=1, memory={"update": fixed.memory["update"]}).to_text()
    assert "this does not fit: lower algorithm.rows_per_device" in text
    text = replace(report, available_bytes=None).to_text()
    assert "the memory of a device is not known" in text and "does not fit" not in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=0", "run.steps"),
        ("rollout.group_size=1", "at least 2"),
        ("mesh.shape='3,1,1'", "mesh.shape"),
        ("algorithm.max_tokens_per_device=8", "algorithm.max_tokens_per_device = 8"),
        ("model.path=builtin:huge", "model.path"),
        ("data.max_prompt_length=2", "data.max_prompt_length"),
    ],
)
def test_what_a_launch_refuses_a_dry_run_refuses(config: Path, override: str, message: str) -> None:
    result = here("train", "--config", config, "--dry-run", *settings(override))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_an_occupied_directory_is_refused_unless_resumed(finished: Path, config: Path) -> None:
    occupied = settings(f"run.dir={finished.parent}")
    before = digest_of(finished)
    assert "already holds a run" in here("train", "--config", config, "--dry-run", *occupied).stderr
    assert here("train", "--config", config, "--dry-run", "--resume", "auto", *occupied).exit_code == 0
    assert digest_of(finished) == before


def test_the_estimates_are_what_the_compiler_reserves_or_nearly(config: Path) -> None:
    overrides = ("mesh.shape='1,8,1'", "rollout.max_new_tokens=64", "rollout.prompts_per_step=64")
    launch, learning = launched(config, *overrides, "algorithm.max_tokens_per_device=4096")
    shapes = compute_step_shapes(launch.session, learning, launch.inputs.prompts, ())
    update = memory_by_phase(launch.session, learning, shapes)["update"]
    foreseen = sum(update.get(name, 0) for name in ("micro_batch_gradients", *TEMPORARY_BUFFERS))
    assert temporary_bytes(launch, learning) == pytest.approx(foreseen, rel=0.25)
    shape = largest_micro_batch(shapes.update).shape
    network = NetworkPass.of_policy(launch.session)
    kept = {remat: residual_bytes(network, 32, shape, remat=remat) for remat in ("none", "block")}
    assert kept["block"] < kept["none"] / 4


def temporary_bytes(launch: RunSetup, learning: LearnerGroup) -> int:
    """Returns the temporary bytes that XLA reserves on each device for a micro-batch of the longest samples."""
    samples = longest_samples(launch, 256)
    batch = learning.policy.updater._pack_micro_batches(
        samples, learning.policy.updater.micro_batcher(samples, launch.session.mesh)
    )[0]
    step: Any = learning.policy.updater.step
    params, temperature = abstract_arrays(learning.policy.shapes, learning.policy.shardings).params, jnp.float32(1)
    with jax.set_mesh(launch.session.mesh):
        parts = jax.eval_shape(step._objective, params, None, batch, temperature)[1]
        total = AccumulatedGradients(params, parts)
        compiled = step._add.lower(total, params, None, batch, temperature).compile()
    return compiled.memory_analysis().temp_size_in_bytes
