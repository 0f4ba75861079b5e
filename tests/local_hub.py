"""Serves a Hugging Face hub locally, with the parts of its HTTP interface that models and data sets need."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants


class LocalHub:
    """Serves folders as models, or as data sets under `datasets/<id>`; files of ids in `gated` cannot be read."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.gated: set[str] = set()
        self._folders: dict[tuple[str, str], Path] = {}
        self._commits: dict[tuple[str, str], str] = {}

    def commit(self, hub_id: str, folder: Path, *, branch: str = "main") -> str:
        """Moves a branch to a new commit with the folder's files, and returns the commit."""
        content = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
        commit = hashlib.sha1(content).hexdigest()
        self._folders[hub_id, commit] = folder
        self._commits[hub_id, branch] = self._commits[hub_id, commit] = commit
        return commit

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body of the response to a request."""
        api = path.startswith("/api/")
        parts = path.partition("?")[0].removeprefix("/api/models").removeprefix("/api").split("/")[1:]
        size = 3 if parts[0] == "datasets" else 2
        kind, revision, *rest = parts[size:] or ("revision", "main")
        hub_id, file = "/".join(parts[:size]), "/".join(rest)
        if not any(known == hub_id for known, _ in self._commits):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        commit = self._commits.get((hub_id, revision))
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        folder = self._folders[hub_id, commit]
        if api and kind == "revision":
            files = [{"rfilename": path.name} for path in folder.iterdir()]
            return 200, {}, json.dumps({"id": hub_id, "sha": commit, "siblings": files}).encode()
        if api and kind == "tree":
            entries = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _etag(path)}
                for path in folder.iterdir()
            ]
            return 200, {}, json.dumps(entries).encode()
        if hub_id in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        return 200, {"ETag": f'"{_etag(folder / file)}"', "X-Repo-Commit": commit}, (folder / file).read_bytes()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serve() -> Iterator[LocalHub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - http.server looks for this name

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = LocalHub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str | None, cache: Path) -> None:
    """Configures the hub as HF_ENDPOINT, HF_HUB_OFFLINE (without a URL) and HF_HUB_CACHE would at start-up."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", url is None)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    if url is not None:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
