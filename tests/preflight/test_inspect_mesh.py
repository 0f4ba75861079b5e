"""Tests the placement and memory that `grpo inspect-mesh` reports for real and simulated devices."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from app.mesh.axis_rules import partition_spec
from app.mesh.chips import parse_slice
from app.mesh.devices import simulate_slice
from app.mesh.placement import bytes_per_device, row_sharding
from app.preflight import inspect_mesh
from app.records.text_format import format_bytes
from app.runtime.session import Session
from settings import Resolved, load
from tests.program import here, of_tiny, settings, succeeded
from tests.tiny import make_mesh

GIB = 2**30

pytestmark = pytest.mark.usefixtures("real_devices_again")


def inspect_json(model: Path, *overrides: str) -> dict[str, Any]:
    result = succeeded(here("inspect-mesh", *of_tiny(model), *settings(*overrides), "--json"))
    return json.loads(result.stdout)


def load_settings(model: Path, *overrides: str) -> Resolved:
    """Returns the settings of a tiny run; the last of several values of a setting counts."""
    values = dict(text.split("=", 1) for text in (*of_tiny(model)[1::2], *overrides))
    return load(None, [f"{name}={value}" for name, value in values.items()], {})


def inspect(run: Resolved) -> tuple[Session, inspect_mesh.MeshInspection]:
    step = inspect_mesh.open_step_outline(run, compiles=False)
    return step.session, inspect_mesh.build_mesh_inspection(step, compiles=False)


def test_inspect_mesh_prints_text_or_json_from_the_model_configuration_alone(tiny_model: Path, tmp_path: Path) -> None:
    text = succeeded(here("inspect-mesh", *of_tiny(tiny_model), *settings("mesh.shape=2,2,2")))
    assert text.stdout.startswith("8 x cpu (cpu), ")
    for part in ("mesh dp 2 x fsdp 2 x tp 2", "MiB", "rollout: 16 slots with", "which --compile adds"):
        assert part in text.stdout
    report = inspect_json(tiny_model)
    assert (report["programs"], report["shape"]) == ([], {"dp": 1, "fsdp": 8, "tp": 1})
    assert (report["samples_per_step"], report["samples_per_device"]) == (16, 2)
    assert {"embedding", "blocks.query.kernel"} <= {weight["name"] for weight in report["weights"]}
    assert report["peak_bytes"] == max(sum(buffers.values()) for buffers in report["memory"].values())
    shutil.copy(tiny_model / "config.json", tmp_path)
    assert inspect_json(tmp_path) == report


def test_a_simulated_slice_has_the_hosts_memory_and_devices_of_its_name(tiny_model: Path) -> None:
    report = inspect_json(tiny_model, "mesh.pretend=v4-16")
    assert report["shape"] == {"dp": 2, "fsdp": 4, "tp": 1}
    assert report["device_memory_bytes"] == 32 * GIB
    assert report["pretended"] == "v4-16"
    assert report["num_hosts"] == 2 and report["samples_per_step"] == 32
    assert [host["devices"] for host in report["hosts"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # Weights are split over the four devices of a host, not over eight.
    on_one_host = inspect_json(tiny_model, "mesh.pretend=v5e-8")
    assert report["memory"]["update"]["weights"] == 2 * on_one_host["memory"]["update"]["weights"]
    largest = max(report["weights"], key=lambda weight: math.prod(weight["shape"]))
    array = report["largest_saved_array"]
    name = largest["name"].replace(".", "/")
    assert array == {"name": f"policy/params/{name}", "bytes": 4 * math.prod(largest["shape"])}
    assert on_one_host["largest_saved_array"] is None


@pytest.mark.parametrize("pretended", [("mesh.pretend=h100-8",), ()], ids=["gpus", "cpu"])
def test_offloaded_moments_count_as_host_memory_only_if_it_is_separate(
    tiny_model: Path, pretended: tuple[str, ...]
) -> None:
    is_away = bool(pretended)
    overrides = ("algorithm.name=ppo", "optimizer.first_moment=bfloat16", *pretended)
    on_device = inspect_json(tiny_model, *overrides)["memory"]["update"]
    report = inspect_json(tiny_model, *overrides, "optimizer.offload=true")
    memory = report["memory"]["update"]
    # The first moments have half the bytes of the float32 weights, the second as many. Counters stay on the devices.
    moments = (memory["weights"] + memory["critic"]) * 3 // 2
    assert report["host_bytes"] == (moments if is_away else 0)
    optimizers = ("optimizer", "critic_optimizer")
    assert sum(on_device[name] - memory[name] for name in optimizers) == report["host_bytes"]
    assert all((memory[name] < 40) == is_away for name in optimizers)


def test_inspect_mesh_lists_launch_notes_and_the_bytes_of_received_weights(tiny_model: Path) -> None:
    overrides = ("mesh.pretend=v4-16", "mesh.shape=1,8,1")
    session, report = inspect(load_settings(tiny_model, *overrides))
    whole = bytes_per_device(session.to_decode_weights.abstract_weights)
    assert report.transferred_bytes == pytest.approx(whole * 7 / 8, rel=0.01)
    assert f"{format_bytes(report.transferred_bytes)} per device for each policy version" in report.to_text()
    _, report = inspect(load_settings(tiny_model, *overrides, "rollout.placement=global"))
    arithmetic, slots = report.to_dict()["notes"]
    assert arithmetic.startswith("2 hosts, 8 devices (dp 1, fsdp 8, tp 1): 4 prompts x 4 samples x 2 hosts = 32")
    assert slots.startswith("rollout.slots: auto: 16 on each host for all samples of a step")
    assert f"{arithmetic}\n" in report.to_text()
    assert report.generation.startswith("16 slots with a cache of ")


PHASES = ("rollout", "evaluation")
EIGHT_WORKERS = ("rollout.workers.fast.count=4", "rollout.workers.heavy.count=4")


def test_evaluation_slots_are_counted_in_addition_to_busy_workers(tiny_model: Path) -> None:
    busy = ("rollout.scheduler=adaptive", "rollout.max_staleness=1", "env.source=guess_number", *EIGHT_WORKERS)
    session, report = inspect(load_settings(tiny_model, *busy))
    assert session.continuous_batching is not None
    slots, rollout, evaluation = session.continuous_batching.footprint(), *map(report.memory.get, PHASES)
    assert rollout is not None and evaluation is not None
    # The slots of an evaluation are freed after it; the slots of the workers stay.
    assert report.memory["update"]["kv_cache"] == rollout["kv_cache"] > 0
    assert evaluation["kv_cache"] == rollout["kv_cache"] + bytes_per_device(slots.slots)
    assert evaluation["decode_weights"] == rollout["decode_weights"] + bytes_per_device(slots.weights)
    # Workers on separate devices take no memory of the training devices.
    session, report = inspect(load_settings(tiny_model, *busy[:3], "rollout.devices=0.5", "mesh.shape=1,4,1"))
    assert session.continuous_batching is not None
    assert report.memory["evaluation"]["kv_cache"] == bytes_per_device(session.continuous_batching.footprint().slots)


def test_a_dry_run_can_simulate_a_slice(config: Path) -> None:
    # Settings of real devices, as those of a preset for a pod, have no effect on simulated ones.
    real = settings("mesh.platform=tpu", "mesh.coordinator_address=auto", "mesh.expect_processes=4")
    pretended = settings("mesh.pretend=v5p-16", "model.attention=kernel")
    result = succeeded(here("train", "--config", config, "--dry-run", *real, *pretended))
    assert "mesh        8 x TPU v5 on 2 host(s): dp 2, fsdp 4, tp 1 (simulated)" in result.stdout
    assert "of its 95.00 GiB" in result.stdout


WEIGHTS = {
    # embed is split over fsdp and vocab over tp; three heads cannot be split in two.
    "embedding": (jax.ShapeDtypeStruct((48, 32), "float32"), ("vocab", "embed"), ("tp", "fsdp")),
    "blocks.key.kernel": (
        *(jax.ShapeDtypeStruct((2, 32, 3, 8), "float32"), ("layers", "embed", "kv_heads", "head")),
        (None, "fsdp", None, None),
    ),
    # Two codes of a quantized kernel share a byte.
    "blocks.up.codes": (
        *(jax.ShapeDtypeStruct((2, 16, 48), "uint8"), ("layers", "embed", "mlp")),
        (None, "fsdp", "tp"),
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weight_placement_equals_the_sharding_of_a_real_array(name: str) -> None:
    (shape, dims, axes), mesh = WEIGHTS[name], make_mesh((2, 2, 2))
    found = inspect_mesh.weight_placement(name, shape, dims, mesh)
    array = jax.device_put(jax.numpy.zeros(shape.shape, shape.dtype), NamedSharding(mesh, PartitionSpec(*axes)))
    assert partition_spec(dims, shape.shape, mesh) == PartitionSpec(*found.axes) == PartitionSpec(*axes)
    assert array.addressable_shards[0].data.nbytes == found.bytes_per_device


def test_parts_of_each_host_equal_the_device_indices_of_jax() -> None:
    # Virtual devices of two hosts with four each.
    simulate_slice(parse_slice("v4-16"))
    mesh = make_mesh((2, 2, 2))
    rows = row_sharding(mesh).devices_indices_map((4,))
    weights = NamedSharding(mesh, PartitionSpec("fsdp", "tp")).devices_indices_map((2, 2))
    for parts in inspect_mesh.host_parts(mesh):
        of_host = [device for device in mesh.devices.flat if device.id in parts.devices]
        assert len(of_host) == 4
        assert {rows[device][0].start for device in of_host} == {*parts.rows}
        assert {(one.start, two.start) for one, two in (weights[device] for device in of_host)} == {
            *zip(parts.fsdp, parts.tp, strict=True)
        }


def test_inspect_mesh_table_abbreviates_a_long_list_of_hosts(tiny_model: Path) -> None:
    _, report = inspect(load_settings(tiny_model, "mesh.pretend=v4-16"))
    lines = report.to_text().splitlines()
    assert [line.split() for line in lines[5:7]] == [["0", "0-3", "0-3", "0-3", "0"], ["1", "4-7", "4-7", "0-3", "0"]]
    hosts = [inspect_mesh.HostParts(i, (2 * i, 2 * i + 1), (2 * i, 2 * i + 1), (0, 1), (0, 0)) for i in range(10)]
    array = report.largest_saved_array
    assert array is not None and f"the largest is {array.name}, {format_bytes(array.bytes)}" in report.to_text()
    rows = [line.split() for line in replace(report, hosts=hosts).to_text().splitlines()[5:9]]
    assert [row[:2] for row in rows] == [["0", "0-1"], ["1", "2-3"], ["...", "..."], ["9", "18-19"]]
