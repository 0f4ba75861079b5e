"""`grpo rollout`, `grpo score` and `grpo inspect-mesh`: one room at a time, chained by files."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.jsonl import read_jsonl, write_jsonl
from app.reward.outcome import Outcome
from app.reward.weighing import weigh
from app.sample_records import sample_from_record
from app.training.metrics import reward_counts
from tests.tiny_directory import write_model
from tests.training.program import DEADLINE_S, digest_of, here, settings, started, wait_until


def records_of(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_jsonl(path)]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Four samples each of six prompts, in batches of four prompts. Not to be written to."""
    folder = tmp_path_factory.mktemp("sampled")
    result = here("rollout", *of_tiny(tiny_model), "--limit", "6", "--out", folder / "samples.jsonl")
    assert result.exit_code == 0, result.stderr
    return folder / "samples.jsonl"


def of_tiny(model: Path) -> list[str]:
    return settings(
        f"model.path={model}",
        "data.max_prompt_length=16",
        "rollout.prompts_per_step=4",
        "rollout.group_size=4",
        "rollout.max_new_tokens=4",
    )


def score(model: Path, source: Path, out: Path, role: str, *overrides: str) -> Any:
    arguments = ("--input", source, "--out", out, "--role", role, "--json")
    return here("score", *of_tiny(model), *settings(*overrides), *arguments)


def test_a_limit_counts_prompts(sampled: Path) -> None:
    records = records_of(sampled)
    assert len({record["uid"] for record in records}) == len(records) == 24
    assert [record["group_id"] for record in records] == [group for group in range(6) for _ in range(4)]


def test_the_chain_of_verbs_adds_its_fields_and_carries_the_rest(
    sampled: Path, tiny_model: Path, tmp_path: Path
) -> None:
    records = [record | {"note": [1, {"a": None}], "weight": 1e-30} for record in records_of(sampled)]
    write_jsonl(tmp_path / "0.jsonl", records)
    for step, role in enumerate(("policy", "reference", "reward")):
        result = score(tiny_model, tmp_path / f"{step}.jsonl", tmp_path / f"{step + 1}.jsonl", role)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["samples"] == 24
    for before, after in zip(records, records_of(tmp_path / "3.jsonl"), strict=True):
        added = {name: after.pop(name) for name in ("policy_logprobs", "reference_logprobs", "rewards", "reward")}
        assert after == before
        assert added["policy_logprobs"] == added["reference_logprobs"]
        assert added["reward"] == added["rewards"]["arithmetic"]


def test_sampler_and_scorer_agree(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    result = score(tiny_model, sampled, tmp_path / "scored.jsonl", "policy")
    for record in records_of(tmp_path / "scored.jsonl"):
        np.testing.assert_allclose(record["policy_logprobs"], record["behavior_logprobs"], atol=1e-4)
    assert 0 < json.loads(result.stdout)["max |logprob - behavior|"] < 1e-4


def test_another_model_disagrees(sampled: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=1)
    result = score(other, sampled, tmp_path / "scored.jsonl", "policy")
    assert json.loads(result.stdout)["max |logprob - behavior|"] > 0.1


def test_scoring_does_not_depend_on_how_it_is_batched(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    for rows in (1, 3):
        score(tiny_model, sampled, tmp_path / f"{rows}.jsonl", "policy", f"score.rows_per_device={rows}")
    for one, three in zip(records_of(tmp_path / "1.jsonl"), records_of(tmp_path / "3.jsonl"), strict=True):
        np.testing.assert_allclose(one["policy_logprobs"], three["policy_logprobs"], atol=1e-5)


def test_rewards_need_no_model(sampled: Path, tmp_path: Path) -> None:
    result = score(Path("no/such/model"), sampled, tmp_path / "rewarded.jsonl", "reward")
    assert result.exit_code == 0, result.stderr
    rewards = [record["reward"] for record in records_of(tmp_path / "rewarded.jsonl")]
    assert json.loads(result.stdout)["reward/mean"] == round(float(np.mean(rewards)), 4)


def test_rewards_take_no_device_from_whoever_trains(sampled: Path, tmp_path: Path) -> None:
    arguments = ("--role", "reward", "--input", sampled, "--out", tmp_path / "rewarded.jsonl")
    with started("score", *arguments, environ={"JAX_PLATFORMS": "no_such_platform"}) as process:
        output = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output


def test_the_figures_of_rewards_have_the_names_of_metrics(sampled: Path, tmp_path: Path) -> None:
    (tmp_path / "plug.py").write_text("def f(solution_str): return {'score': len(solution_str), 'acc': 1 / 3}")
    chosen = f"reward.functions=[{tmp_path / 'plug.py'}:f]"
    result = score(Path("no/such/model"), sampled, tmp_path / "rewarded.jsonl", "reward", chosen)
    figures = json.loads(result.stdout)
    samples = [sample_from_record(r, where="") for r in records_of(tmp_path / "rewarded.jsonl")]
    own = {"samples", "written to", "reward/mean", "reward/f/mean"}
    outcomes = {"f": [Outcome(1.0, extras={"acc": 1.0})] * len(samples)}
    assert figures.keys() == own | reward_counts(weigh(samples, outcomes, {"f": 1.0}, "raise")).keys()
    assert figures["reward/f/acc/mean"] == 0.3333


def test_rollout_takes_prompts_of_a_file_and_greedy_is_allowed(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"question": "1 + 2 = ?", "answer": "3", "level": 7}\n')
    result = here(
        *("rollout", *of_tiny(tiny_model), *settings("rollout.temperature=0")),
        *("--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "samples.jsonl"),
    )
    assert result.exit_code == 0, result.stderr
    records = records_of(tmp_path / "samples.jsonl")
    assert len(records) == 4 and len({record["completion"] for record in records}) == 1
    assert records[0]["prompt"] == "1 + 2 = ?" and records[0]["answer"] == "3"
    assert records[0]["columns"] == {"level": 7}


def test_the_same_rollout_is_the_same_samples(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    # Two prompts at a time this time: what stands beside a prompt does not change its samples.
    again = tmp_path / "again.jsonl"
    arguments = [*of_tiny(tiny_model), "--limit", "6", "--out", again]
    arguments[arguments.index("rollout.prompts_per_step=4")] = "rollout.prompts_per_step=2"
    assert here("rollout", *arguments).exit_code == 0
    for record, other in zip(records_of(sampled), records_of(again), strict=True):
        assert record["completion_token_ids"] == other["completion_token_ids"]


def test_an_existing_output_is_replaced_only_when_the_new_one_is_whole(
    sampled: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("what was there before\n")
    records = records_of(sampled)
    write_jsonl(tmp_path / "bad.jsonl", [*records[:-1], records[-1] | {"answer": "no number"}])
    before = digest_of(tmp_path)
    result = score(tiny_model, tmp_path / "bad.jsonl", out, "reward")
    assert result.exit_code == 2
    assert "no number" in result.stderr
    assert digest_of(tmp_path) == before
    assert score(tiny_model, sampled, out, "reward").exit_code == 0
    assert len(records_of(out)) == 24
    assert {path.name for path in tmp_path.iterdir()} == {"bad.jsonl", "out.jsonl"}


def test_a_killed_rollout_leaves_no_file_under_the_name(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    many = settings("data.num_problems=2000", "rollout.prompts_per_step=1")
    with started("rollout", *of_tiny(tiny_model)[:4], *many, "--out", out) as process:
        wait_until(process, lambda: any(tmp_path.iterdir()))  # the file that it writes to
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=DEADLINE_S)
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"completion_token_ids": [99, 99, 99, 99]}, "holds token 99, the model's vocabulary ends at 23"),
        ({"prompt_token_ids": [2] * 140}, "tokens, the model's context 128"),
        ({"behavior_logprobs": None}, "behavior_logprobs: expected a list"),
        ({"uid": "p"}, "uid: expected `<prompt uid>/s0`"),
    ],
)
def test_a_sample_that_cannot_be_the_models_is_refused(
    sampled: Path, tiny_model: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    first = next(record for record in records_of(sampled) if len(record["completion_token_ids"]) == 4)
    write_jsonl(tmp_path / "samples.jsonl", [first | {"uid": "p/s0", "sample_index": 0} | change])
    result = score(tiny_model, tmp_path / "samples.jsonl", tmp_path / "out.jsonl", "policy")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("error:") == 1
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no samples"),
        ('{"uid": "p/s0"}\n', "samples.jsonl:1: missing group_id"),
        ("\n{nonsense\n", "samples.jsonl:2: not JSON"),
    ],
)
def test_a_file_without_samples_is_refused(tiny_model: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "samples.jsonl").write_text(content)
    result = score(tiny_model, tmp_path / "samples.jsonl", tmp_path / "out.jsonl", "policy")
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_the_folder_of_the_output_must_exist(tiny_model: Path, tmp_path: Path) -> None:
    result = here("rollout", *of_tiny(tiny_model), "--out", tmp_path / "no" / "samples.jsonl")
    assert result.exit_code == 2
    assert "the folder" in result.stderr and "does not exist; create it first" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_inspect_mesh_speaks_to_people_and_programs(tiny_model: Path) -> None:
    text = here("inspect-mesh", *of_tiny(tiny_model), *settings("mesh.shape=2,2,2"))
    assert text.exit_code == 0, text.stderr
    assert text.stdout.startswith("8 x cpu (cpu) on 1 host(s); mesh dp 2, fsdp 2, tp 2\n")
    report = json.loads(here("inspect-mesh", *of_tiny(tiny_model), "--json").stdout)
    assert report["shape"] == {"dp": 1, "fsdp": 8, "tp": 1}
    assert report["samples_per_step"] == 16 and report["samples_per_device"] == 2
    names = [weight["name"] for weight in report["weights"]]
    assert "embedding" in names and "blocks.query.kernel" in names


def test_inspect_mesh_refuses_a_shape_that_does_not_fit(tiny_model: Path) -> None:
    result = here("inspect-mesh", *of_tiny(tiny_model), *settings("mesh.shape=1,3,1"))
    assert result.exit_code == 2
    assert "mesh.shape: '1,3,1' asks for 3 devices and there are 8" in result.stderr
