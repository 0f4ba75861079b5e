"""Tests that two hosts of four devices exchange samples and agree on the checkpoints that both can read."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, RowShape
from app.batching.micro_batcher import FixedRowBatcher, MicroBatcher, PackedRowBatcher
from app.batching.sample_exchange import fetch_rows
from app.model.architecture import RouteShape
from app.model.experts import UNRECORDED
from app.records.sample import Sample
from settings import InputError
from tests.batching.plans import flops, make_budget, members
from tests.checkpoints import of_this_run, opened, write
from tests.tiny import make_mesh, random_samples
from tests.two_hosts import run_on_two_hosts

FIELDS = ("mask", "behavior_logprobs", "advantages", "token_values")
SHAPE = RouteShape(3, 2)
BATCHERS = PackedRowBatcher(make_budget(64, 32, share_prompts=True), flops), FixedRowBatcher(1, trim_tail=True)

PROGRAM = """\
import os, sys
from pathlib import Path
import jax
address = next(one.partition("=")[2] for one in sys.argv if one.startswith("mesh.coordinator_address="))
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, int(os.environ["THIS_HOST"]))
from tests.batching import test_sample_exchange as tests
tests.check_moves(jax.process_index())
tests.check_other_plan(jax.process_index())
tests.check_checkpoints(jax.process_index(), Path(sys.argv[1]))
"""


def num_tokens(sample: Sample) -> int:
    return len(sample.prompt.token_ids) + len(sample.completion_ids)


def routes_of(sample: Sample) -> np.ndarray:
    """Returns the routes of a sample, all of them UNRECORDED if it has none."""
    return np.full((num_tokens(sample), *SHAPE), UNRECORDED, np.uint8) if sample.routes is None else sample.routes


def samples_of(host: int, *, num_prompts: int) -> list[Sample]:
    rng = np.random.default_rng(host)
    return [
        replace(
            sample,
            loss_mask=rng.random(len(sample.completion_ids)) < 0.5,
            advantages=rng.normal(size=len(sample.completion_ids)).astype(np.float32),
            values=rng.normal(size=len(sample.completion_ids) + 1).astype(np.float32),
            routes=rng.integers(0, 200, (num_tokens(sample), *SHAPE)).astype(np.uint8) if rng.random() < 0.7 else None,
        )
        for sample in random_samples(num_prompts, 3, vocab_size=97, seed=host)
    ]


def assert_rows_have_their_samples(host: int, hosts: list[list[Sample]], batcher: MicroBatcher) -> int:
    """Returns the number of samples that another host has sent."""
    everywhere = [sample for of_host in hosts for sample in of_host]
    plan = batcher(hosts[host], make_mesh((1, 8, 1)))
    rows = fetch_rows(hosts[host], plan, FIELDS, SHAPE)
    numbers = members([row for one in plan.local_plan.micro_batches for row in one.rows])
    local = members([row for one in rows.plan.micro_batches for row in one.rows])
    assert [one.shape for one in rows.plan.micro_batches] == [one.shape for one in plan.plan.micro_batches]
    for number, index in zip(numbers, local, strict=True):
        found, sent = rows.samples[index], everywhere[number]
        np.testing.assert_array_equal(found.prompt.token_ids, sent.prompt.token_ids)
        for name in ("completion_ids", *FIELDS):
            np.testing.assert_array_equal(getattr(found, name), getattr(sent, name))
            assert getattr(found, name).dtype == getattr(sent, name).dtype
        np.testing.assert_array_equal(routes_of(found), routes_of(sent))
    back = rows.return_to_owners([2 * sample.behavior_logprobs for sample in rows.samples])
    for sample, values in zip(hosts[host], back, strict=True):
        np.testing.assert_array_equal(values, 2 * sample.behavior_logprobs)
    return sum(all(found is not own for own in hosts[host]) for found in rows.samples)


def check_moves(host: int) -> None:
    for batcher in BATCHERS:
        for sizes in ((12, 2), (0, 9), (0, 0), (1, 1)):
            hosts = [samples_of(number, num_prompts=size) for number, size in enumerate(sizes)]
            moved = assert_rows_have_their_samples(host, hosts, batcher)
            if sizes == (12, 2) and host == 1:
                assert moved > 0


def check_other_plan(host: int) -> None:
    plan = BATCHERS[0](samples_of(host, num_prompts=2), make_mesh((1, 8, 1)))
    other = MicroBatchPlan((MicroBatch(((),) * 8, RowShape(8, 8)),))
    with pytest.raises(RuntimeError, match="hosts 0 and 1 planned different micro-batches"):
        fetch_rows(samples_of(host, num_prompts=2), replace(plan, plan=other) if host else plan, FIELDS)


def check_checkpoints(host: int, folder: Path) -> None:
    """Asserts that no host restores what another cannot read, and that hosts with different checkpoints fail."""
    checkpoints = opened(folder / str(host), num_devices=8)
    found = checkpoints.restore(of_this_run)
    assert found is not None and found[1].step == 2
    checkpoints.close()
    with pytest.raises(InputError, match=r"see checkpoints of different steps .*\(host 0: \[2\]; host 1: \[\]\)"):
        opened(folder / ("absent" if host else "0"), num_devices=8).restore(of_this_run)


@pytest.mark.two_hosts
def test_two_hosts_exchange_samples_and_agree_on_checkpoints(tmp_path: Path) -> None:
    write(tmp_path / "0", 2, 4)
    (arrays, *_) = sorted(
        shutil.copytree(tmp_path / "0", tmp_path / "1").glob("4/state/ocdbt.process_0/d/*"),
        key=lambda path: -path.stat().st_size,
    )
    os.truncate(arrays, 1000)
    for host in run_on_two_hosts(tmp_path, programs=(("-c", PROGRAM), ("-c", PROGRAM))):
        assert host.exit_code == 0, host.stderr


def test_fetch_rows_copies_nothing_on_one_host() -> None:
    samples = samples_of(0, num_prompts=4)
    plan = BATCHERS[0](samples, make_mesh((1, 8, 1)))
    rows = fetch_rows(samples, plan, FIELDS)
    values = [sample.behavior_logprobs for sample in samples]
    assert rows.samples is samples and rows.plan is plan.plan
    assert all(back is sent for back, sent in zip(rows.return_to_owners(values), values, strict=True))
