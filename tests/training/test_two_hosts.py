"""Tests that two processes of four devices sample and train as one process of eight."""

import json
import os
import re
import shutil
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from app.checkpoint.saved_policy import PolicyCheckpoint
from tests import program
from tests.on_islands import WAYS, Found, describe
from tests.replays import step_file
from tests.run_fixtures import LORA
from tests.tiny_directory import write_reward_model
from tests.two_hosts import ended, run_on_two_hosts, two_hosts

pytestmark = pytest.mark.two_hosts

SCHEDULED = (
    *("rollout.scheduler=adaptive", "rollout.mode=exact", "model.dtype=float32"),
    *("rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4"),
    *("rollout.workers.fast.count=2", "rollout.workers.heavy.count=2"),
)


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("islands")
    files = folder / "0.json", folder / "1.json"
    on_islands = ("-m", "tests.on_islands")
    with two_hosts(tiny_model, of_each=((files[0],), (files[1],)), programs=(on_islands, on_islands)) as hosts:
        first, second = ended(hosts, deadline_s=2 * program.DEADLINE_S)
    assert (first.exit_code, second.exit_code) == (0, 0), (first, second)
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def one_host(tiny_model: Path) -> list[list[Any]]:
    samples = describe(Found(tiny_model).samples("island"))
    assert {reason for _, _, reason in samples} == {"stop", "length"}
    return [list(sample) for sample in samples]


@pytest.mark.parametrize("way", [*WAYS, "sync"])
def test_two_hosts_sample_the_same_as_one_host(
    found: list[dict[str, Any]], one_host: list[list[Any]], way: str
) -> None:
    assert found[0][way] + found[1][way] == one_host
    if way in ("global", "island", "slots", "adaptive"):
        for i, host in enumerate(found):
            assert host[f"workers of {way}"] == [f"host{i}/fast-0" if way == "adaptive" else str(i)]


def test_an_island_shares_buffers_with_training_and_does_not_wait_for_other_hosts(found: list[dict[str, Any]]) -> None:
    for host in found:
        taken = host["taken"]
        assert taken["same buffers"] and taken["are local"] and taken["num arrays"] > 20
        assert (taken["devices of the mesh"], taken["devices of an array"]) == (8, [4])
        # Only the program on the mesh is used, and it was already compiled.
        assert host["compilations of a second version"] == 0
    assert found[1]["alone"] == found[1]["island"][:2]


def test_stopping_one_host_stops_all_hosts_with_global_placement_but_only_itself_with_island(
    found: list[dict[str, Any]],
) -> None:
    first, second = found
    assert first["stopped"] == {"global": "stopped", "island": "went on", "adaptive": "went on"}
    assert second["stopped"] == {"global": "stopped", "island": "stopped", "adaptive": "stopped"}
    assert first["together again"] == second["together again"] == [0, 1]


REWARD = """\
import os
def fails_on_second(completions, trainer_state):
    if os.environ["THIS_HOST"] == "1" and trainer_state.global_step == 4: raise ValueError("not on this host")
    return [1.0] * len(completions)
"""


def test_two_hosts_with_async_generation_train_like_one_host(config, monkeypatch):
    """With a learning rate of almost 0, samples equal those of one host that does not generate ahead."""
    (config.parent / "plug.py").write_text(REWARD)
    functions = f"[arithmetic, arithmetic_format, '{config.parent / 'plug.py'}:fails_on_second']"
    shared = (f"reward.functions={functions}", "plugins.env_vars=[THIS_HOST]", "optimizer.learning_rate=1e-30")
    ahead = (*SCHEDULED, "rollout.max_staleness=1", "rollout.prompts_per_step=2", "run.name=two", "run.steps=5")
    with two_hosts("train", "--config", config, *program.settings(*shared, *program.UNJUDGED, *ahead)) as hosts:
        ends = ended(hosts, deadline_s=2 * program.DEADLINE_S)
    assert [end.exit_code for end in ends] == [1, 1], ends
    assert "a reward function failed on another host; see its log" in ends[0].stderr
    assert "fails_on_second: raised: ValueError: not on this host" in ends[1].stderr
    monkeypatch.setenv("THIS_HOST", "0")
    program.succeeded(program.train_here(config, *shared, *program.UNJUDGED, "run.steps=3", "run.name=one"))
    two, one = (config.parent / "runs" / name for name in ("two", "one"))
    for ours, expected in zip(program.metrics_of(two), program.reproducible(program.metrics_of(one)), strict=True):
        for name in (name for name in expected if not name.startswith(("batching/", "global_seqlen/"))):
            assert (ours[name] or 0.0) == pytest.approx(expected[name] or 0.0, rel=1e-5, abs=1e-5), name
    ages = [line["perf/rollout/staleness_max"] for line in program.metrics_of(two)]
    assert ages[:2] == [0, 1] and max(ages) == 1
    lengths = defaultdict[str, list[int]](list)
    for step in (1, 2, 3):
        for record in program.records_of(step_file(one, step)):
            lengths[record["uid"].rpartition("/")[0]].append(len(record["completion_token_ids"]))
    # The checkpoint is from the last trained step and contains the lengths of both hosts.
    saved = program.progress_of(two, 3)
    assert {uid: saved["lengths"][uid] for uid in lengths} == {uid: sum(one) / len(one) for uid, one in lengths.items()}
    assert len(lengths) == saved["position"] == 12
    found = [tokens for tokens, _ in saved["finished_lengths"]]
    assert {length for one in lengths.values() for length in one} <= set(found)


PPO = ("algorithm.name=ppo", "algorithm.kl_target=0.1", "algorithm.filter=zero_variance", "algorithm.max_rounds=3")
"""PPO with whitening, an adaptive KL penalty and dynamic sampling; hosts exchange values for each of them."""
# The quota needs few compiled shapes, and the evaluation prompts cannot be divided evenly between two hosts.
SHARED = ("algorithm.max_tokens_per_device=512", "eval.every_steps=2", "eval.num_prompts=15")
# A timed checkpoint is always due on the clock of process 0, and both processes save it.
TIMED = "checkpoint.every_minutes=1e-9"
# Threads of gloo write these messages in interleaved pieces.
GLOO_LINE = "[Gloo] Rank 1 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7"
HALF = ("rollout.prompts_per_step=2", "algorithm.mini_batch_prompts=1")
"""Half of the sizes per host, so that the step of two hosts equals the step of one host."""


def test_two_hosts_train_ppo_like_one_host_and_save_together_after_sigterm(full_config: Path) -> None:
    two, one = (full_config.parent / "runs" / name for name in ("two", "one"))
    # The reward model has weight 0, because otherwise all groups would have different rewards.
    judge = (f"reward.model={write_reward_model(full_config.parent / 'judge')}", "reward.model_weight=0")
    both = (*PPO, *SHARED, TIMED, *judge, "data.curriculum=pass_rate", "run.seed=1")
    program.succeeded(program.train_here(full_config, *both, "run.name=one", "run.steps=2"))
    endless = program.settings(*both, *HALF, "run.name=two", "run.steps=100000", "logging.report=true")
    with two_hosts("train", "--config", full_config, *endless) as hosts:
        program.wait_for_step(hosts[0], two, 2)
        os.kill(hosts[1].pid, signal.SIGTERM)
        first, second = ended(hosts)
    assert (first.exit_code, second.exit_code) == (75, 75), first.stderr + second.stderr
    # Only the first process writes messages; messages of gloo, which JAX uses, are ignored.
    assert "evaluation at step 0" in first.stderr and "step      2/100000  reward" in first.stderr
    assert "reward" not in second.stderr and "report" not in second.stderr
    assert set(re.findall(r"[a-zA-Z]+", second.stdout)) <= set(re.findall(r"[a-zA-Z]+", GLOO_LINE))
    assert_complete(two)
    assert_same_steps(two, one, steps=range(3))
    # The filter dropped groups, so each host may train on groups that the other host sampled.
    assert all(program.metrics_of(two)[step]["rollout/num_rounds"] > 1 for step in (1, 2))
    # The prompts that a curriculum draws depend on the samples of both hosts.
    after = program.progress_of(one, 2)
    assert len(after["pass_rates"]) == after["position"] == 20
    last = program.metrics_of(two)[-1]["step"]
    # A checkpoint of two hosts can be resumed on another number of hosts.
    result = program.succeeded(
        program.train_here(full_config, *both, "run.name=two", f"run.steps={last + 1}", resume="must")
    )
    assert f"continuing after step {last} of {last + 1}" in result.stderr
    assert [line["step"] for line in program.metrics_of(two)] == list(range(last + 2))


def assert_complete(run: Path) -> None:
    last = program.metrics_of(run)[-1]["step"]
    assert {path.name for path in run.iterdir()} == {
        *(".lock", "settings.yaml", "metrics.jsonl", "sessions.jsonl", "rollouts", "checkpoints", "eval"),
        *("report.html", "rollouts.html", "plots"),
    }
    assert "95 % interval (15 prompts)" in (run / "report.html").read_text()
    saved = {path.name for path in (run / "checkpoints").iterdir()}
    assert saved >= {str(last - 1), str(last), "best"}
    assert os.readlink(run / "checkpoints" / "best") in saved
    assert "process_id: 0  # set" in (run / "settings.yaml").read_text()


def assert_same_steps(run: Path, other: Path, *, steps: range) -> None:
    """Asserts that metrics agree within 1e-5 and that samples and texts are equal in one order."""
    for step in steps:
        line, expected = (program.reproducible(program.metrics_of(one))[step] for one in (run, other))
        assert line.keys() == expected.keys()
        for name in line:
            assert (line[name] is None) == (expected[name] is None), (step, name)
            assert (line[name] or 0.0) == pytest.approx(expected[name] or 0.0, rel=1e-5, abs=1e-5), (step, name)
        for folder in ("rollouts", "eval"):
            if (other / folder / name_of(step)).exists():
                assert texts(run / folder / name_of(step)) == texts(other / folder / name_of(step)), (step, folder)


def name_of(step: int) -> str:
    return f"step_{step:06d}.jsonl"


def texts(path: Path) -> list[tuple[Any, ...]]:
    return [(r["uid"], r["group_id"], r["completion_token_ids"], r.get("loss_mask")) for r in program.records_of(path)]


def test_two_hosts_resume_a_single_host_run_with_adapters_and_train_like_it(adapted: Path, config: Path) -> None:
    lora = tuple(f"model.lora.{name}={value}" for name, value in LORA.items())
    # Hosts exchange statistics of new samples; about half of these end before the length limit.
    new = ("algorithm.reward_normalization=each_first", "algorithm.mask_truncated=true", "rollout.stop=['1','2','3']")
    more = (*lora, *new, "optimizer.learning_rate=0.1", "run.steps=4")
    two, one = (config.parent / "runs" / name for name in ("tiny", "one"))
    for run in (two, one):
        shutil.copytree(adapted, run, symlinks=True)
    changed = ("algorithm", "rollout")
    program.succeeded(program.train_here(config, *more, "run.name=one", resume="must", allow_changed=changed))
    allowed = [word for name in changed for word in ("--allow-changed", name)]
    chosen = [*allowed, *program.settings(*more, "rollout.prompts_per_step=2")]
    hosts = run_on_two_hosts("train", "--config", config, "--resume", "must", *chosen)
    assert [host.exit_code for host in hosts] == [0, 0], hosts
    assert "continuing after step 2 of 4" in hosts[0].stderr
    assert_same_steps(two, one, steps=range(5))
    for line in program.metrics_of(two)[-2:]:
        assert 0.1 < line["completions/masked_token_fraction"] < 0.9 and line["advantage/arithmetic_format/share"] > 0
    assert PolicyCheckpoint.open(two).checksums.keys() == PolicyCheckpoint.open(one).checksums.keys()
