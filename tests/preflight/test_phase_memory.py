"""The memory of a step: arrays from their shapes, and with `--compile` what its programs need while they run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.preflight import compiled_programs
from app.preflight.compiled_programs import check_fits
from settings import InputError
from tests.program import here, of_tiny, settings
from tests.tiny_directory import write_reward_model

GIB = 2**30
PENALISED = settings("algorithm.beta=0.1", "algorithm.max_tokens_per_device=256")


def report_of(*arguments: str | Path) -> dict[str, Any]:
    result = here(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def total(buffers: Mapping[str, int], *, without: str = "") -> int:
    return sum(size for name, size in buffers.items() if name != without)


def test_the_compiled_memory_of_a_phase_is_that_of_its_arrays_and_of_its_fullest_program(tiny_model: Path) -> None:
    arguments = ("inspect-mesh", *of_tiny(tiny_model), *PENALISED)
    arrays, report = report_of(*arguments)["memory"], report_of(*arguments, "--compile")
    memory = report["memory"]
    temporaries = {(one["phase"], one["name"]): one["temporary_bytes"] for one in report["programs"]}
    assert set(arrays) == {"rollout", "evaluation", "score", "update"}
    # An evaluation runs the programs of the rollout.
    of_phases = {name: "rollout" if name == "evaluation" else name for name in arrays}
    assert {phase for phase, _ in temporaries} == {*of_phases.values()}
    for phase, runs in of_phases.items():
        largest = max(size for (other, _), size in temporaries.items() if other == runs)
        assert memory[phase] == arrays[phase] | {"temporaries": largest, "padding": 0}
    assert report["peak_bytes"] == max(map(total, memory.values()))


def test_an_evaluation_in_slots_of_its_own_has_programs_of_its_own(tiny_model: Path) -> None:
    of_workers = ("rollout.scheduler=adaptive", "rollout.workers.fast.count=4", "rollout.workers.heavy.count=4")
    chosen = settings(*of_workers, "rollout.max_staleness=1", "env.source=guess_number")
    arguments = ("inspect-mesh", *of_tiny(tiny_model), *chosen)
    arrays, report = report_of(*arguments)["memory"], report_of(*arguments, "--compile")
    programs = {(one["phase"], one["name"]): one["temporary_bytes"] for one in report["programs"]}
    for phase in ("rollout", "evaluation"):
        largest = max(size for (other, _), size in programs.items() if other == phase)
        assert report["memory"][phase] == arrays[phase] | {"temporaries": largest, "padding": 0}


def test_critic_and_reward_model_have_programs_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    judge = write_reward_model(tmp_path / "judge")
    chosen = settings(f"reward.model={judge}", "algorithm.name=ppo", "eval.every_steps=0")
    arguments = ("inspect-mesh", *of_tiny(tiny_model), *chosen)
    arrays, report = report_of(*arguments)["memory"], report_of(*arguments, "--compile")
    programs = {(one["phase"], one["name"]): one["temporary_bytes"] for one in report["programs"]}
    for phase, name in (("reward", "model"), ("critic", "gradients")):
        assert report["memory"][phase] == arrays[phase] | {"temporaries": programs[phase, name], "padding": 0}
    assert {"policy", "reference", "critic"} >= {name for phase, name in programs if phase == "score"} >= {"critic"}


def test_a_dry_run_counts_the_programs_of_every_phase(config: Path) -> None:
    arguments = ("train", "--config", config, "--dry-run")
    arrays, report = report_of(*arguments)["memory"], report_of(*arguments, "--compile")
    assert set(report["memory"]) == set(arrays) == {"evaluation", *(one["phase"] for one in report["programs"])}
    assert all(phase["temporaries"] > 0 for phase in report["memory"].values())
    assert report["peak_bytes"] == max(map(total, report["memory"].values())) > max(map(total, arrays.values()))


def test_only_a_dry_run_of_training_compiles_without_running(config: Path) -> None:
    result = here("train", "--config", config, "--compile")
    assert result.exit_code == 2 and "--compile needs --dry-run" in result.stderr


def test_a_program_that_does_not_fit_is_named_with_its_arrays_and_a_way_out() -> None:
    buffers = {"weights": 6 * GIB, "optimizer": 8 * GIB, "gradients": 0, "temporaries": 4 * GIB}
    with pytest.raises(InputError) as raised:
        check_fits("update", "gradients", buffers, available_bytes=16 * GIB)
    assert str(raised.value) == (
        "update: gradients does not fit: it needs 18.00 GiB of the 16.00 GiB of a device, 2.00 GiB too much: "
        "optimizer moments 8.00 GiB, weights 6.00 GiB, temporaries of a program 4.00 GiB. Lower "
        "algorithm.max_tokens_per_device or rows_per_device, set model.remat: block, or split the weights over more "
        "devices with mesh.shape"
    )
    for role in ("policy", "reference", "critic"):
        with pytest.raises(InputError, match=rf"Lower score\.{role}\.max_tokens_per_device or rows_per_device"):
            check_fits("score", role, buffers, available_bytes=16 * GIB)
    with pytest.raises(InputError, match=r"Lower score\.reward\.max_tokens_per_device or rows_per_device"):
        check_fits("reward", "model", buffers, available_bytes=16 * GIB)
    check_fits("update", "gradients", buffers, available_bytes=18 * GIB)
    check_fits("update", "gradients", buffers, available_bytes=None)


def test_a_run_that_does_not_fit_ends_before_it_starts(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("train", "--config", config, "--dry-run")
    memory = report_of(*arguments)["memory"]
    # All arrays fit, and so no phase is too large by its shapes.
    monkeypatch.setattr(compiled_programs, "device_memory_bytes", lambda: max(map(total, memory.values())))
    assert here(*arguments).exit_code == 0
    result = here(*arguments, "--compile")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: rollout: prefill does not fit: it needs ")
