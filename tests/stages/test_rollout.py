"""Tests of `grpo rollout` on files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.program import here, of_tiny, records_of, settings


def test_a_limit_counts_prompts(sampled: Path) -> None:
    records = records_of(sampled)
    assert len({record["uid"] for record in records}) == len(records) == 24
    assert [record["group_id"] for record in records] == [group for group in range(6) for _ in range(4)]


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


def by_uid(path: Path) -> dict[str, dict[str, Any]]:
    return {record["uid"]: record for record in records_of(path)}


def test_a_checkpoint_samples_what_its_run_sampled_next(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    result = here("rollout", "--checkpoint", finished / "checkpoints" / "2", "--limit", "40", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "--checkpoint: using the settings in" in result.stderr
    samples, of_run = by_uid(out), by_uid(finished / "rollouts" / "step_000003.jsonl")
    assert len(samples) == 160 and len(of_run) == 16
    for uid, record in of_run.items():
        assert samples[uid]["completion_token_ids"] == record["completion_token_ids"]
        assert samples[uid]["policy_version"] == record["policy_version"] == 2
        np.testing.assert_allclose(samples[uid]["behavior_logprobs"], record["behavior_logprobs"], atol=1e-4)
    # Without it, the model samples as it came.
    other = tmp_path / "untrained.jsonl"
    untrained = here("rollout", "--config", finished / "settings.yaml", "--limit", "40", "--out", other)
    assert untrained.exit_code == 0, untrained.stderr
    assert {record["policy_version"] for record in records_of(other)} == {0}


def test_adapters_of_a_checkpoint_are_sampled_with_and_scored_alike(adapted: Path, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    drawn = here("rollout", "--checkpoint", adapted, "--limit", "4", "--out", samples)
    assert drawn.exit_code == 0, drawn.stderr
    differences = {}
    for name, option in {"adapters": "--checkpoint", "none": "--config"}.items():
        path = adapted if option == "--checkpoint" else adapted / "settings.yaml"
        result = here("score", option, path, "--input", samples, "--out", tmp_path / f"{name}.jsonl", "--json")
        assert result.exit_code == 0, result.stderr
        differences[name] = json.loads(result.stdout)["max |logprob - behavior|"]
    assert differences["adapters"] < 1e-4 < differences["none"]
