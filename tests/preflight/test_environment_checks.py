"""Tests of checks of the hub, wandb and the disk, with servers on this machine; nothing is downloaded."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from app.model.io.hub import fetch_from_hub
from app.model.io.model_files import HUB_FILES
from app.preflight import environment_checks
from app.preflight.check_results import CheckRecorder, CheckResult
from app.preflight.environment_checks import (
    HubSource,
    cached_model_commits,
    check_disk,
    check_hub_source,
    check_versions,
    check_wandb,
    fetch_wandb_user,
    hub_sources,
    request_hub_commits,
    start_request,
    unused_accelerator,
)
from app.records.versions import minimum_versions
from settings import Settings, load
from tests.free_address import free_address
from tests.local_hub import LocalHub, serve, use_hub
from tests.program import here, settings
from tests.tiny_directory import write_model

MODEL = HubSource("model.path", "model", "owner/model", None)
ROWS = HubSource("data.source", "dataset", "owner/rows", None)


def settings_of(*overrides: str) -> Settings:
    return load(None, overrides, {}).settings


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hub") / "first")


@pytest.fixture(scope="module")
def later_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hub") / "second", seed=1)


@pytest.fixture
def hub(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with serve() as hub:
        hub.commit(MODEL.hub_id, files)
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


def told(source: HubSource = MODEL) -> CheckResult:
    """Returns the result of a check with these files in the cache."""
    look = CheckRecorder()
    cached = cached_model_commits([source]).get(source.setting)
    check_hub_source(look, source, request_hub_commits([source])[source.setting], cached=cached)
    (finding,) = look.results
    return finding


def test_only_what_a_run_would_ask_the_hub_for_is_looked_up(tmp_path: Path) -> None:
    assert hub_sources(settings_of()) == ()
    assert hub_sources(settings_of(f"model.path={tmp_path}", f"data.source={tmp_path}/rows.jsonl")) == ()
    chosen = ("model.path=a/b", "model.revision=r1", "data.source=hf:c/d:main", "data.eval_source=hf:e/f")
    more = ("algorithm.name=ppo", "critic.path=g/h", "reward.model=i/j")
    assert hub_sources(settings_of(*chosen, *more)) == (
        HubSource("model.path", "model", "a/b", "r1"),
        HubSource("critic.path", "model", "g/h", None),
        HubSource("reward.model", "model", "i/j", None),
        HubSource("data.source", "dataset", "c/d", None),
        HubSource("data.eval_source", "dataset", "e/f", None),
    )
    without = ("algorithm.name=grpo", "eval.every_steps=0", "critic.path=g/h")
    assert [one.setting for one in hub_sources(settings_of(*chosen, *without))] == ["model.path", "data.source"]


def test_what_is_not_in_the_cache_would_be_fetched_and_is_not(hub: LocalHub, tmp_path: Path) -> None:
    finding = told()
    assert finding.verdict == "warn"
    assert f"would be fetched from {hub.url}, HF_TOKEN not set" in finding.found
    assert finding.advice.endswith("hf download owner/model")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_cache_that_the_hub_has_left_behind_is_told(hub: LocalHub, later_files: Path) -> None:
    first = fetch_from_hub(MODEL.hub_id, None, files=HUB_FILES).name
    finding = told()
    assert (finding.verdict, finding.advice) == ("ok", "")
    assert f"in this machine's cache, commit {first[:12]}" in finding.found
    second = hub.commit(MODEL.hub_id, later_files)
    finding = told()
    assert finding.verdict == "warn"
    assert f"a run would fetch commit {second[:12]}" in finding.found and f"pin {first}" in finding.advice


def test_a_hub_out_of_reach_fails_only_what_is_not_in_the_cache(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_from_hub(MODEL.hub_id, None, files=HUB_FILES)
    nobody = f"http://{free_address()}"
    use_hub(monkeypatch, nobody, tmp_path / "cache")
    finding = told()
    assert finding.verdict == "warn" and f"{nobody} cannot be reached" in finding.found
    use_hub(monkeypatch, nobody, tmp_path / "empty")
    finding = told()
    assert (finding.verdict, finding.exit_code) == ("fail", 1)
    assert "fix the network" in finding.advice


def test_where_the_hub_is_not_to_be_asked_the_cache_decides(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_from_hub(MODEL.hub_id, None, files=HUB_FILES)
    use_hub(monkeypatch, None, tmp_path / "cache")
    finding = told()
    assert finding.verdict == "ok" and finding.found.endswith("HF_HUB_OFFLINE is set, nothing is requested")
    use_hub(monkeypatch, None, tmp_path / "empty")
    finding = told()
    assert (finding.verdict, finding.exit_code) == ("fail", 1)
    assert finding.advice.startswith("unset HF_HUB_OFFLINE")


def test_a_model_that_is_gated_or_absent_cannot_be_used(hub: LocalHub) -> None:
    hub.gated.add(MODEL.hub_id)
    finding = told()
    assert (finding.verdict, finding.exit_code) == ("fail", 2)
    assert "it is gated, and this user has no access" in finding.found
    assert "there is no such model, or it is private" in told(MODEL._replace(hub_id="owner/nothing")).found
    assert "it has no revision 'gone'" in told(MODEL._replace(revision="gone")).found


def test_a_data_set_that_is_gated_cannot_be_used_though_the_hub_tells_of_it(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    commit = hub.commit("datasets/owner/rows", tmp_path / "rows")
    for open_one in (ROWS, ROWS._replace(revision="main")):
        finding = told(open_one)
        assert finding.verdict == "warn" and f"commit {commit[:12]} would be fetched" in finding.found
    hub.gated.add("datasets/owner/rows")
    finding = told(ROWS)
    assert (finding.verdict, finding.exit_code) == ("fail", 2)
    assert "this user has no access; accept its licence at https://huggingface.co/datasets/owner/rows" in finding.found
    assert "there is no such dataset, or it is private" in told(ROWS._replace(hub_id="owner/nothing")).found
    assert "it has no revision 'gone'" in told(ROWS._replace(revision="gone")).found


def test_the_doctor_looks_at_the_rest_and_fetches_nothing(hub: LocalHub, tmp_path: Path) -> None:
    arguments = settings("model.path=owner/model", "eval.every_steps=0", f"run.dir={tmp_path / 'runs'}")
    result = here("doctor", "--json", *arguments)
    found = {one["check"]: one for one in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 0, result.stdout
    wanted = ("hub: model.path", "model", "data", "reward", "mesh", "forward", "disk")
    assert [found[name]["verdict"] for name in wanted] == ["warn", "skip", "ok", *["skip"] * 4]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_question_that_is_not_answered_is_given_up(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_checks, "TOTAL_TIMEOUT_S", 0.01)
    answered, recorder = threading.Event(), CheckRecorder()
    check_hub_source(recorder, MODEL, start_request(lambda: str(answered.wait(30))), cached=None)
    answered.set()
    assert "cannot be reached: no answer in 0 s" in recorder.results[0].found

    def refuse() -> str:
        raise PermissionError("no")

    with pytest.raises(PermissionError, match="no"):
        start_request(refuse).result()


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A wandb server that answers the one request of the check, for one key."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            known = self.headers["Authorization"] == "Basic YXBpOmtub3du"
            body = json.dumps({"data": {"viewer": {"username": "somebody"} if known else None}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def wandb_found(key: str | None, *overrides: str) -> list[CheckResult]:
    look, chosen = CheckRecorder(), settings_of("logging.wandb_project=p", *overrides)
    check_wandb(look, chosen, None if key is None else start_request(lambda: fetch_wandb_user(key)))
    return look.results


def test_wandb_is_asked_whose_key_it_is(wandb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (known,) = wandb_found("known")
    assert (known.verdict, known.found) == ("ok", f"project p, as somebody at {wandb}")
    (unknown,) = wandb_found("unknown")
    assert unknown.verdict == "warn" and "does not know the key" in unknown.found
    monkeypatch.setenv("WANDB_BASE_URL", f"http://{free_address()}")
    (away,) = wandb_found("known")
    assert (away.verdict, away.exit_code) == ("warn", 0) and "cannot be reached" in away.found


def test_wandb_is_not_asked_where_it_is_not_used() -> None:
    (offline,) = wandb_found(None, "logging.wandb_mode=offline")
    assert offline.verdict == "ok" and "wandb sync" in offline.found
    (without_key,) = wandb_found(None)
    assert without_key.verdict == "warn" and "WANDB_API_KEY is not set" in without_key.found
    assert wandb_found(None, "logging.wandb_mode=disabled") == []
    look = CheckRecorder()
    check_wandb(look, Settings(), None)
    assert look.results == []


def test_an_older_package_is_told() -> None:
    look = CheckRecorder()
    bounds = minimum_versions()
    assert bounds["jax"] == "0.10.2"
    check_versions(look, {"jax": "999.1", "numpy": "1.0", "no-such-package": "1.0"})
    (finding,) = look.results
    assert finding.verdict == "warn"
    assert "older than 999.1, no-such-package not installed" in finding.found and "numpy 2" in finding.found


def test_an_accelerator_that_jax_does_not_use_is_told(tmp_path: Path) -> None:
    assert unused_accelerator("cpu", tmp_path) is None
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "0").touch()
    assert unused_accelerator("cpu", tmp_path) == "tpu"
    (tmp_path / "nvidia0").touch()
    assert unused_accelerator("cpu", tmp_path) == "cuda"
    assert unused_accelerator("gpu", tmp_path) is None


@pytest.mark.parametrize(("checkpoint_bytes", "verdict", "code"), [(1, "ok", 0), (2**60, "fail", 1), (None, "skip", 0)])
def test_a_disk_must_hold_the_checkpoints(
    tmp_path: Path, checkpoint_bytes: int | None, verdict: str, code: int
) -> None:
    recorder = CheckRecorder()
    check_disk(recorder, tmp_path / "runs" / "not-yet", Settings(), checkpoint_bytes)
    (result,) = recorder.results
    assert (result.verdict, result.exit_code) == (verdict, code)
    assert f"free at {tmp_path}" in result.found


def test_a_disk_holds_the_newest_checkpoints_the_best_and_one_being_written(tmp_path: Path) -> None:
    for overrides, count in (((), 2 + Settings().checkpoint.keep), (("checkpoint.best_metric=null",), 4)):
        recorder = CheckRecorder()
        check_disk(recorder, tmp_path, settings_of("checkpoint.keep=3", *overrides) if overrides else Settings(), 1)
        assert f"a run keeps {count} checkpoints of " in recorder.results[0].found
