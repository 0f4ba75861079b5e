"""Tests that `grpo doctor` checks everything that a run needs, reports every problem, and leaves nothing behind."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from app.preflight import doctor, model_checks
from tests.program import digest_of, here, settings
from tests.reward.processes import children
from tests.run_fixtures import NO_REPORT, TINY, write_config
from tests.tiny_directory import CONFIG, random_tensors, write_model, write_reward_model

CANARY = "CANARY-0123456789abcdef"
Checks = Mapping[str, Mapping[str, Any]]
QUIET = ("eval.every_steps=0",)


def examined(*arguments: str | Path) -> tuple[int, Checks, str]:
    """Returns the exit code, the results by check, and stderr."""
    result = here("doctor", "--json", *arguments)
    found = json.loads(result.stdout)
    assert found["exit_code"] == result.exit_code, result.stderr
    return result.exit_code, {one["check"]: one for one in found["checks"]}, result.stderr


def verdicts(checks: Checks, *names: str) -> list[str]:
    return [checks[name]["verdict"] for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def of_quickstart(folder: Path) -> tuple[int, Checks, str]:
    return examined(*settings(f"run.dir={folder / 'runs'}"))


def test_nothing_is_amiss_with_the_quickstart(of_quickstart: tuple[int, Checks, str]) -> None:
    code, checks, stderr = of_quickstart
    assert (code, stderr) == (0, "")
    assert list(checks) == [
        *("devices", "settings", "versions", "run directory", "model", "data", "held-out data", "template", "reward"),
        *("mesh", "memory", "forward", "disk"),
    ]
    assert {one["verdict"] for one in checks.values()} == {"ok"}


def test_it_shows_what_it_has_tried(of_quickstart: tuple[int, Checks, str]) -> None:
    found = {name: one["found"] for name, one in of_quickstart[1].items()}
    assert found["devices"].startswith("8 x cpu (cpu), ")
    assert "109,504 parameters" in found["model"]
    prompt, ending = found["template"].splitlines()
    assert prompt.startswith("arithmetic/") and prompt.endswith("=?<|assistant|>'")
    assert ending == "it does not mark the end of an answer"
    assert found["reward"] == "arithmetic: 1 for the reference answer, 0 for others"
    assert "logits are finite; likeliest tokens after the prompt: '" in found["forward"]
    assert "end of turn after the reference answer: 1; loaded in" in found["forward"]
    assert found["mesh"].startswith("dp 1, fsdp 8, tp 1")
    assert "keeps 4 checkpoints of 1.3 MiB" in found["disk"]


def test_it_leaves_nothing_behind(of_quickstart: tuple[int, Checks, str], folder: Path) -> None:
    assert of_quickstart[0] == 0
    assert list(folder.iterdir()) == []
    assert children() == []


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Checks, str]:
    """Settings with a NaN in the weights, a plug-in that fails and quotes a key, an existing run, and sizes that do not
    divide."""
    folder = tmp_path_factory.mktemp("broken")
    model = write_model(folder / "model")
    tensors = random_tensors(CONFIG)
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, model / "model.safetensors")
    (folder / "plug.py").write_text(f"def judge(completion): raise ValueError('no luck\\nwith {CANARY}')\n")
    (folder / "runs" / "tiny").mkdir(parents=True)
    (folder / "runs" / "tiny" / "settings.yaml").touch()
    config = write_config(folder, TINY + NO_REPORT, model)
    before = digest_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", CANARY)
        changed = (f"reward.functions=['{folder}/plug.py:judge']", "algorithm.mini_batch_prompts=3")
        found = examined("--config", config, *settings(*changed))
    assert digest_of(folder) == before
    return found


def test_what_one_check_finds_does_not_hide_the_next(broken: tuple[int, Checks, str]) -> None:
    code, checks, stderr = broken
    assert code == 2, "settings cannot be used, whatever else fails"
    assert [name for name, one in checks.items() if one["verdict"] == "fail"] == ["settings", "reward", "forward"]
    assert stderr.splitlines()[-1] == "error: settings, reward, forward: a run with these settings would fail"
    assert verdicts(checks, "run directory", "model", "data", "disk") == ["warn", "ok", "ok", "ok"]
    assert "does not divide rollout.prompts_per_step" in checks["settings"]["found"]
    assert checks["run directory"]["advice"] == "continue it with --resume auto, or choose another run.name"


def test_a_plug_in_that_fails_is_told_in_a_line_without_secrets(broken: tuple[int, Checks, str]) -> None:
    _, checks, stderr = broken
    assert checks["reward"]["exit_code"] == 1
    told, how = checks["reward"]["found"].splitlines()
    assert "reward.functions: judge: raised: ValueError: no luck with <HF_TOKEN>" in told
    assert how.startswith("reward judge: ") and CANARY not in json.dumps(checks) + stderr


def test_weights_that_give_no_number_are_found(broken: tuple[int, Checks, str]) -> None:
    assert broken[1]["forward"]["found"] == "logits are not finite"
    assert "model.dtype: float32" in broken[1]["forward"]["advice"]


def test_without_a_model_the_rest_is_still_looked_at(config: Path) -> None:
    missing = settings(f"model.path={config.parent / 'nowhere'}", "mesh.platform=tpu")
    code, checks, _ = examined("--config", config, *missing)
    assert code == 2
    assert {name: one["verdict"] for name, one in checks.items()} == {
        **{"devices": "fail", "settings": "ok", "versions": "ok", "run directory": "ok", "model": "fail"},
        **{"data": "ok", "held-out data": "ok", "template": "skip", "reward": "skip", "mesh": "skip"},
        **{"memory": "skip", "forward": "skip", "disk": "skip"},
    }
    assert "mesh.platform: tpu is not available" in checks["devices"]["found"]
    assert "nowhere' is neither an existing directory or file nor a hub id" in checks["model"]["found"]
    assert checks["held-out data"]["found"].endswith("without a tokenizer there are no prompts")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("judge") / "model")


def test_a_mesh_that_does_not_fit_is_found_and_the_rest_all_the_same(config: Path, judge: Path) -> None:
    code, checks, _ = examined("--config", config, *settings("mesh.shape='3,1,1'", f"reward.model={judge}", *QUIET))
    assert code == 2
    assert "mesh.shape: '3,1,1' needs 3 devices, but there are 8" in checks["mesh"]["found"]
    skipped = ("memory", "forward", "reward model", "disk")
    assert list(checks) == [
        *("devices", "settings", "versions", "run directory", "model", "data", "template", "reward"),
        *("mesh", *skipped),
    ]
    assert verdicts(checks, "mesh", "reward", *skipped) == ["fail", "ok", *["skip"] * 4]
    assert "free at" in checks["disk"]["found"]


def test_without_devices_a_reward_model_is_read_and_not_tried(config: Path, judge: Path) -> None:
    _, checks, _ = examined("--config", config, *settings("mesh.platform=tpu", f"reward.model={judge}", *QUIET))
    assert checks["reward model"]["found"] == checks["mesh"]["found"] == "there are no devices"


def test_networks_that_do_not_fit_a_device_are_not_loaded(
    config: Path, judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_checks, "USABLE_MEMORY_FRACTION", 0.0)
    _, checks, _ = examined("--config", config, *settings(f"reward.model={judge}", *QUIET))
    assert verdicts(checks, "forward", "reward model") == ["skip", "skip"]
    assert all("do not fit in the" in checks[name]["found"] for name in ("forward", "reward model"))


def test_what_does_not_learn_is_held_too(config: Path, judge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "format_size", lambda size: f"{size} bytes")

    def held(*overrides: str) -> float:
        _, checks, _ = examined("--config", config, *settings(*overrides, *QUIET))
        told = re.fullmatch(r"weights and optimizer moments take (\d+) bytes on .*", checks["memory"]["found"])
        assert told is not None, checks["memory"]
        return float(told[1])

    whole, adapted = held(), held("model.lora.rank=1", "model.lora.targets=[q_proj]")
    # Weights and two moments as large as they; beside adapters the weights stay.
    assert whole / 3 < adapted < whole / 2
    assert held(f"reward.model={judge}") > whole
    assert held("algorithm.beta=0.1") == pytest.approx(4 / 3 * whole, rel=0.01)


def test_a_model_that_fills_a_device_by_itself_fails_beside_adapters_too(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "device_memory_bytes", lambda: 20_000)
    code, checks, _ = examined("--config", config, *settings("model.lora.rank=2", *QUIET))
    assert (code, checks["memory"]["verdict"]) == (1, "fail")


def test_answers_that_a_reward_cannot_tell_apart_are_found(config: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "2+2=?", "answer": answer}) + "\n" for answer in ("4", "4.0")))
    alike = settings(f"data.source={rows}", *QUIET, "mesh.shape='3,1,1'")
    _, checks, _ = examined("--config", config, *alike)
    assert checks["reward"]["found"].startswith("arithmetic: 1 for the reference answer, 1 for others; ")
    assert checks["reward"]["verdict"] == "warn"


def test_the_networks_of_ppo_are_read_and_a_wrong_one_is_named(config: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "short", max_position_embeddings=8)
    ppo = settings("algorithm.name=ppo", f"critic.path={other}", *QUIET)
    code, checks, _ = examined("--config", config, *ppo)
    assert code == 2
    assert "= 20 tokens, but the context of" in checks["critic"]["found"]
    assert verdicts(checks, "model", "critic", "mesh") == ["ok", "fail", "skip"]
