"""Tests of `grpo inspect-mesh` on real and simulated devices: placement, memory and limits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.mesh import topology
from app.mesh.placement import bytes_per_device
from app.preflight.activation_memory import num_decode_rows
from app.preflight.batch_limits import QUOTA_STEP, USABLE_MEMORY_FRACTION, find_batch_limits
from app.preflight.config_only_spec import read_config_only_spec
from app.preflight.inspect_mesh import MeshInspection, build_mesh_inspection, make_longest_prompt
from app.preflight.memory import compute_step_shapes, memory_by_phase
from app.runtime.session import Session
from app.training.learner import make_learner_group
from settings import InputError, Settings, load
from settings.checks.commands import check_for_inspect_mesh
from tests.program import DEADLINE_S, here, of_tiny, settings, started

GIB = 2**30


@pytest.fixture(autouse=True)
def real_devices_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the simulation of devices after each test."""
    monkeypatch.setattr(topology, "_simulated_slice", None)


def inspected(model: Path, *overrides: str) -> dict[str, Any]:
    result = here("inspect-mesh", *of_tiny(model), *settings(*overrides), "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def loaded(model: Path, *overrides: str) -> Settings:
    """Loads the settings of a tiny run; the last of repeated settings applies."""
    chosen = dict(text.split("=", 1) for text in (*of_tiny(model)[1::2], *overrides))
    return load(None, [f"{name}={value}" for name, value in chosen.items()], {}).settings


def opened(chosen: Settings) -> tuple[Session, MeshInspection]:
    outline = read_config_only_spec(chosen)
    topology.initialize_distributed(chosen.mesh)
    session = Session.open(chosen, outline.model, outline.critic)
    return session, build_mesh_inspection(session, outline, compiles=False)


def test_it_speaks_to_people_and_programs(tiny_model: Path) -> None:
    text = here("inspect-mesh", *of_tiny(tiny_model), *settings("mesh.shape=2,2,2"))
    assert text.exit_code == 0, text.stderr
    assert text.stdout.startswith("8 x cpu (cpu), ")
    for said in ("mesh dp 2 x fsdp 2 x tp 2", "MiB on each device", "rollout: one batch of 16 rows", "at most"):
        assert said in text.stdout
    report = inspected(tiny_model)
    assert report["shape"] == {"dp": 1, "fsdp": 8, "tp": 1}
    assert report["samples_per_step"] == 16 and report["samples_per_device"] == 2
    names = [weight["name"] for weight in report["weights"]]
    assert "embedding" in names and "blocks.query.kernel" in names
    assert report["peak_bytes"] == max(sum(held.values()) for held in report["memory"].values())


def test_a_shape_that_does_not_fit_is_refused(tiny_model: Path) -> None:
    result = here("inspect-mesh", *of_tiny(tiny_model), *settings("mesh.shape=1,3,1"))
    assert result.exit_code == 2
    assert "mesh.shape: '1,3,1' needs 3 devices, but there are 8" in result.stderr


def test_a_configuration_is_all_of_a_model_that_is_read(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    assert inspected(tmp_path) == inspected(tiny_model)


@pytest.mark.parametrize("preset", ["quickstart_ppo", "gsm8k_qwen2_5_3b_v4_16"])
def test_presets_can_be_looked_at(preset: str, tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text()) | {"max_position_embeddings": 32_768}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = here("inspect-mesh", "--config", preset, *settings(f"model.path={tmp_path}", "mesh.pretend=v4-16"))
    assert result.exit_code == 0, result.stderr
    assert ("weights of the critic" in result.stdout) == preset.endswith("ppo")


def test_a_pretended_slice_has_its_hosts_memory_and_devices(tiny_model: Path) -> None:
    report = inspected(tiny_model, "mesh.pretend=v4-16")
    assert report["shape"] == {"dp": 2, "fsdp": 4, "tp": 1}
    assert report["topology"]["memory_bytes"] == 32 * GIB
    assert report["topology"]["pretended"] == "v4-16"
    assert report["num_processes"] == 2 and report["samples_per_step"] == 32
    assert [device["process"] for device in report["devices"]] == [0] * 4 + [1] * 4
    # Split over four devices of a host, not over eight.
    assert (
        report["memory"]["update"]["weights"]
        == 2 * inspected(tiny_model, "mesh.pretend=v5e-8")["memory"]["update"]["weights"]
    )


def test_it_says_what_a_launch_would_say_of_the_mesh(tiny_model: Path) -> None:
    chosen = ("mesh.pretend=v4-16", "mesh.shape=1,8,1", "rollout.placement=global")
    _, found = opened(loaded(tiny_model, *chosen))
    arithmetic, across = found.to_dict()["notes"]
    assert arithmetic.startswith("2 hosts, 8 devices (dp 1, fsdp 8, tp 1): 4 prompts x 4 samples x 2 hosts = 32")
    assert across.startswith("mesh.shape: fsdp 8 spans 2 hosts")
    assert f"{across}\n" in found.to_text()
    assert found.generation.startswith("one batch of all 2 hosts, 16 rows with a cache of ")


def test_a_slice_of_any_size_needs_no_more_than_this_process(tiny_model: Path) -> None:
    arguments = ["inspect-mesh", *of_tiny(tiny_model), *settings("mesh.pretend=v5e-256")]
    with started(*arguments, "--json") as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["num_devices"] == 256 and report["topology"]["num_hosts"] == 64
    assert report["topology"]["local_devices"] == [0, 1, 2, 3]


def test_workers_are_those_of_a_host(tiny_model: Path) -> None:
    chosen = (
        *("rollout.scheduler=adaptive", "rollout.workers.fast.count=2", "rollout.workers.fast.slots=4"),
        *("rollout.workers.heavy.devices=[3]", "rollout.workers.heavy.slots=8", "mesh.pretend=v4-16"),
    )
    session, found = opened(loaded(tiny_model, *chosen))
    assert [(one.name, one.devices, one.slots) for one in found.workers] == [
        ("fast-0", (0,), 4),
        ("fast-1", (1,), 4),
        ("heavy-0", (3,), 8),
    ]
    assert session.workers is not None
    footprints = [worker.engine.footprint() for worker in session.workers.workers]
    assert [one.cache_bytes for one in found.workers] == [
        bytes_per_device((footprint.slots, footprint.prompts)) for footprint in footprints
    ]
    assert found.largest[0].setting == "rollout.workers.heavy.slots"
    assert "fast-1   1 " in found.to_text()


def phases_at(chosen: Settings) -> dict[str, int]:
    session, _ = opened(chosen)
    learning = make_learner_group(chosen, session)
    prompt = make_longest_prompt(chosen.data.max_prompt_length)
    memory = memory_by_phase(session, learning, compute_step_shapes(session, learning, [prompt], ()))
    return {phase: sum(held.values()) for phase, held in memory.items()}


def test_the_largest_batch_fits_and_a_larger_one_does_not(tiny_model: Path) -> None:
    chosen = loaded(tiny_model, "mesh.pretend=v4-16", "eval.every_steps=0")
    session, found = opened(chosen)
    learning = make_learner_group(chosen, session)
    shapes = compute_step_shapes(session, learning, [make_longest_prompt(chosen.data.max_prompt_length)], ())
    there = 2 * max(sum(found.memory["rollout"].values()), sum(found.memory["update"].values()))
    prompts, quota = find_batch_limits(session, shapes, dict(found.memory), available_bytes=there)
    assert (prompts.setting, prompts.phase) == ("rollout.prompts_per_step", "rollout")
    assert (quota.setting, quota.phase) == ("algorithm.max_tokens_per_device", "update")
    assert prompts.fits is not None and prompts.fits > chosen.rollout.prompts_per_step

    def at(value: int) -> int:
        rollout = chosen.rollout.model_copy(update={"prompts_per_step": value})
        algorithm = chosen.algorithm.model_copy(update={"mini_batch_prompts": value})
        return phases_at(chosen.model_copy(update={"rollout": rollout, "algorithm": algorithm}))["rollout"]

    assert at(prompts.fits) == pytest.approx(prompts.bytes_at_fits, rel=1e-3)
    assert at(prompts.fits) <= USABLE_MEMORY_FRACTION * there < at(prompts.fits + 4)


ON_WORKERS = (
    *("rollout.scheduler=adaptive", "rollout.workers.fast.slots=6", "rollout.workers.heavy.slots=32"),
    "rollout.workers.heavy.devices=[3]",
)


@pytest.mark.parametrize(
    ("generator", "scope"), [(("rollout.slots=16",), "rollout"), (ON_WORKERS, "rollout.workers.heavy")]
)
def test_the_most_slots_fit_and_more_do_not(tiny_model: Path, generator: tuple[str, ...], scope: str) -> None:
    chosen = loaded(tiny_model, "mesh.pretend=v4-16", "eval.every_steps=0", *generator)
    session, found = opened(chosen)
    learning = make_learner_group(chosen, session)
    shapes = compute_step_shapes(session, learning, [make_longest_prompt(chosen.data.max_prompt_length)], ())
    there = 4 * sum(found.memory["rollout"].values())
    slots = find_batch_limits(session, shapes, dict(found.memory), available_bytes=there)[0]
    assert slots.setting == f"{scope}.slots"
    assert slots.fits is not None and slots.fits > slots.now

    def at(value: int) -> int:
        more = tuple(text for text in generator if not text.startswith(slots.setting))
        return phases_at(loaded(tiny_model, "mesh.pretend=v4-16", *more, f"{slots.setting}={value}"))["rollout"]

    assert at(slots.fits) == pytest.approx(slots.bytes_at_fits, rel=1e-3)
    # Four devices share the slots of a host, and a worker has one.
    assert at(slots.fits) <= USABLE_MEMORY_FRACTION * there < at(slots.fits + (4 if scope == "rollout" else 1))


def test_logits_are_those_of_the_devices_that_draw(tiny_model: Path) -> None:
    session, found = opened(loaded(tiny_model, "mesh.pretend=v4-16", *ON_WORKERS))
    a_row = 4 * session.model_spec.architecture.vocab_size
    assert found.memory["rollout"]["logits"] == 32 * a_row
    assert session.workers is not None
    for worker in session.workers.workers:
        worker.device = "0"
    # One after the other has its turn there, and the programs of all may wait at once.
    assert num_decode_rows(session, session.workers.footprint()) == 6 + 32


def test_a_quota_is_raised_until_memory_or_samples_end(tiny_model: Path) -> None:
    chosen = loaded(tiny_model, "rollout.prompts_per_step=512", "algorithm.max_tokens_per_device=256")
    session, found = opened(chosen)
    learning = make_learner_group(chosen, session)
    shapes = compute_step_shapes(session, learning, [make_longest_prompt(chosen.data.max_prompt_length)], ())
    memory = dict(found.memory)
    endless = find_batch_limits(session, shapes, memory, available_bytes=2**50)[1]
    assert endless.more_changes_nothing and "any fits" in endless.to_text()
    bounded = find_batch_limits(session, shapes, memory, available_bytes=2 * sum(memory["update"].values()))[1]
    assert bounded.fits is not None and 256 <= bounded.fits < (endless.fits or 0) and bounded.fits % QUOTA_STEP == 0
    none = find_batch_limits(session, shapes, memory, available_bytes=1000)
    assert [one.fits for one in none] == [None, None]
    assert "nothing fits" in none[0].to_text()


def test_compiled_programs_take_the_arguments_that_the_table_foresees(tiny_model: Path) -> None:
    report = inspected(tiny_model, "mesh.pretend=v4-16", "algorithm.beta=0.1")
    assert report["programs"] == []
    result = here(
        "inspect-mesh",
        *of_tiny(tiny_model),
        *settings("mesh.pretend=v4-16", "algorithm.beta=0.1"),
        "--compile",
        "--json",
    )
    assert result.exit_code == 0, result.stderr
    programs = {(one["phase"], one["name"]): one for one in json.loads(result.stdout)["programs"]}
    assert set(programs) == {
        *(("rollout", "prefill"), ("rollout", "decode"), ("score", "reference")),
        *(("update", "gradients"), ("update", "optimizer")),
    }
    assert {one["backend"] for one in programs.values()} == {"cpu"}
    memory = report["memory"]
    state = memory["update"]["weights"] + memory["update"]["optimizer"]
    # Beside what the table tells, a few integers for each row.
    small = 20_000
    for name, held in {
        ("rollout", "decode"): memory["rollout"]["decode_weights"] + memory["rollout"]["kv_cache"],
        ("score", "reference"): memory["score"]["reference"],
        ("update", "gradients"): memory["update"]["weights"] + memory["update"]["gradients"],
        ("update", "optimizer"): state + memory["update"]["gradients"],
    }.items():
        assert held <= programs[name]["argument_bytes"] <= held + small
    assert programs["update", "optimizer"]["aliased_bytes"] == pytest.approx(state, abs=small)


def test_a_dry_run_may_pretend(config: Path) -> None:
    result = here("train", "--config", config, "--dry-run", *settings("mesh.pretend=v5p-16"))
    assert result.exit_code == 0, result.stderr
    assert "mesh        8 x TPU v5 on 2 host(s): dp 2, fsdp 4, tp 1 (pretended: none of it is there)" in result.stdout
    assert "of its 95.00 GiB" in result.stdout


@pytest.mark.parametrize(
    "verb",
    [
        ("train",),
        ("rollout", "--out", "samples.jsonl"),
        ("score", "--input", "samples.jsonl", "--out", "scored.jsonl"),
        ("gae", "--input", "samples.jsonl", "--out", "credited.jsonl"),
    ],
)
def test_only_looking_may_be_done_on_pretended_devices(verb: tuple[str, ...], tmp_path: Path) -> None:
    arguments = [str(tmp_path / one) if one.endswith(".jsonl") else one for one in verb]
    result = here(*arguments, *settings("mesh.pretend=v4-16"))
    assert result.exit_code == 2
    assert (
        "mesh.pretend = 'v4-16' (from --set): only grpo train --dry-run and grpo inspect-mesh accept" in result.stderr
    )


def test_a_slice_that_there_is_not_is_refused(tiny_model: Path) -> None:
    result = here("inspect-mesh", *of_tiny(tiny_model), *settings("mesh.pretend=v4-17"))
    assert result.exit_code == 2
    assert "error: mesh.pretend: got 'v4-17'; did you mean v4-16?; known: " in result.stderr


def test_of_a_slice_and_real_devices_the_later_counts(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text("mesh: {cpu_devices: 4, coordinator_address: auto, platform: tpu}\n")
    found = load(str(real), ["mesh.pretend=v4-16"], {})
    check_for_inspect_mesh(found)
    mesh = found.settings.mesh
    assert (mesh.pretend, mesh.cpu_devices, mesh.coordinator_address, mesh.platform) == ("v4-16", None, None, "auto")
    found = load(None, ["mesh.pretend=v4-16"], {"GRPO__MESH__CPU_DEVICES": "4"})
    assert (found.settings.mesh.pretend, found.settings.mesh.cpu_devices) == (None, 4)
    assert found.notices == ("the environment's settings of the mesh override mesh.pretend 'v4-16' from --set",)


def test_a_slice_and_real_devices_in_one_layer_are_refused() -> None:
    found = load(None, ["mesh.pretend=v4-16", "mesh.cpu_devices=4"], {})
    message = (
        "mesh.pretend = 'v4-16' (from --set) and mesh.cpu_devices = 4 (from --set) ask for pretended and for real "
        "devices; leave one of the two out"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        check_for_inspect_mesh(found)
