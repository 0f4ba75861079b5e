"""`grpo doctor` runs every check of a launch, reports all failures, and leaves no files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from app.preflight import doctor, model_checks
from app.records.text_format import format_bytes
from tests.program import CANARY, UNJUDGED, digest_of, here, settings
from tests.reward.processes import children
from tests.run_fixtures import NO_REPORT, TINY, write_config
from tests.tiny_directory import CONFIG, random_tensors, write_model, write_reward_model, write_tokenizer
from tests.two_hosts import HOSTS_PROGRAM, blind_host, run_on_two_hosts

Checks = Mapping[str, Mapping[str, Any]]
NO_EVALUATION = ("eval.every_steps=0",)


def run_doctor(*arguments: str | Path) -> tuple[int, Checks, str]:
    result = here("doctor", "--json", *arguments)
    report = json.loads(result.stdout)
    assert report["exit_code"] == result.exit_code, result.stderr
    return result.exit_code, {one["check"]: one for one in report["checks"]}, result.stderr


def verdicts(checks: Checks, *names: str) -> list[str]:
    return [checks[name]["verdict"] for name in names]


def test_the_quickstart_passes_every_doctor_check_and_leaves_no_files(tmp_path: Path) -> None:
    code, checks, stderr = run_doctor(*settings(f"run.dir={tmp_path / 'runs'}", "data.num_problems=1000"))
    assert (code, stderr) == (0, "")
    assert list(checks) == [
        *("devices", "settings", "versions", "run directory", "model", "data", "held-out data", "template", "reward"),
        *("mesh", "memory", "attention", "forward", "answer", "disk"),
    ]
    assert {one["verdict"] for one in checks.values()} == {"ok"}
    assert list(tmp_path.iterdir()) == [] and children() == []
    found = {name: one["found"] for name, one in checks.items()}
    assert found["devices"].startswith("8 x cpu (cpu), ")
    assert "109,504 parameters" in found["model"]
    assert found["template"].startswith("arithmetic/") and found["template"].endswith("=?<|assistant|>'")
    assert found["reward"] == "arithmetic: 1 for the reference answer, 0 for others"
    assert "logits are finite; most likely tokens after the prompt: '" in found["forward"]
    assert found["answer"].startswith("the most likely answer ends after ") and found["answer"].endswith("<|end|>'")
    assert found["mesh"].startswith("dp 1, fsdp 8, tp 1")
    assert "space for 4 checkpoints of 1.3 MiB" in found["disk"]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Checks, str]:
    """Checks weights with a NaN, a plug-in whose error quotes a key, a used folder, and settings that do not divide."""
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
        overrides = (f"reward.functions=['{folder}/plug.py:judge']", "algorithm.mini_batch_prompts=3")
        result = run_doctor("--config", config, *settings(*overrides))
    assert digest_of(folder) == before
    return result


def test_doctor_reports_all_failures(broken: tuple[int, Checks, str]) -> None:
    code, checks, stderr = broken
    assert code == 2, "an input error decides the exit code"
    assert [name for name, one in checks.items() if one["verdict"] == "fail"] == ["settings", "reward", "forward"]
    assert stderr.splitlines()[-1] == "error: settings, reward, forward: a run with these settings would fail"
    assert verdicts(checks, "run directory", "model", "data", "disk") == ["warn", "ok", "ok", "ok"]
    assert "does not divide rollout.prompts_per_step" in checks["settings"]["found"]
    assert checks["run directory"]["advice"] == "continue it with --resume auto, or choose another run.name"
    assert checks["forward"]["found"] == "logits are not finite"
    assert "model.dtype: float32" in checks["forward"]["advice"]
    assert checks["answer"]["verdict"] == "skip"


def test_doctor_reports_a_plug_in_error_in_one_line_without_secrets(broken: tuple[int, Checks, str]) -> None:
    _, checks, stderr = broken
    assert checks["reward"]["exit_code"] == 1
    error, plugin = checks["reward"]["found"].splitlines()
    assert "reward.functions: judge: raised: ValueError: no luck with <HF_TOKEN>" in error
    assert plugin.startswith("reward judge: ") and CANARY not in json.dumps(checks) + stderr


def test_doctor_finds_an_end_of_turn_that_is_not_an_eos_token(config: Path, tmp_path: Path) -> None:
    """The model predicts <|user|> after every token."""
    model, tensors = write_model(tmp_path / "model"), random_tensors(CONFIG)
    tensors["model.embed_tokens.weight"][:, 0] = 100
    tensors["lm_head.weight"][:] = 0
    tensors["lm_head.weight"][2, 0] = 1
    save_file(tensors, model / "model.safetensors")
    turn = "{% for m in messages %}{{ m.content | replace(' ', '') }}<|user|>{% endfor %}"
    write_tokenizer(model, chat_template=turn + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    _, checks, stderr = run_doctor("--config", config, *settings(f"model.path={model}", "model.lora.rank=2"))
    assert verdicts(checks, "template", "answer") == ["warn", "warn"]
    assert "ends a turn with '<|user|>', but only <|end|> ends a completion" in checks["template"]["found"]
    assert checks["template"]["advice"] == "set model.eos_tokens: ['<|user|>']"
    assert checks["answer"]["found"].endswith("control token '<|user|>', which is not an EOS token: '<|user|>'")
    assert checks["answer"]["advice"] == "if <|user|> ends a turn, set model.eos_tokens: ['<|user|>']"
    assert f"{model}: {checks['template']['found'].partition('; ')[0]}; set model.eos_tokens" in stderr


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("judge") / "model")


def test_doctor_runs_the_other_checks_without_a_model_and_devices(config: Path, judge: Path) -> None:
    missing = settings(f"model.path={config.parent / 'nowhere'}", "mesh.platform=tpu", f"reward.model={judge}")
    code, checks, _ = run_doctor("--config", config, *missing)
    assert code == 2
    assert {name: one["verdict"] for name, one in checks.items()} == {
        **{"devices": "fail", "settings": "ok", "versions": "ok", "run directory": "ok", "model": "fail"},
        **{"data": "ok", "held-out data": "ok", "template": "skip", "reward": "skip", "mesh": "skip"},
        **{"memory": "skip", "attention": "skip", "forward": "skip", "answer": "skip", "reward model": "skip"},
        "disk": "skip",
    }
    assert "mesh.platform: tpu is not available" in checks["devices"]["found"]
    assert "nowhere' is neither an existing directory or file nor a hub id" in checks["model"]["found"]
    assert checks["held-out data"]["found"].endswith("prompts cannot be encoded without a tokenizer")
    assert checks["reward model"]["found"] == checks["mesh"]["found"] == "there are no devices"


def test_a_mesh_that_does_not_fit_skips_only_the_checks_that_need_a_mesh(config: Path, judge: Path) -> None:
    overrides = settings("mesh.shape='3,1,1'", f"reward.model={judge}", *NO_EVALUATION)
    code, checks, _ = run_doctor("--config", config, *overrides)
    assert code == 2
    assert "mesh.shape: '3,1,1' needs 3 devices, but there are 8" in checks["mesh"]["found"]
    skipped = ("memory", "attention", "forward", "reward model", "disk")
    assert verdicts(checks, "mesh", "reward", *skipped) == ["fail", "ok", *["skip"] * 5]
    assert "free at" in checks["disk"]["found"]


def test_doctor_memory_equals_a_dry_run_and_too_large_models_are_not_loaded(config, judge, monkeypatch):
    overrides = settings(f"reward.model={judge}", "model.lora.rank=2", *NO_EVALUATION)
    report = json.loads(here("train", "--config", config, "--dry-run", "--json", *overrides).stdout)
    peak = max(report["memory"], key=lambda phase: sum(report["memory"][phase].values()))
    monkeypatch.setattr(model_checks, "USABLE_MEMORY_FRACTION", 0.0)
    monkeypatch.setattr(doctor, "check_attention", lambda *_: None)
    for available, expected in ((report["peak_bytes"], (0, "ok")), (report["peak_bytes"] - 1, (1, "fail"))):
        monkeypatch.setattr(doctor, "device_memory_bytes", lambda available=available: available)
        code, checks, _ = run_doctor("--config", config, *overrides)
        found = f"{peak} needs the most memory, arrays of {format_bytes(report['peak_bytes'])} on each device"
        assert checks["memory"]["found"].startswith(found)
        assert (code, checks["memory"]["verdict"]) == expected
        assert verdicts(checks, *(unloaded := ("forward", "answer", "reward model"))) == ["skip"] * 3
        assert all("do not fit in a device's" in checks[name]["found"] for name in unloaded)


def test_an_unusable_critic_fails_its_doctor_check(config: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "short", max_position_embeddings=8)
    ppo = settings("algorithm.name=ppo", f"critic.path={other}", *NO_EVALUATION)
    code, checks, _ = run_doctor("--config", config, *ppo)
    assert code == 2
    assert "= 20 tokens, but the context of" in checks["critic"]["found"]
    assert verdicts(checks, "model", "critic", "mesh") == ["ok", "fail", "skip"]


@pytest.mark.two_hosts
def test_a_host_without_the_model_does_not_block_the_other_host(tiny_model: Path, tmp_path: Path) -> None:
    lengths = "data.max_prompt_length=16", "rollout.max_new_tokens=4"
    overrides = settings("eval.every_steps=0", *lengths, f"run.dir={tmp_path / 'runs'}")
    of_each = settings(f"model.path={tiny_model}"), settings(f"model.path={tmp_path}/nowhere")
    hosts = run_on_two_hosts("doctor", "--json", *overrides, of_each=of_each)
    assert [host.exit_code for host in hosts] == [2, 2], hosts
    assert "{" not in hosts[1].stdout
    assert "error: hosts, model (host 1), hosts (host 1): a run with these settings would fail" in hosts[1].stderr
    checks = json.loads(hosts[0].stdout[hosts[0].stdout.index("{") :])["checks"]
    failed = {(one["check"], one["host"]) for one in checks if one["verdict"] == "fail"}
    assert failed == {("model", 1), ("hosts", 0), ("hosts", 1)}
    (forward,) = [one for one in checks if one["check"] == "forward"]
    assert forward["verdict"] == "skip" and "or on another one" in forward["found"]


@pytest.mark.two_hosts
def test_the_disk_of_a_host_that_saves_nothing_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    option, blind = blind_host(tmp_path / "runs")
    full = "import shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=0)\n"
    overrides = settings(f"run.dir={tmp_path / 'runs'}", *UNJUDGED)
    hosts = run_on_two_hosts("doctor", "--json", *overrides, programs=(HOSTS_PROGRAM, (option, full + blind)))
    assert [host.exit_code for host in hosts] == [0, 0], hosts
    checks = {one["check"]: one for one in json.loads(hosts[0].stdout[hosts[0].stdout.index("{") :])["checks"]}
    assert "; process 0 keeps the run" in checks["hosts"]["found"]
    # Two kept checkpoints, the one being written, and its gathered arrays need space.
    assert "a run needs space for 4 checkpoints" in checks["disk"]["found"]
