"""Tests of `grpo gae` on samples: bounded memory, and the advantages of training under the same settings."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.records.jsonl import write_jsonl
from app.records.sample import Sample
from app.records.sample_json import sample_for_advantages, sample_to_record
from app.runtime.advantages import make_gae_advantages
from app.stages.gae import WrittenAdvantages
from app.stages.gae_jsonl import GaeSampleFile, LocatedSample, sample_windows
from settings import load
from tests.episodes import with_turns
from tests.program import here, records_of, settings
from tests.tiny import make_sample


def placed(length: int) -> LocatedSample:
    record = {"values": [0.0] * length, "reward": 0.0}
    return LocatedSample(
        "",
        record,
        sample_for_advantages(record, where="", bootstrap_truncated=False, needs_logprobs=False, needs_turns=False),
    )


def lengths_of(windows: Any) -> list[list[int]]:
    return [[len(one.sample.completion_ids) for one in window] for window in windows]


def test_no_more_tokens_are_held_than_a_window_has() -> None:
    samples = map(placed, [30, 30, 30, 64, 65, 1, 0, 100, 2])
    windows = lengths_of(sample_windows(samples, window_tokens=64))
    assert windows == [[30, 30], [30], [64], [65], [1, 0], [100], [2]]


def test_reading_goes_no_further_than_the_window_that_is_worked_on() -> None:
    taken = 0

    def samples() -> Any:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield placed(10)

    seen = [taken for _ in sample_windows(samples(), window_tokens=30)]
    assert seen[0] == 4
    assert all(later - earlier == 3 for earlier, later in pairwise(seen[:-1]))


def test_a_file_goes_through_in_windows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"values": [0.5] * 10, "reward": 1.0}] * 7)
    file = GaeSampleFile(tmp_path / "in.jsonl", load(None, [], {}).settings, window_tokens=20)
    written = WrittenAdvantages(None)
    file.write(tmp_path / "out.jsonl", written)
    assert (written.num_rows, written.num_tokens) == (7, 70)
    first, *others = (record["advantages"] for record in records_of(tmp_path / "out.jsonl"))
    # A chunk scan adds up in another order at each place of a row.
    np.testing.assert_allclose(others, [first] * 6, rtol=1e-6)


def drawn() -> list[Sample]:
    """Returns a finished sample, a truncated one, and one with masked tokens; all have a value after the last token."""
    rng = np.random.default_rng(0)
    samples = [
        make_sample(
            np.zeros(6),
            sample_index=i,
            reward=float(rng.normal()),
            policy_logprobs=rng.normal(-1, 0.3, 6).astype(np.float32),
            reference_logprobs=rng.normal(-1, 0.3, 6).astype(np.float32),
            values=rng.normal(0, 1, 7).astype(np.float32),
            loss_mask=np.array([1, 1, i != 2, 1, 1, 1], bool),
        )
        for i in range(3)
    ]
    return [replace(one, finish_reason=reason) for one, reason in zip(samples, ("stop", "length", "stop"), strict=True)]


RUN = ("--config", "smollm2_gsm8k_ppo", "--set", "algorithm.whiten_advantages=false")


@pytest.mark.parametrize("bootstraps", ["true", "false"])
def test_samples_get_the_credit_that_training_gives_them(tmp_path: Path, bootstraps: str) -> None:
    write_jsonl(tmp_path / "in.jsonl", map(sample_to_record, drawn()))
    truncation = f"algorithm.bootstrap_truncated={bootstraps}"
    arguments = (*RUN, "--set", truncation, "--set", "critic.lam=0.5", "--lam", "0.9")
    result = here("gae", "--input", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", *arguments)
    assert result.exit_code == 0, result.stderr
    settings = load("smollm2_gsm8k_ppo", [truncation, "critic.lam=0.5", "algorithm.lam=0.9"], {}).settings
    # The penalty counts: without it the numbers are others.
    trained, unpenalised = (make_gae_advantages(settings)(drawn(), beta) for beta in (settings.algorithm.beta, 0.0))
    for record, one, other in zip(records_of(tmp_path / "out.jsonl"), trained, unpenalised, strict=True):
        assert one.advantages is not None and one.returns is not None and other.advantages is not None
        np.testing.assert_array_equal(np.float32(record["advantages"]), one.advantages)
        np.testing.assert_array_equal(np.float32(record["returns"]), one.returns)
        assert not np.allclose(one.advantages, other.advantages, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference_logprobs": None}, "missing reference_logprobs, which the KL penalty in the reward needs"),
        ({"policy_logprobs": [0.0]}, "policy_logprobs has 1 entries, expected 6"),
        (
            {"finish_reason": "length", "values": [0.0] * 6},
            "values has 6 entries, expected 7: the sample was",
        ),
        ({"values": None}, "missing values, a number for each completion token; `grpo score --role critic` adds them"),
    ],
)
def test_what_training_would_need_is_needed_here(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_jsonl(tmp_path / "in.jsonl", [sample_to_record(drawn()[0]) | changes])
    arguments = (*RUN, "--set", "algorithm.bootstrap_truncated=true")
    result = here("gae", "--input", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", *arguments)
    assert result.exit_code == 2
    assert f"in.jsonl:1: {message}" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_sample_without_finish_reason_goes_on_where_it_has_one_value_more() -> None:
    def read(**fields: Any) -> str:
        record = {"reward": 1.0, "completion_token_ids": [7, 8], **fields}
        return sample_for_advantages(
            record, where="", bootstrap_truncated=False, needs_logprobs=False, needs_turns=False
        ).finish_reason

    assert read(values=[0.0, 0.0, 0.0]) == "length"
    assert read(values=[0.0, 0.0]) == "stop"
    assert read(values=[0.0, 0.0, 0.0], finish_reason="length") == "stop"


def test_turns_are_discounted_as_in_training(tmp_path: Path) -> None:
    played = with_turns([(1, 1), (1, 0)], values=np.zeros(3, np.float32), token_rewards=np.array([1, 0, 4], np.float32))
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(json.dumps(sample_to_record(played)) + "\n")
    for discount, first in (("0.5", 3.0), ("1.0", 5.0)):
        chosen = settings(f"env.turn_discount={discount}")
        result = here("gae", *chosen, "--lam", "1", "--input", path, "--out", out, "--overwrite", "--gamma", "1")
        assert result.exit_code == 0, result.stderr
        assert records_of(out)[0]["returns"] == [first, 0.0, 4.0]
