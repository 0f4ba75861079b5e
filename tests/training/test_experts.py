"""Tests runs of a tiny mixture of experts: replayed routes and refused settings."""

import base64
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.program import here, metrics_of, of_tiny, records_of, settings, succeeded, train_here
from tests.replays import assert_refused, assert_same_steps, replay, rewrite, step_file, train_on
from tests.run_fixtures import NO_REPORT, TINY, write_config
from tests.tiny_directory import write_model

MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}
REPLAYED = "rollout.routing_replay=true"
# Small quotas, shared prompts and several updates; the first update is compared with scored logprobs.
HOW = (
    *("model.dtype=bfloat16", "mesh.cpu_devices=8", "mesh.shape=2,2,2", "rollout.slots=8"),
    *("algorithm.mini_batch_prompts=2", "algorithm.max_tokens_per_device=40", "algorithm.beta=0.05"),
)

pytestmark = pytest.mark.usefixtures("real_devices_again")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixture") / "tiny", **MIXTURE)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("mesh.shape=2,1,4",), "mesh.shape: tp = 4 does not divide the 6 experts of "),
        (("rollout.mesh=tp=4",), "rollout.mesh: 'tp=4' does not divide the 6 experts of the model; set tp to "),
        (("model.lora.rank=2",), "model.lora.targets: all would adapt the MLP, but this model has 6 experts"),
        (("rollout.weights=int8",), "rollout.weights: int8 cannot quantize the matrices of this model's experts"),
        (
            ("model.lora.rank=2", "model.lora.targets=attention", "model.lora.quantize_base=int8"),
            "model.lora.quantize_base: int8 cannot quantize the matrices of this model's experts",
        ),
    ],
)
def test_unsupported_settings_of_experts_are_refused(mixture: Path, overrides: tuple[str, ...], message: str) -> None:
    result = here("inspect-mesh", *of_tiny(mixture), *settings(*overrides))
    assert result.exit_code == 2
    assert result.stderr.count("error: ") == 1 and message in result.stderr


@pytest.fixture(scope="module")
def drawn(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file of samples with recorded routes, which tests must not change."""
    out = tmp_path_factory.mktemp("drawn") / "samples.jsonl"
    options = ("--limit", "4", "--out", out)
    succeeded(here("rollout", *of_tiny(mixture), *settings(REPLAYED, "model.dtype=bfloat16"), *options))
    return out


@pytest.fixture
def routed_samples(drawn: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(drawn, tmp_path))


def routes_of(record: dict[str, Any]) -> np.ndarray:
    routes = record["routes"]
    shape = -1, routes["num_layers"], routes["experts_per_token"]
    return np.frombuffer(base64.b64decode(routes["ids"]), np.uint8).reshape(shape)


def set_routes(record: dict[str, Any], routes: np.ndarray) -> None:
    _, layers, experts = routes.shape
    ids = base64.b64encode(routes.astype(np.uint8).tobytes()).decode()
    record["routes"] = {"num_layers": layers, "experts_per_token": experts, "ids": ids}


@pytest.mark.slow
def test_training_uses_the_sampled_routes_in_a_run_and_in_a_run_on_its_saved_samples(
    mixture: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, TINY + NO_REPORT, mixture)
    succeeded(train_here(config, *HOW, REPLAYED, "run.steps=2", "eval.every_steps=0"))
    run = tmp_path / "runs" / "tiny"
    for line in metrics_of(run):
        assert 0 <= line["rollout/route_difference"] < 0.1
        # Each token uses two of six experts, so the load is three times the mean if all tokens use the same two.
        assert 1 < line["rollout/fullest_expert"] < 3
        assert line["rollout/sampler_scorer_logprob_diff_mean"] < 0.02
    for record in records_of(step_file(run, 1)):
        num_tokens = len(record["prompt_token_ids"]) + len(record["completion_token_ids"])
        routes = routes_of(record)
        assert routes.shape == (num_tokens, 2, 2)
        assert np.all(routes[:-1] < 6) and np.all(routes[-1] == 255)
    succeeded(replay(run, tmp_path / "again"))
    assert_same_steps(tmp_path / "again" / "tiny-replay", run, steps=(1, 2))


def test_expert_routes_of_another_model_are_refused(drawn: Path, tmp_path: Path, mixture: Path) -> None:
    config, out = write_config(tmp_path, TINY + NO_REPORT, mixture), tmp_path / "out.jsonl"
    for changed, message in (
        (lambda x: x[:, :1], r"samples.jsonl:1: routes has 2 experts in each of 1 layers, but model.path has 2 in"),
        (lambda x: 0 * x, r"routes sends token 0 through experts \[0, 0\] of layer 0, .* each at most once"),
    ):
        samples = Path(shutil.copy(drawn, tmp_path))
        rewrite(samples, lambda record, changed=changed: set_routes(record, changed(routes_of(record))))
        assert_refused(train_on(samples, config, REPLAYED, "run.steps=1"), message, tmp_path / "runs")
        arguments = ("score", *of_tiny(mixture), "--input", samples, "--out", out, "--role", "policy")
        assert_refused(here(*arguments, *settings(REPLAYED)), message, out)
    # Without replay, the routes are not read and are only copied to the output.
    succeeded(here(*arguments))
    assert records_of(out)[0]["routes"] == records_of(samples)[0]["routes"]


def test_a_file_is_scored_with_its_recorded_routes(routed_samples: Path, mixture: Path, tmp_path: Path) -> None:
    def rotate(record: dict[str, Any]) -> None:
        routes = routes_of(record)
        set_routes(record, np.where(routes == 255, routes, (routes + 1) % 6))

    logprobs = {}
    behavior = np.concatenate([record["behavior_logprobs"] for record in records_of(routed_samples)])
    for name in ("own", "foreign"):
        arguments = "--input", routed_samples, "--out", tmp_path / name, "--role", "policy"
        succeeded(here("score", *of_tiny(mixture), *settings(REPLAYED, "model.dtype=bfloat16"), *arguments))
        logprobs[name] = np.concatenate([record["policy_logprobs"] for record in records_of(tmp_path / name)])
        rewrite(routed_samples, rotate)
    assert np.abs(logprobs["own"] - behavior).mean() < 0.02 < np.abs(logprobs["foreign"] - behavior).mean()


def test_settings_that_cannot_record_routes_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    many = write_model(tmp_path / "model", **MIXTURE | {"num_experts": 256, "moe_intermediate_size": 2})
    for model, message in (
        (tiny_model, "rollout.routing_replay: true records the experts of each token, but .* is a dense model"),
        (many, "rollout.routing_replay: .* is a mixture of 256 experts, but a byte can record only 255; set rollout"),
    ):
        result = here("train", *of_tiny(model), *settings(REPLAYED, f"run.dir={tmp_path / 'runs'}"))
        assert_refused(result, message, tmp_path / "runs")
