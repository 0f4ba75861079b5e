"""Tests `grpo inspect-mesh --compile` for the CPU, and for TPUs and GPUs without such devices."""

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from app.mesh.chips import SLICE_SIZES, TPU_CHIPS, TpuChip, parse_slice
from app.mesh.devices import compile_only_devices
from app.preflight import compiled_programs
from app.preflight.compiled_programs import check_fits
from settings import InputError
from tests.program import here, of_tiny, settings, succeeded
from tests.tiny_directory import write_reward_model

NAMES = {
    *(("rollout", "prefill"), ("rollout", "decode"), ("score", "reference")),
    *(("update", "gradients"), ("update", "optimizer")),
}
GIB = 2**30
PENALISED = ("algorithm.beta=0.1", "eval.every_steps=0")

pytestmark = pytest.mark.usefixtures("real_devices_again")


@pytest.fixture
def libtpu() -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")


def report_of(*arguments: str | Path) -> dict[str, Any]:
    result = succeeded(here(*arguments, "--json"))
    return json.loads(result.stdout)


def compiled(model: Path, *overrides: str, hlo: Path | None = None) -> dict[str, Any]:
    folder = [] if hlo is None else ["--hlo", hlo]
    return report_of("inspect-mesh", *of_tiny(model), *settings(*overrides), "--compile", *folder)


def by_name(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["phase"], one["name"]): one for one in report["programs"]}


def test_bytes_of_compiled_programs_agree_with_the_memory_table(tiny_model: Path, tmp_path: Path) -> None:
    chosen = (*PENALISED, f"reward.model={write_reward_model(tmp_path / 'judge')}")
    report = compiled(tiny_model, *chosen)
    arrays = report_of("inspect-mesh", *of_tiny(tiny_model), *settings(*chosen))["memory"]
    programs, memory = by_name(report), report["memory"]
    assert set(memory) == set(arrays) == {phase for phase, _ in programs}
    for phase, buffers in arrays.items():
        largest = max(one["temporary_bytes"] for (of, _), one in programs.items() if of == phase)
        assert largest > 0 and memory[phase] == buffers | {"temporaries": largest, "padding": 0}
    assert report["peak_bytes"] == max(sum(buffers.values()) for buffers in memory.values())
    assert set(programs) == NAMES | {("reward", "model")}
    assert {(one["backend"], one["collective_bytes"]) for one in programs.values()} == {("cpu", None)}
    state = memory["update"]["weights"] + memory["update"]["optimizer"]
    # Arguments are the buffers of the table and a few integers for each row.
    small = 20_000
    for name, size in {
        ("rollout", "decode"): memory["rollout"]["decode_weights"] + memory["rollout"]["kv_cache"],
        ("score", "reference"): memory["score"]["reference"],
        ("update", "gradients"): memory["update"]["weights"] + memory["update"]["gradients"],
        ("update", "optimizer"): state + memory["update"]["gradients"],
    }.items():
        assert size <= programs[name]["argument_bytes"] <= size + small
    assert programs["update", "optimizer"]["aliased_bytes"] == pytest.approx(state, abs=small)


ATTENTION = {"attention_forward", "attention_backward", "attention_decode"}
KERNELS = ATTENTION | {"threshold_by_count", "threshold_by_weight"}


@pytest.mark.slow
def test_a_cpu_process_compiles_a_step_for_tpus_with_their_kernels(tiny_model, tmp_path, libtpu):
    overrides = (*PENALISED, "rollout.top_p=0.95", "mesh.pretend=v4-16")
    report = compiled(tiny_model, *overrides, hlo=tmp_path / "texts")
    programs = by_name(report)
    assert set(programs) == NAMES
    assert report["num_hosts"] == 2
    for (phase, name), one in programs.items():
        assert one["backend"] == "tpu"
        text = (tmp_path / "texts" / f"{phase}_{name}.hlo").read_text()
        kernels = {kernel for kernel in KERNELS if f"%{kernel}" in text}
        expected = {"prefill": {"attention_forward"}, "reference": {"attention_forward"}}
        expected["gradients"] = {"attention_forward", "attention_backward"}
        expected["decode"] = {"attention_decode", "threshold_by_count", "threshold_by_weight"}
        assert kernels == expected.get(name, set())
    assert programs["update", "gradients"]["collective_bytes"].get("all-gather", 0) > 0


@pytest.mark.parametrize("chip", TPU_CHIPS.values(), ids=list(TPU_CHIPS))
def test_libtpu_describes_every_slice_of_the_table(chip: TpuChip, libtpu: None) -> None:
    for size in SLICE_SIZES[chip.cores_in_name]:
        slice = parse_slice(f"{chip.name}-{size}")
        found = compile_only_devices(slice)
        assert (len(found), len({device.process_index for device in found})) == (slice.num_chips, slice.num_hosts)
        assert {device.device_kind.startswith(chip.device_kind) for device in found} == {True}


def test_a_slice_unknown_to_libtpu_raises_one_error(monkeypatch: pytest.MonkeyPatch, libtpu: None) -> None:
    unknown = parse_slice("v5e-8")
    monkeypatch.setattr(type(unknown), "topology_name", "v9:2x4")
    with pytest.raises(InputError, match=r"mesh.pretend: cannot compile for v5e-8: .*pip install -e '.\[tpu\]'"):
        compile_only_devices(unknown)


def total(buffers: Mapping[str, int]) -> int:
    return sum(buffers.values())


@pytest.mark.slow
def test_dry_run_with_compile_counts_the_temporaries_of_every_phase(config: Path, tmp_path: Path) -> None:
    """While workers are busy, evaluations have additional slots and therefore their own programs."""
    workers = ("rollout.scheduler=adaptive", "rollout.workers.fast.count=4", "rollout.workers.heavy.count=4")
    judge = write_reward_model(tmp_path / "judge")
    chosen = (*workers, "rollout.max_staleness=1", f"reward.model={judge}", "algorithm.name=ppo")
    arguments = ("train", "--config", config, "--dry-run", *settings(*chosen))
    arrays, report = report_of(*arguments)["memory"], report_of(*arguments, "--compile")
    programs = {(one["phase"], one["name"]): one["temporary_bytes"] for one in report["programs"]}
    assert set(report["memory"]) == set(arrays) == {phase for phase, _ in programs}
    assert {("reward", "model"), ("critic", "gradients"), ("score", "critic")} <= set(programs)
    for phase, buffers in arrays.items():
        largest = max(size for (of, _), size in programs.items() if of == phase)
        assert report["memory"][phase] == buffers | {"temporaries": largest, "padding": 0}
    assert report["peak_bytes"] == max(map(total, report["memory"].values())) > max(map(total, arrays.values()))


def test_error_about_a_program_that_does_not_fit_lists_arrays_and_settings_to_change() -> None:
    buffers = {"weights": 6 * GIB, "optimizer": 8 * GIB, "gradients": 0, "temporaries": 4 * GIB}
    with pytest.raises(InputError) as raised:
        check_fits("update", "gradients", buffers, available_bytes=16 * GIB)
    assert str(raised.value) == (
        "update: gradients does not fit: it needs 18.00 GiB on each device, 2.00 GiB more than the available "
        "16.00 GiB: optimizer moments 8.00 GiB, weights 6.00 GiB, temporaries of a program 4.00 GiB. Lower "
        "algorithm.max_tokens_per_device or rows_per_device, set model.remat: block, or split the weights over more "
        "devices with mesh.shape"
    )
    for phase, name, role in (("score", "critic", "critic"), ("reward", "model", "reward")):
        with pytest.raises(InputError, match=rf"Lower score\.{role}\.max_tokens_per_device or rows_per_device"):
            check_fits(phase, name, buffers, available_bytes=16 * GIB)
    check_fits("update", "gradients", buffers, available_bytes=18 * GIB)
    check_fits("update", "gradients", buffers, available_bytes=None)


def test_dry_run_with_compile_fails_if_a_program_does_not_fit(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("train", "--config", config, "--dry-run")
    memory = report_of(*arguments)["memory"]
    # All arrays fit, so no phase is too large without the temporaries of its programs.
    monkeypatch.setattr(compiled_programs, "device_memory_bytes", lambda: max(map(total, memory.values())))
    assert here(*arguments).exit_code == 0
    assert "--compile needs --dry-run" in here("train", "--config", config, "--compile").stderr
    assert "--hlo writes compiled programs; add --compile" in here("inspect-mesh", "--hlo", config.parent).stderr
    result = here(*arguments, "--compile")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: rollout: prefill does not fit: it needs ")


@pytest.mark.skipif(find_spec("jax_plugins") is not None, reason="JAX for an accelerator is installed")
def test_without_the_compiler_one_error_says_what_to_install(tiny_model: Path) -> None:
    result = here("inspect-mesh", *of_tiny(tiny_model), *settings("mesh.pretend=h100-1"), "--compile")
    assert result.exit_code == 2
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: mesh\.pretend: cannot compile for h100-1: .*pip install -e '\.\[cuda\]'", line)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_cpu_process_compiles_a_step_for_gpus_with_their_kernels(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="JAX for CUDA is not installed: pip install -e '.[cuda]'")
    chosen = ("mesh.pretend=h100-1", "model.dtype=bfloat16", "algorithm.beta=0.1", "eval.every_steps=0")
    report = compiled(tiny_model, *chosen, hlo=tmp_path)
    programs = by_name(report)
    forward, backward = {"attention_forward"}, {"attention_backward_query", "attention_backward_keys"}
    kernels = {"prefill": forward, "reference": forward, "gradients": forward | backward}
    for (phase, name), one in programs.items():
        text = (tmp_path / f"{phase}_{name}.hlo").read_text()
        found = {kernel for kernel in forward | backward if f'name = "{kernel}"' in text}
        assert found == kernels.get(name, set())
        assert one["backend"] == "gpu" and one["argument_bytes"] > 0 and one["collective_bytes"] is None
    assert set(programs) == NAMES
    optimizer, memory = programs["update", "optimizer"], report["memory"]["update"]
    state = memory["weights"] + memory["optimizer"]
    assert state <= optimizer["aliased_bytes"] <= optimizer["output_bytes"] <= state + 20_000
