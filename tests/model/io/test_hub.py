"""Tests of hub models, which a server on this machine provides: fetched by commit, or refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from app.model.io.model_files import open_model
from settings.errors import InputError
from tests.local_hub import LocalHub, serve, use_hub

ID = "owner/model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    with serve() as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


def write_files(folder: Path, *, version: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"version": version}))
    save_file({"model.norm.weight": np.full(3, version, np.float32)}, folder / "model.safetensors")
    (folder / "modeling.py").write_text("raise SystemExit('remote code ran')")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    return folder


def refusal(path: str = ID) -> str:
    with pytest.raises(InputError) as caught:
        open_model(path)
    message = str(caught.value)
    assert message.startswith(f"model.path: {path.partition('@')[0]!r} is not a local path")
    assert message.endswith("or set it to a local directory")
    assert "\n" not in message
    return message


def test_the_newest_commit_is_fetched_and_named_without_code_and_pickles(hub, tmp_path):
    commit = hub.commit(ID, write_files(tmp_path / "first"))
    files = open_model(ID)
    assert (files.name, files.commit, files.config) == (ID, commit, {"version": 1})
    assert {path.name for path in files.path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_commit_is_what_it_was_when_its_branch_has_moved(hub, tmp_path):
    old = hub.commit(ID, write_files(tmp_path / "first"))
    open_model(ID)
    new = hub.commit(ID, write_files(tmp_path / "second", version=2))
    assert open_model(ID).commit == new
    pinned = open_model(f"{ID}@{old}")
    assert (pinned.commit, pinned.config) == (old, {"version": 1})


def test_a_cached_model_opens_without_a_network(hub, tmp_path, monkeypatch):
    commit = hub.commit(ID, write_files(tmp_path / "first"))
    fetched = open_model(f"{ID}@main")
    use_hub(monkeypatch, None, tmp_path / "cache")
    for path in (ID, f"{ID}@main", f"{ID}@{commit}"):
        assert open_model(path).fingerprint == fetched.fingerprint


def test_an_absent_model_is_refused(hub):
    assert "the newest revision cannot be downloaded" in refusal()
    assert "there is no such model, or it is private; check the id, or log in with HF_TOKEN" in refusal()


def test_an_absent_revision_is_named(hub, tmp_path):
    hub.commit(ID, write_files(tmp_path / "first"))
    message = refusal(f"{ID}@v9")
    assert "revision 'v9' cannot be downloaded" in message
    assert "it has no such revision; what follows the @" in message


def test_a_gated_model_says_how_to_get_in(hub, tmp_path):
    hub.commit(ID, write_files(tmp_path / "first"))
    hub.gated.add(ID)
    message = refusal(f"{ID}@main")
    assert "revision 'main' cannot be downloaded" in message
    assert "it is gated" in message
    assert f"accept its license at https://huggingface.co/{ID} and log in with HF_TOKEN" in message


def test_offline_says_so(tmp_path, monkeypatch):
    use_hub(monkeypatch, None, tmp_path / "cache")
    assert "HF_HUB_OFFLINE is set, but this machine's cache lacks some of its files; unset it" in refusal()


def test_a_half_fetched_model_is_not_used_offline(hub, tmp_path, monkeypatch):
    hub.commit(ID, write_files(tmp_path / "first"))
    (open_model(ID).path / "model.safetensors").unlink()
    use_hub(monkeypatch, None, tmp_path / "cache")
    assert "this machine's cache lacks some of its files" in refusal()


def test_a_hub_out_of_reach_is_one_plain_error(tmp_path, monkeypatch):
    with serve() as hub:
        gone = hub.url
    use_hub(monkeypatch, gone, tmp_path / "cache")
    message = refusal()
    assert "this machine's cache lacks some of its files. Try again with a network" in message
    assert "an accepted license and HF_TOKEN" in message
