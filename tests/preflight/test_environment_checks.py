"""Tests the checks of the hub, wandb, versions and the disk; the hub is a local server. Nothing is downloaded."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.model.io.hub import fetch_from_hub
from app.model.io.model_files import HUB_FILES
from app.preflight.check_results import CheckRecorder, CheckResult
from app.preflight.environment_checks import (
    HubSource,
    check_disk,
    check_hub_source,
    check_versions,
    check_wandb,
    hub_sources,
)
from app.preflight.sample_file_size import SampleFileSize, estimate_sample_files
from app.records.versions import minimum_versions
from settings import Settings, load
from tests.local_hub import LocalHub, serve, use_hub
from tests.program import free_address, here, settings
from tests.tiny import make_prompt
from tests.tiny_directory import write_model

MODEL = HubSource("model.path", "model", "owner/model", None)
ROWS = HubSource("data.source", "dataset", "owner/rows", None)


def load_settings(*overrides: str) -> Settings:
    return load(None, overrides, {}).settings


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hub") / "first")


@pytest.fixture
def hub(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with serve() as hub:
        hub.commit(MODEL.hub_id, files)
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


def check_hub(source: HubSource = MODEL) -> CheckResult:
    recorder = CheckRecorder()
    check_hub_source(recorder, source, is_cached=source.is_cached_model)
    (result,) = recorder.results
    return result


def test_hub_checks_cover_exactly_the_models_and_data_that_a_run_uses(tmp_path: Path) -> None:
    assert hub_sources(load_settings(f"model.path={tmp_path}", f"data.source={tmp_path}/rows.jsonl")) == ()
    overrides = ("model.path=a/b@r1", "data.source=hf:c/d:main", "data.eval_source=hf:e/f")
    teacher = ("algorithm.beta=1", "reference.path=k/l", "reference.revision=r3")
    more = ("algorithm.name=ppo", "critic.path=g/h", "reward.model=i/j", *teacher)
    assert hub_sources(load_settings(*overrides, *more)) == (
        HubSource("model.path", "model", "a/b", "r1"),
        HubSource("reference.path", "model", "k/l", "r3"),
        HubSource("critic.path", "model", "g/h", None),
        HubSource("reward.model", "model", "i/j", None),
        HubSource("data.source", "dataset", "c/d", None),
        HubSource("data.eval_source", "dataset", "e/f", None),
    )
    mixture = "data.source=['hf:c/d:main@r2', {source: x.jsonl}, {source: 'hf:e/f', split: s}]"
    assert hub_sources(load_settings(mixture)) == (
        HubSource("data.source[0]", "dataset", "c/d", "r2"),
        HubSource("data.source[2]", "dataset", "e/f", None),
    )
    without = ("algorithm.name=grpo", "eval.every_steps=0", "critic.path=g/h", "reference.path=k/l")
    assert [one.setting for one in hub_sources(load_settings(*overrides, *without))] == ["model.path", "data.source"]


def test_an_uncached_model_is_reported_by_a_warning_and_not_downloaded(hub: LocalHub, tmp_path: Path) -> None:
    result = check_hub()
    assert result.verdict == "warn"
    assert "a run would download commit" in result.found and f"from {hub.url}, HF_TOKEN is not set" in result.found
    assert result.advice.endswith("hf download owner/model")
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("is_offline", [False, True], ids=["unreachable", "offline mode"])
def test_without_the_hub_only_cached_models_pass_the_hub_check(hub, tmp_path, monkeypatch, is_offline):
    fetch_from_hub(MODEL.hub_id, files=HUB_FILES)
    url = None if is_offline else f"http://{free_address()}"
    use_hub(monkeypatch, url, tmp_path / "cache")
    result = check_hub()
    assert (result.verdict, result.found) == ("ok", "owner/model is in this machine's cache")
    use_hub(monkeypatch, url, tmp_path / "empty")
    result = check_hub()
    assert (result.verdict, result.exit_code) == ("fail", 1)
    assert ("HF_HUB_OFFLINE is set" if is_offline else f"{url} cannot be reached") in result.found
    assert result.advice.startswith("unset HF_HUB_OFFLINE, or" if is_offline else "fix the network")


def test_a_gated_or_absent_model_fails_the_hub_check(hub: LocalHub) -> None:
    hub.gated.add(MODEL.hub_id)
    result = check_hub()
    assert (result.verdict, result.exit_code) == ("fail", 2)
    assert "it is gated, and this user has no access" in result.found
    assert "there is no such model, or it is private" in check_hub(MODEL._replace(hub_id="owner/nothing")).found
    assert "it has no revision 'gone'" in check_hub(MODEL._replace(revision="gone")).found


def test_a_gated_data_set_fails_the_hub_check_although_the_hub_lists_its_files(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    commit = hub.commit("datasets/owner/rows", tmp_path / "rows")
    result = check_hub(ROWS._replace(revision="main"))
    assert result.verdict == "warn" and f"would download commit {commit[:12]}" in result.found
    assert result.advice.endswith("hf download owner/rows --repo-type dataset")
    hub.gated.add("datasets/owner/rows")
    result = check_hub(ROWS)
    assert (result.verdict, result.exit_code) == ("fail", 2)
    assert "accept its license at https://huggingface.co/datasets/owner/rows" in result.found
    assert "there is no such dataset, or it is private" in check_hub(ROWS._replace(hub_id="owner/nothing")).found


def test_doctor_downloads_no_model_and_skips_only_the_checks_that_need_one(hub: LocalHub, tmp_path: Path) -> None:
    arguments = settings("model.path=owner/model", "eval.every_steps=0", f"run.dir={tmp_path / 'runs'}")
    result = here("doctor", "--json", *arguments)
    found = {one["check"]: one for one in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 0, result.stdout
    names = ("hub: model.path", "model", "data", "reward", "mesh", "forward", "disk")
    assert [found[name]["verdict"] for name in names] == ["warn", "skip", "ok", *["skip"] * 4]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def wandb_results(*overrides: str) -> list[CheckResult]:
    recorder = CheckRecorder()
    check_wandb(recorder, load_settings(*overrides))
    return recorder.results


def test_wandb_check_warns_about_a_missing_key_only_in_online_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    (with_key,) = wandb_results("logging.wandb_project=p")
    assert (with_key.verdict, with_key.found) == ("ok", "project p, WANDB_API_KEY is set")
    monkeypatch.delenv("WANDB_API_KEY")
    (offline,) = wandb_results("logging.wandb_project=p", "logging.wandb_mode=offline")
    assert offline.verdict == "ok" and "wandb sync" in offline.found
    (without_key,) = wandb_results("logging.wandb_project=p")
    assert without_key.verdict == "warn" and "WANDB_API_KEY is not set" in without_key.found
    assert wandb_results("logging.wandb_project=p", "logging.wandb_mode=disabled") == wandb_results() == []


def test_outdated_and_missing_packages_are_reported_by_a_warning() -> None:
    recorder = CheckRecorder()
    assert minimum_versions()["jax"] == "0.10.2"
    check_versions(recorder, {"jax": "999.1", "numpy": "1.0", "no-such-package": "1.0"})
    (result,) = recorder.results
    assert result.verdict == "warn"
    assert "but 999.1 or later is required; no-such-package not installed, but 1.0" in result.found
    assert "numpy 2" in result.found


@pytest.mark.parametrize(("checkpoint_bytes", "verdict", "code"), [(1, "ok", 0), (2**60, "fail", 1), (None, "skip", 0)])
def test_disk_check_needs_space_for_all_checkpoints_of_a_run(tmp_path, checkpoint_bytes, verdict, code):
    # Space is needed for the newest checkpoints, the best one if it is kept, and the one being written.
    for overrides, count in (((), 5), (("checkpoint.best_metric=null",), 4), (("eval.every_steps=0",), 4)):
        recorder, chosen = CheckRecorder(), load_settings("checkpoint.keep=3", *overrides)
        check_disk(recorder, tmp_path / "runs" / "not-yet", chosen, checkpoint_bytes, None)
        (result,) = recorder.results
        assert (result.verdict, result.exit_code) == (verdict, code)
        assert f"free at {tmp_path}" in result.found
        assert (f"a run needs space for {count} checkpoints of " in result.found) == (checkpoint_bytes is not None)
        check_disk(recorder, tmp_path, chosen, 1, None, gathers=True)
        assert f"a run needs space for {count + 1} checkpoints of " in recorder.results[1].found
        in_bucket = load_settings("checkpoint.keep=3", "run.dir=gs://bucket/runs", *overrides)
        check_disk(recorder, tmp_path, in_bucket, 1, None, gathers=True)
        assert f"a run needs space for {count + 2} checkpoints of " in recorder.results[2].found


def test_disk_check_passes_if_checkpoints_and_samples_just_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=500))
    for size, samples, verdict in ((100, 0, "ok"), (101, 0, "fail"), (90, 50, "ok"), (90, 51, "warn")):
        recorder = CheckRecorder()
        check_disk(recorder, tmp_path, load_settings("checkpoint.keep=3"), size, SampleFileSize(5, 0, samples))
        assert recorder.results[0].verdict == verdict


def test_estimated_sample_files_store_columns_once_per_prompt() -> None:
    prompts = [replace(make_prompt(name, [1, 2]), extra={"tests": "x" * 100_000}) for name in "ab"]
    overrides = ("rollout.prompts_per_step=2", "rollout.max_new_tokens=4", "run.steps=10", "eval.every_steps=5")
    few, many = (
        estimate_sample_files(
            load_settings(f"rollout.group_size={size}", *overrides), prompts, prompts[:1], num_hosts=1
        )
        for size in (2, 16)
    )
    assert 200_000 < few.step < many.step < 250_000
    assert 100_000 < many.evaluation < 101_000
    assert many.total == 10 * many.step + 3 * many.evaluation
    unsaved = load_settings("logging.save_rollouts=false", *overrides)
    assert estimate_sample_files(unsaved, prompts, (), num_hosts=1).step == 0
