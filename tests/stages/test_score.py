"""Tests of `grpo score`: every role and strategy, complete output files, and invalid input."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.mesh import jax_startup
from app.mesh.program_cache import CompilationCounter
from app.records.jsonl import write_jsonl
from app.records.sample_json import LocatedSample, sample_from_record
from app.reward.aggregate import RewardOutcome, aggregate_rewards
from app.runtime.micro_batching import MaxLengths, make_score_batcher
from app.runtime.model_spec import read_model_spec
from app.runtime.scoring import ScoringSession
from app.stages.score import WindowScorer
from app.tracking.sample_metrics import reward_counts
from settings import load
from tests.program import DEADLINE_S, digest_of, here, of_tiny, records_of, settings, started

QUOTA = "score.max_tokens_per_device"


def score(model: Path, source: Path, out: Path, role: str, *overrides: str, overwrites: bool = False) -> Any:
    arguments = ("--input", source, "--out", out, "--role", role, "--json", *(["--overwrite"] * overwrites))
    return here("score", *of_tiny(model), *settings(*overrides), *arguments)


def test_the_chain_of_verbs_adds_its_fields_and_carries_the_rest(
    sampled: Path, tiny_model: Path, tmp_path: Path
) -> None:
    records = [
        record | {"note": [1, {"a": None}], "weight": 1e-30, "my_scores": [0.5]} for record in records_of(sampled)
    ]
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


@pytest.mark.parametrize(
    ("overrides", "shapes"),
    [
        (("score.strategy=off",), 1),
        (("score.rows_per_device=2",), 2),
        (("score.strategy=scan", "score.rows_per_device=2"), 1),
        ((f"{QUOTA}=32",), None),
        (("score.reference.offload=true", "mesh.shape=2,2,2"), None),
    ],
)
def test_every_strategy_gives_the_samplers_own_logprobs_in_the_order_of_the_file(
    sampled: Path, tiny_model: Path, tmp_path: Path, overrides: tuple[str, ...], shapes: int | None
) -> None:
    records = [record | {"note": number} for number, record in enumerate(records_of(sampled))][:17]
    write_jsonl(tmp_path / "samples.jsonl", records)
    result = score(tiny_model, tmp_path / "samples.jsonl", tmp_path / "scored.jsonl", "reference", *overrides)
    assert result.exit_code == 0, result.stderr
    for before, after in zip(records, records_of(tmp_path / "scored.jsonl"), strict=True):
        np.testing.assert_allclose(after.pop("reference_logprobs"), before["behavior_logprobs"], atol=1e-5)
        assert after == before
    figures = json.loads(result.stdout)
    if shapes is not None:
        assert figures["shapes compiled"] == shapes


def test_the_table_counts_what_was_laid_out(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    result = score(tiny_model, sampled, tmp_path / "scored.jsonl", "policy", "score.rows_per_device=1")
    figures = json.loads(result.stdout)
    tokens = sum(len(r["prompt_token_ids"]) + len(r["completion_token_ids"]) for r in records_of(sampled))
    # 24 samples on 8 devices, each in a row of 16 tokens: none has more.
    assert (
        figures.items()
        >= {
            "samples": 24,
            "tokens": tokens,
            "real tokens": tokens,
            "padded tokens": 24 * 16 - tokens,
            "fill": round(tokens / (24 * 16), 4),
            "micro-batches": 3,
            "shapes compiled": 1,
            "written to": str(tmp_path / "scored.jsonl"),
        }.items()
    )
    measured = {"peak memory MiB", "loading seconds", "compiling seconds", "compilations", "seconds", "tokens/s"}
    differences = {"mean |logprob - behavior|", "max |logprob - behavior|"}
    assert all(figures[name] >= 0 for name in measured | differences)
    assert len(figures) == 8 + len(measured) + len(differences)


def test_memory_and_shapes_do_not_grow_with_the_number_of_windows(sampled: Path, tiny_model: Path) -> None:
    """Every window is scored and written before the next is read, with the shapes of the first."""
    given = [argument for argument in of_tiny(tiny_model) if argument != "--set"]
    chosen = load(None, [*given, "mesh.shape=1,8,1", f"{QUOTA}=32"], {}).settings
    jax_startup.initialize_distributed(chosen.mesh)
    session = ScoringSession.open(chosen, read_model_spec(chosen))
    records = records_of(sampled)
    samples = [sample_from_record(r, where="") for r in records]
    longest = max(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
    cut = make_score_batcher(chosen, "policy", session.model_spec.architecture, MaxLengths(longest))
    passes = WindowScorer(session, session.load_params(), "policy", micro_batcher=cut)
    read: list[int] = []

    def windows(size: int) -> Any:
        for first in range(0, len(samples), size):
            read.append(first)
            yield [LocatedSample("", r, s) for r, s in zip(records, samples, strict=True)][first : first + size]

    counter = CompilationCounter()
    scored: list[dict[str, Any]] = []
    stream = chain.from_iterable(passes.score_windows(windows(11), num_samples=24))
    for window in range(2):
        scored += islice(stream, 11)
        assert read == [0, 11][: window + 1]
    first_windows = passes.metrics(counter)
    scored += stream
    last = passes.metrics(counter)
    counter.close()
    assert [record["uid"] for record in scored] == [s.uid for s in samples]
    for record in scored:
        np.testing.assert_allclose(record["policy_logprobs"], record["behavior_logprobs"], atol=1e-4)
    assert last["shapes compiled"] <= first_windows["shapes compiled"] + 1


def test_packing_is_checked_on_samples_of_the_file(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--input", sampled, "--out", tmp_path / "scored.jsonl", "--check-packing", "--json", "--overwrite")
    for chosen in ((), settings("score.rows_per_device=8")):
        result = here("score", *of_tiny(tiny_model), *chosen, *arguments)
        assert result.exit_code == 0, result.stderr
        assert 0 <= json.loads(result.stdout)["max |packed - alone|"] < 1e-5


def test_rewards_need_no_model(sampled: Path, tmp_path: Path) -> None:
    result = score(Path("no/such/model"), sampled, tmp_path / "rewarded.jsonl", "reward")
    assert result.exit_code == 0, result.stderr
    rewards = [record["reward"] for record in records_of(tmp_path / "rewarded.jsonl")]
    assert json.loads(result.stdout)["reward/mean"] == round(float(np.mean(rewards)), 4)


def test_rewards_count_what_length_costs_as_in_training(sampled: Path, tmp_path: Path) -> None:
    result = score(tmp_path, sampled, tmp_path / "rewarded.jsonl", "reward", "reward.overlong_buffer=2")
    assert result.exit_code == 0, result.stderr
    records = records_of(tmp_path / "rewarded.jsonl")
    costs = [-max(len(record["completion_token_ids"]) - 2, 0) / 2 for record in records]
    assert len(set(costs)) > 1 and [record["rewards"]["overlong"] for record in records] == costs
    assert [record["reward"] - record["rewards"]["arithmetic"] for record in records] == costs
    assert json.loads(result.stdout)["reward/overlong/mean"] == round(float(np.mean(costs)), 4)


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
    outcomes = {"f": [RewardOutcome(1.0, extras={"acc": 1.0})] * len(samples)}
    assert figures.keys() == own | reward_counts(aggregate_rewards(samples, outcomes, {"f": 1.0}, "raise")).keys()
    assert figures["reward/f/acc/mean"] == 0.3333


def test_an_existing_output_is_replaced_only_when_the_new_one_is_whole(
    sampled: Path, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("what was there before\n")
    records = records_of(sampled)
    write_jsonl(tmp_path / "bad.jsonl", [*records[:-1], records[-1] | {"answer": "no number"}])
    before = digest_of(tmp_path)
    result = score(tiny_model, tmp_path / "bad.jsonl", out, "reward", overwrites=True)
    assert result.exit_code == 2
    assert "no number" in result.stderr
    assert digest_of(tmp_path) == before
    assert score(tiny_model, sampled, out, "reward", overwrites=True).exit_code == 0
    assert len(records_of(out)) == 24
    assert {path.name for path in tmp_path.iterdir()} == {"bad.jsonl", "out.jsonl"}


def with_fields(**fields: Any) -> Callable[[str], str]:
    return lambda line: json.dumps(json.loads(line) | fields)


def as_nan(line: str) -> str:
    record = json.loads(line)
    return json.dumps(record | {"behavior_logprobs": [*record["behavior_logprobs"][:-1], float("nan")]})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda line: line[:-9], "not JSON"),
        (
            with_fields(completion_token_ids=None, completion=None),
            "missing completion_token_ids or completion; a sample",
        ),
        (
            with_fields(completion="not it"),
            "completion: 'not it' is not what completion_token_ids decode",
        ),
        (
            with_fields(behavior_logprobs=[0.5] * 4, completion_token_ids=[5] * 4, completion=None),
            "[0] is 0.5, but a lo",
        ),
        (
            with_fields(completion_token_ids=None, completion=[{"role": "user", "content": "1"}]),
            "completion: expected a string or a list with one",
        ),
        (with_fields(prompt_token_ids=None, prompt="\ud800"), "prompt is not Unicode text: surrogates not allowed"),
        (as_nan, "expected finite float32 numbers, got NoneType null or NaN"),
        (lambda line: line[:-1] + ', "note": [1, 2e999]}', "note[1] is Infinity, or too large for a float64"),
        (
            with_fields(prompt_token_ids=[2, 24]),
            "prompt_token_ids[1] is token 24, but the vocabulary of",
        ),
        (
            with_fields(prompt_token_ids=[2] * 128),
            "tokens, but the context of model.path is 128; remove the",
        ),
        (with_fields(prompt_token_ids=[2] * 100), "tokens, more than score.policy.max_tokens_per_device = 64 (from"),
    ],
)
def test_a_line_that_cannot_be_scored_is_named_before_any_device_work(
    sampled: Path, tiny_model: Path, tmp_path: Path, spoil: Callable[[str], str], message: str
) -> None:
    lines = sampled.read_text().splitlines()
    lines[8] = spoil(lines[8])
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    (tmp_path / "out.jsonl").write_text("what was there before\n")
    before = digest_of(tmp_path)
    paths = tmp_path / "samples.jsonl", tmp_path / "out.jsonl"
    result = score(tiny_model, *paths, "policy", f"{QUOTA}=64", overwrites=True)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'samples.jsonl'}:9: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert digest_of(tmp_path) == before


@pytest.mark.parametrize(
    ("role", "content", "message"),
    [
        ("policy", "", "holds no samples"),
        ("reward", "", "holds no samples"),
        ("policy", '{"uid": "p/s0"}\n', "samples.jsonl:1: missing "),
        ("reward", None, "samples.jsonl: no such file"),
    ],
)
def test_a_file_without_samples_is_refused(
    tiny_model: Path, tmp_path: Path, content: str | None, message: str, role: str
) -> None:
    if content is not None:
        (tmp_path / "samples.jsonl").write_text(content)
    result = score(tiny_model, tmp_path / "samples.jsonl", tmp_path / "out.jsonl", role)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_pipe_cannot_be_read_twice(tiny_model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = score(tiny_model, tmp_path / "pipe", tmp_path / "out.jsonl", "policy")
    assert result.exit_code == 2
    assert "is not a regular file; it must be read twice" in result.stderr


def test_rewards_have_no_packing_to_check(sampled: Path, tmp_path: Path) -> None:
    result = here("score", "--role", "reward", "--check-packing", "--input", sampled, "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "--check-packing needs a model, but --role reward uses none" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_scores_as_the_sampler_that_had_its_weights(finished: Path, tmp_path: Path) -> None:
    samples = finished / "rollouts" / "step_000003.jsonl"
    differences = []
    for step in ("2", "4"):
        out = tmp_path / f"{step}.jsonl"
        result = here(
            *("score", "--checkpoint", finished / "checkpoints" / step, "--input", samples, "--out", out, "--json")
        )
        assert result.exit_code == 0, result.stderr
        differences.append(json.loads(result.stdout)["max |logprob - behavior|"])
    assert differences[0] < 1e-4 < differences[1]


def test_the_critic_of_a_checkpoint_gives_the_values_of_its_run(tiny_model: Path, tmp_path: Path) -> None:
    ppo = settings("algorithm.name=ppo", "critic.learning_rate=1e-2", "reward.overlong_buffer=3", "run.steps=2")
    of_run = settings(
        f"run.dir={tmp_path}",
        "run.name=ppo",
        "checkpoint.every_steps=1",
        "checkpoint.best_metric=null",
        "logging.report=false",
    )
    trained = here("train", *of_tiny(tiny_model), *ppo, *of_run, *settings("checkpoint.keep=2", "eval.every_steps=0"))
    assert trained.exit_code == 0, trained.stderr
    records = records_of(tmp_path / "ppo" / "rollouts" / "step_000002.jsonl")
    write_jsonl(tmp_path / "in.jsonl", [{k: v for k, v in one.items() if k != "values"} for one in records])
    values = []
    for step in ("1", "2"):
        out = tmp_path / f"{step}.jsonl"
        result = here(
            *("score", "--role", "critic", "--checkpoint", tmp_path / "ppo" / "checkpoints" / step),
            *("--input", tmp_path / "in.jsonl", "--out", out),
        )
        assert result.exit_code == 0, result.stderr
        values.append(np.concatenate([one["values"] for one in records_of(out)]))
    expected = np.concatenate([one["values"] for one in records])
    np.testing.assert_allclose(values[0], expected, atol=1e-5)
    assert np.abs(values[1] - expected).max() > 1e-3


def test_a_checkpoint_is_refused_where_it_has_no_part(finished: Path, sampled: Path, tmp_path: Path) -> None:
    command = ("score", "--checkpoint", finished, "--input", sampled, "--out", tmp_path / "out.jsonl", "--role")
    for role, reason in {
        "critic": "holds no critic, because its run trained none",
        "reference": "--role reference uses only the weights of model.path; omit one",
        "reward": "--role reward uses only the weights of reward.model; omit one",
    }.items():
        result = here(*command, role)
        assert result.exit_code == 2
        assert "--checkpoint" in result.stderr and reason in result.stderr
    assert list(tmp_path.iterdir()) == []
