"""Tests of runs that replay the routes of a tiny mixture of experts, and of the files that hold them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.records.jsonl import write_jsonl
from tests.program import here, metrics_of, of_tiny, records_of, settings, train_here
from tests.replays import assert_refused, replay, step_file, train_on
from tests.run_fixtures import NO_REPORT, TINY, write_config
from tests.tiny_directory import write_model
from tests.training.test_experts import MIXTURE
from tests.training.test_replay import assert_same_steps

REPLAYED = "rollout.routing_replay=true"
# Small quotas, shared prompts and several updates, whose first one compares with scored logprobs.
HOW = (
    *("model.dtype=bfloat16", "mesh.cpu_devices=8", "mesh.shape=2,2,2", "rollout.slots=8"),
    *("algorithm.mini_batch_prompts=2", "algorithm.max_tokens_per_device=40", "algorithm.beta=0.05"),
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixture") / "tiny", **MIXTURE)


@pytest.fixture(scope="module")
def config(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("runs"), TINY + NO_REPORT, mixture)


@pytest.fixture(scope="module")
def finished(config: Path) -> Path:
    result = train_here(config, *HOW, REPLAYED, "run.steps=2")
    assert result.exit_code == 0, result.stderr
    return config.parent / "runs" / "tiny"


@pytest.fixture
def loose(finished: Path, tmp_path: Path) -> Path:
    """A copy of the samples of a step, which belongs to no run."""
    write_jsonl(tmp_path / "samples.jsonl", records_of(step_file(finished, 1)))
    return tmp_path / "samples.jsonl"


def routes_of(record: dict[str, Any]) -> np.ndarray:
    routes = record["routes"]
    shape = -1, routes["num_layers"], routes["experts_per_token"]
    return np.frombuffer(base64.b64decode(routes["ids"]), np.uint8).reshape(shape)


def test_a_run_records_replays_and_measures_the_routes_of_its_samples(finished: Path) -> None:
    for line in metrics_of(finished)[1:]:
        assert 0 <= line["rollout/route_difference"] < 0.1
        # Two of six experts: three times the mean if all tokens pass through the same ones.
        assert 1 < line["rollout/fullest_expert"] < 3
        assert line["rollout/sampler_scorer_logprob_diff_mean"] < 0.02
    for record in records_of(step_file(finished, 1)):
        num_tokens = len(record["prompt_token_ids"]) + len(record["completion_token_ids"])
        routes = routes_of(record)
        assert routes.shape == (num_tokens, 2, 2)
        assert np.all(routes[:-1] < 6) and np.all(routes[-1] == 255)


def test_without_replay_no_routes_are_recorded_and_only_the_load_is_measured(config: Path) -> None:
    result = train_here(config, *HOW, "run.steps=1", "run.name=live")
    assert result.exit_code == 0, result.stderr
    run = config.parent / "runs" / "live"
    assert "rollout/route_difference" not in metrics_of(run)[1] and metrics_of(run)[1]["rollout/fullest_expert"] > 1
    assert not any("routes" in record for record in records_of(step_file(run, 1)))


def test_saved_samples_are_replayed_with_their_routes_bit_for_bit(finished: Path, tmp_path: Path) -> None:
    result = replay(finished, tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "routes:" not in result.stdout + result.stderr
    assert_same_steps(tmp_path / "tiny-replay", finished, steps=(1, 2))


def change(path: Path, how: Callable[[dict[str, Any]], object]) -> Path:
    records = records_of(path)
    for record in records:
        how(record)
    write_jsonl(path, records)
    return path


def with_routes(record: dict[str, Any], routes: np.ndarray) -> None:
    _, layers, experts = routes.shape
    ids = base64.b64encode(routes.tobytes()).decode()
    record["routes"] = {"num_layers": layers, "experts_per_token": experts, "ids": ids}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            lambda x: x[:, :1],
            r"samples.jsonl:1: routes has 2 experts in each of 1 layers, and model.path has 2 in each",
        ),
        (lambda x: 0 * x, r"routes sends token 0 through experts \[0, 0\] of layer 0; .* each at most once"),
    ],
    ids=["layers", "twice"],
)
def test_routes_of_another_model_are_refused_where_they_would_be_replayed(
    loose: Path, config: Path, tmp_path: Path, mixture: Path, changed: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    change(loose, lambda record: with_routes(record, changed(routes_of(record)).astype(np.uint8)))
    other = write_config(tmp_path, TINY + NO_REPORT, mixture)
    assert_refused(train_on(loose, other, REPLAYED, "run.steps=1"), message, tmp_path / "runs")
    arguments = "--input", loose, "--out", tmp_path / "out.jsonl", "--role", "policy"
    assert_refused(here("score", *of_tiny(mixture), *settings(REPLAYED), *arguments), message, tmp_path / "out.jsonl")
    # Otherwise nobody reads them, and they are carried through.
    result = here("score", *of_tiny(mixture), *arguments)
    assert result.exit_code == 0, result.stderr
    assert records_of(tmp_path / "out.jsonl")[0]["routes"] == records_of(loose)[0]["routes"]


def test_samples_without_routes_are_routed_live(loose: Path, config: Path) -> None:
    change(loose, lambda record: record.pop("routes"))
    result = train_on(loose, config, *HOW, REPLAYED, "run.steps=1", "run.name=routeless")
    assert result.exit_code == 0, result.stderr
    line = metrics_of(config.parent / "runs" / "routeless")[-1]
    assert line["rollout/route_difference"] is None and line["rollout/fullest_expert"] > 1


def test_a_file_is_scored_on_its_routes(loose: Path, mixture: Path, tmp_path: Path) -> None:
    def rotate(record: dict[str, Any]) -> None:
        routes = routes_of(record)
        with_routes(record, np.where(routes == 255, routes, (routes + 1) % 6).astype(np.uint8))

    logprobs = {}
    for name in ("own", "foreign"):
        arguments = "--input", loose, "--out", tmp_path / name, "--role", "policy"
        result = here("score", *of_tiny(mixture), *settings(REPLAYED, "model.dtype=bfloat16"), *arguments)
        assert result.exit_code == 0, result.stderr
        logprobs[name] = np.concatenate([record["policy_logprobs"] for record in records_of(tmp_path / name)])
        behavior = np.concatenate([record["behavior_logprobs"] for record in records_of(loose)])
        change(loose, rotate)
    assert np.abs(logprobs["own"] - behavior).mean() < 0.02 < np.abs(logprobs["foreign"] - behavior).mean()


def test_a_dense_model_has_no_routes_to_replay(tiny_model: Path, tmp_path: Path) -> None:
    result = here("train", *of_tiny(tiny_model), *settings(REPLAYED, f"run.dir={tmp_path / 'runs'}"))
    message = "rollout.routing_replay: true records the experts of each token, but .* is a dense model; set it to false"
    assert_refused(result, message, tmp_path / "runs")


def test_more_experts_than_a_byte_can_name_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **MIXTURE | {"num_experts": 256, "moe_intermediate_size": 2})
    result = here("train", *of_tiny(model), *settings(REPLAYED, f"run.dir={tmp_path / 'runs'}"))
    message = "is a mixture of 256 experts, of which a byte names 255; set it to false"
    assert_refused(result, f"rollout.routing_replay: .* {message}", tmp_path / "runs")
