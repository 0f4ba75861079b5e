"""Tests that hosts that generate on their own devices draw the samples of a joint queue."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.on_islands import WAYS, Found, describe
from tests.program import (
    DEADLINE_S,
    metrics_of,
    progress_of,
    records_of,
    reproducible,
    settings,
    train_here,
)
from tests.two_hosts import ended, two_hosts

pytestmark = pytest.mark.two_hosts

SCHEDULED = (
    *("rollout.scheduler=adaptive", "rollout.mode=exact", "model.dtype=float32"),
    *("rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4"),
    *("rollout.workers.fast.count=2", "rollout.workers.heavy.count=2"),
)
HALF = ("rollout.prompts_per_step=2", "run.name=two")
UNJUDGED = ("eval.every_steps=0", "checkpoint.best_metric=null", "logging.save_rollouts=true")


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of two hosts."""
    folder = tmp_path_factory.mktemp("islands")
    files = folder / "0.json", folder / "1.json"
    program = ("-m", "tests.on_islands")
    with two_hosts(tiny_model, of_each=((files[0],), (files[1],)), programs=(program, program)) as hosts:
        first, second = ended(hosts, deadline_s=2 * DEADLINE_S)
    assert (first.exit_code, second.exit_code) == (0, 0), (first, second)
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def one_host(tiny_model: Path) -> list[list[Any]]:
    """The samples of one host with eight devices."""
    samples = describe(Found(tiny_model).samples("island"))
    assert {reason for _, _, reason in samples} == {"stop", "length"}
    return [list(sample) for sample in samples]


@pytest.mark.parametrize("way", [*WAYS, "sync"])
def test_two_hosts_sample_what_one_does_whoever_generates(
    found: list[dict[str, Any]], one_host: list[list[Any]], way: str
) -> None:
    assert found[0][way] + found[1][way] == one_host


def test_samples_say_which_host_drew_them(found: list[dict[str, Any]]) -> None:
    for i, host in enumerate(found):
        assert host["workers of global"] == host["workers of island"] == host["workers of slots"] == [str(i)]
        assert host["workers of adaptive"] == [f"host{i}/fast-0"]


def test_an_island_takes_the_weights_over_without_a_copy(found: list[dict[str, Any]]) -> None:
    for host in found:
        taken = host["taken"]
        assert taken["same buffers"] and taken["are local"] and taken["num arrays"] > 20
        assert (taken["devices of the mesh"], taken["devices of an array"]) == (8, [4])
        # Nothing but the program on the mesh, which was there.
        assert host["compilations of a second version"] == 0


def test_a_host_generates_on_its_island_while_another_does_not(found: list[dict[str, Any]]) -> None:
    assert found[1]["alone"] == found[1]["island"][:2]


def test_one_host_that_is_asked_ends_a_batch_of_all_hosts_and_of_islands_its_own(
    found: list[dict[str, Any]],
) -> None:
    first, second = found
    assert first["stopped"] == {"global": "stopped", "island": "went on", "adaptive": "went on"}
    assert second["stopped"] == {"global": "stopped", "island": "stopped", "adaptive": "stopped"}
    assert first["together again"] == second["together again"] == [0, 1]


@pytest.mark.slow
def test_hosts_generate_ahead_and_train_as_one_does_that_waits(config: Path) -> None:
    """With a learning rate of 0, samples equal those of one host without asynchronous generation. Lengths are those of
    all hosts."""
    overrides = ("optimizer.learning_rate=1e-30", "run.steps=3", *UNJUDGED)
    ahead = (*SCHEDULED, "rollout.max_staleness=1", *HALF)
    with two_hosts("train", "--config", config, *settings(*overrides, *ahead)) as hosts:
        ends = ended(hosts, deadline_s=2 * DEADLINE_S)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert train_here(config, *overrides, "run.name=one").exit_code == 0
    two, one = (config.parent / "runs" / name for name in ("two", "one"))
    for ours, expected in zip(metrics_of(two), reproducible(metrics_of(one)), strict=True):
        for name in (name for name in expected if not name.startswith(("batching/", "global_seqlen/"))):
            assert (ours[name] or 0.0) == pytest.approx(expected[name] or 0.0, rel=1e-5, abs=1e-5), name
    ages = [line["perf/rollout/staleness_max"] for line in metrics_of(two)]
    assert ages[:2] == [0, 1] and max(ages) == 1
    lengths = defaultdict[str, list[int]](list)
    for step in (1, 2, 3):
        for record in records_of(one / "rollouts" / f"step_{step:06d}.jsonl"):
            lengths[record["uid"].rpartition("/")[0]].append(len(record["completion_token_ids"]))
    assert progress_of(two, 3)["lengths"] == {uid: sum(one) / len(one) for uid, one in lengths.items()}
    assert len(lengths) == progress_of(two, 3)["position"] == 12
    finished = [tokens for tokens, _ in progress_of(two, 3)["finished_lengths"]]
    assert {length for one in lengths.values() for length in one} <= set(finished), "of both hosts"
