"""`grpo inspect-mesh --plan`: how a file would be cut, for people, for programs and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from app.records.jsonl import write_jsonl
from tests.program import digest_of, here, of_tiny, records_of, settings
from tests.tiny_directory import write_model

UNSHARED = ("batching.share_prompts=false", "mesh.shape=1,8,1")


def plan(model: Path, file: Path, *overrides: str, also: tuple[str | Path, ...] = ()) -> Result:
    return here("inspect-mesh", *of_tiny(model), *settings(*overrides), "--plan", file, *also)


def lengths_file(path: Path, lengths: list[tuple[int, int]]) -> Path:
    """Nothing but token ids; every prompt another."""
    write_jsonl(
        path,
        [
            {"prompt_token_ids": [i % 24] * prompt, "completion_token_ids": [5] * completion}
            for i, (prompt, completion) in enumerate(lengths)
        ],
    )
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Ten samples of 16 tokens on 8 devices."""
    return lengths_file(tmp_path / "small.jsonl", [(6, 10)] * 10)


def test_fixed_rows_by_hand(small: Path, tiny_model: Path) -> None:
    result = plan(tiny_model, small, *UNSHARED, "algorithm.rows_per_device=1")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        f"{small} as an optimizer step: fixed rows of one sample; mesh dp 1, fsdp 8, tp 1\n"
        "fill 62.5%: 10 samples in 2 micro-batches of at most 1 x 16 tokens on each of 8 devices\n"
        "\n"
        "micro-batch  rows a device  tokens a row  samples  real tokens    fill    fullest device\n"
        "          1              1            16        8          128  100.0%  1.00 x mean work\n"
        "          2              1            16        2           32   25.0%  4.00 x mean work\n"
        "        all                                    10          160   62.5%  1.60 x mean work\n"
        "\n"
        "shared prompts save 0 of 160 tokens (0.0%)\n"
        "6 of 16 rows are empty, 0 over the quota\n"
        "tokens a device: 16 to 32 in the order of the file, 16 to 32 as planned; mean 20\n"
        "\n"
        "a character is 1 token: AAAaaa a prompt and its completions, BBBbbb the next, ... padding\n"
        "micro-batch 1\n"
        + "".join(f"  device {device}  AAAAAAaaaaaaaaaa  100.0%    1 sample\n" for device in range(8))
        + "micro-batch 2\n"
        + "".join(f"  device {device}  AAAAAAaaaaaaaaaa  100.0%    1 sample\n" for device in range(2))
        + "".join(f"  device {device}  ................    0.0%    0 samples\n" for device in range(2, 8))
    )


def test_packed_rows_beside_their_padded_alternative(tmp_path: Path, tiny_model: Path) -> None:
    file = lengths_file(tmp_path / "mixed.jsonl", [(6, 10)] * 8 + [(6, 2)] * 16)
    result = plan(tiny_model, file, *UNSHARED, "algorithm.max_tokens_per_device=32", also=("--json",))
    report = json.loads(result.stdout)
    assert report["role"] == "update" and report["max_tokens_per_device"] == 32
    assert (report["num_samples"], report["num_tokens"]) == (24, 8 * 16 + 16 * 8)
    # 256 tokens on 8 devices of 32: full.
    assert report["figures"]["fill"] == 1.0 and report["figures"]["num_micro_batches"] == 1
    assert report["padded"] == {
        "rows_per_device": 2,
        "num_micro_batches": 2,
        "computed_tokens": 24 * 16,
        "fill": 256 / (24 * 16),
    }
    (micro_batch,) = report["micro_batches"]
    assert micro_batch["real_tokens"] == 256
    held = [i for row in micro_batch["rows"] for segment in row for i in segment]
    assert sorted(held) == list(range(24)) and len(micro_batch["rows"]) == 8 * micro_batch["rows_per_device"]
    assert "padded instead, 2 rows a device: 2 micro-batches, 384 tokens computed for 256 (1.50 x)" in (
        plan(tiny_model, file, *UNSHARED, "algorithm.max_tokens_per_device=32").stdout
    )


def test_the_plan_of_a_role_is_how_score_cuts(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    for chosen in ("score.policy.max_tokens_per_device=24", "score.policy.rows_per_device=2"):
        report = json.loads(plan(tiny_model, sampled, chosen, also=("--role", "policy", "--json")).stdout)
        arguments = ("--input", sampled, "--out", tmp_path / "scored.jsonl", "--json")
        figures = json.loads(here("score", *of_tiny(tiny_model), *settings(chosen), *arguments).stdout)
        assert figures["micro-batches"] == report["figures"]["num_micro_batches"]
        assert figures["real tokens"] == report["figures"]["real_tokens"]
        assert figures["padded tokens"] == report["figures"]["computed_tokens"] - report["figures"]["real_tokens"]


def test_the_plan_of_the_critic_is_how_its_values_are_scored(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    records = records_of(sampled)
    cut_short = sum(record["finish_reason"] == "length" for record in records)
    assert 0 < cut_short < len(records)
    longest = max(len(r["prompt_token_ids"]) + len(r["completion_token_ids"]) for r in records)

    def of_critic(quota: int, *overrides: str, behind: str = "true") -> Result:
        quotas = (f"algorithm.bootstrap_truncated={behind}", f"score.critic.max_tokens_per_device={quota}")
        return plan(tiny_model, sampled, *quotas, *overrides, also=("--role", "critic", "--json"))

    counted, without = (json.loads(of_critic(64, behind=behind).stdout)["num_tokens"] for behind in ("true", "false"))
    assert counted == without + cut_short
    # The value behind the longest sample wants a place, too.
    assert of_critic(longest + 1).exit_code == 0
    message = refused(of_critic(longest))
    assert f"{longest + 1} tokens, more than score.critic.max_tokens_per_device = {longest} (from --set)" in message
    # Whether samples fit is for the critic's own context to say.
    short = write_model(tmp_path / "critic", max_position_embeddings=longest - 1)
    assert f"holds {longest - 1}; leave" in refused(of_critic(longest + 1, f"critic.path={short}"))


def test_rows_of_the_update_are_those_of_a_run_however_short_the_file_is(small: Path, tiny_model: Path) -> None:
    def rows_of_a_run(max_new_tokens: int, *overrides: str) -> Result:
        run = [*of_tiny(tiny_model)[:-1], f"rollout.max_new_tokens={max_new_tokens}"]
        quota = settings(*UNSHARED, "algorithm.max_tokens_per_device=160", *overrides)
        return here("inspect-mesh", *run, *quota, "--plan", small, "--json")

    # A row is half the quota for as long as it holds two of the longest sample, 16 + 4 tokens here and 16 + 60 there.
    for max_new_tokens, longest_row in ((4, 40), (60, 160)):
        report = json.loads(rows_of_a_run(max_new_tokens).stdout)
        assert max(one["tokens_per_row"] for one in report["micro_batches"]) <= longest_row
    message = refused(rows_of_a_run(145))
    assert "algorithm.max_tokens_per_device = 160 (from --set) is less than the longest possible sample" in message


def test_work_grows_faster_than_length(tmp_path: Path, tiny_model: Path) -> None:
    file = lengths_file(tmp_path / "uneven.jsonl", [(6, 90), (6, 6), (6, 6), (6, 6), (6, 6), (6, 6), (6, 6), (6, 6)])
    report = json.loads(plan(tiny_model, file, *UNSHARED, "algorithm.rows_per_device=1", also=("--json",)).stdout)
    (micro_batch,) = report["micro_batches"]
    mean = (96 + 7 * 12) / 8
    assert micro_batch["flops_imbalance"] > 96 / mean


@pytest.mark.parametrize("name", ["rows.png", "rows.svg"])
def test_the_rows_are_drawn_to_a_file(small: Path, tiny_model: Path, tmp_path: Path, name: str) -> None:
    result = plan(tiny_model, small, also=("--picture", tmp_path / name))
    assert result.exit_code == 0, result.stderr
    start = {"rows.png": b"\x89PNG", "rows.svg": b"<?xml"}[name]
    assert (tmp_path / name).read_bytes().startswith(start)
    assert {path.name for path in tmp_path.iterdir()} == {name, "small.jsonl"}


def refused(result: Result) -> str:
    assert result.exit_code == 2
    assert result.stdout == "" and len(result.stderr.splitlines()) == 1
    return result.stderr


@pytest.mark.parametrize("also", [("--picture", "rows.png"), ("--role", "policy")])
def test_options_of_the_plan_want_a_plan(tiny_model: Path, also: tuple[str, ...]) -> None:
    assert f"{also[0]} goes with --plan FILE.jsonl" in refused(here("inspect-mesh", *of_tiny(tiny_model), *also))


def test_a_picture_of_another_kind_is_refused(small: Path, tiny_model: Path, tmp_path: Path) -> None:
    before = digest_of(tmp_path)
    for path, message in (
        (tmp_path / "rows.pdf", "--picture: expected a name that ends in .png or .svg"),
        (tmp_path / "no" / "rows.png", "does not exist; create it first"),
    ):
        assert message in refused(plan(tiny_model, small, also=("--picture", path)))
    assert digest_of(tmp_path) == before


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt_token_ids": [1]}, "missing completion_token_ids"),
        ({"prompt_token_ids": [1], "completion_token_ids": [24]}, "completion_token_ids[0] is token 24"),
        ({"prompt_token_ids": [1], "completion_token_ids": [1] * 128}, "1 + 128 = 129 tokens, and the context of"),
        (
            {"prompt_token_ids": [1], "completion_token_ids": [1] * 40},
            "the longest sample has 41 tokens, more than algorithm.max_tokens_per_device = 32 (from --set)",
        ),
    ],
)
def test_a_line_that_cannot_be_cut_is_named(
    small: Path, tiny_model: Path, record: dict[str, Any], message: str
) -> None:
    write_jsonl(small, [*records_of(small), record])
    stderr = refused(plan(tiny_model, small, "algorithm.max_tokens_per_device=32"))
    assert stderr.startswith(f"error: {small}:11: ") and message in stderr


def test_a_plan_of_nothing_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert "--plan: " in refused(plan(tiny_model, tmp_path / "empty.jsonl"))
    assert "no such file" in refused(plan(tiny_model, tmp_path / "absent.jsonl"))
