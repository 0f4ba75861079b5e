"""Tests that `grpo score` on two hosts writes the file of one host, within rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.records.jsonl import write_jsonl
from tests.program import here, of_tiny, records_of, settings
from tests.tiny_directory import write_reward_model
from tests.two_hosts import run_on_two_hosts

pytestmark = pytest.mark.two_hosts


def scored_by_one_and_two(folder: Path, *arguments: str | Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Scores a file on one and on two hosts, and compares the metrics of both."""
    one = here("score", *arguments, "--out", folder / "one.jsonl", "--json")
    assert one.exit_code == 0, one.stderr
    first, second = run_on_two_hosts("score", *arguments, "--out", folder / "two.jsonl", "--json")
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert "{" not in second.stdout
    found, expected = json.loads(first.stdout[first.stdout.index("{") :]), json.loads(one.stdout)
    assert found.keys() == expected.keys()
    for name in ("samples", "tokens", "mean |logprob - behavior|", *(n for n in found if n.startswith("reward/"))):
        if name in found:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name
    return records_of(folder / "two.jsonl"), records_of(folder / "one.jsonl")


def assert_close(records: list[dict[str, Any]], expected: list[dict[str, Any]], *, field: str) -> None:
    for record, other in zip(records, expected, strict=True):
        np.testing.assert_allclose(record.pop(field), other.pop(field), rtol=1e-5, atol=1e-5)
    assert records == expected


def test_two_hosts_score_packed_rows_of_several_windows(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    # Two windows, the second of 123 samples, which two hosts cannot share out evenly.
    records = [record | {"note": number} for number, record in enumerate(records_of(sampled) * 176)]
    write_jsonl(tmp_path / "many.jsonl", records[:4219])
    quota = settings("score.max_tokens_per_device=1024")
    arguments = (*of_tiny(tiny_model), *quota, "--input", tmp_path / "many.jsonl", "--check-packing")
    assert_close(*scored_by_one_and_two(tmp_path, *arguments), field="policy_logprobs")


def test_two_hosts_share_out_groups_among_reward_functions_and_a_reward_model(
    sampled: Path, tiny_model: Path, tmp_path: Path
) -> None:
    judge = write_reward_model(tmp_path / "judge")
    # Five of the six groups, their samples far apart, as another program may name them.
    records = sorted(records_of(sampled)[:20], key=lambda record: record["sample_index"])
    records = [record | {"group_id": f"g{record['group_id']}", "uid": number} for number, record in enumerate(records)]
    write_jsonl(tmp_path / "samples.jsonl", records)
    chosen = settings(f"reward.model={judge}", "reward.functions=[arithmetic, arithmetic_format]")
    arguments = (*of_tiny(tiny_model), *chosen, "--role", "reward", "--input", tmp_path / "samples.jsonl")
    found, expected = scored_by_one_and_two(tmp_path, *arguments)
    for record, other in zip(found, expected, strict=True):
        assert record.pop("rewards") == pytest.approx(other.pop("rewards"), abs=1e-5)
    assert_close(found, expected, field="reward")
