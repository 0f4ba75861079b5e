"""Checks of a run's environment: package versions, the hub, wandb and the disk. They write nothing."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx2
from huggingface_hub import constants, get_token

from app.model.io.hub import cached_commit, is_hub_id, latest_commit
from app.model.io.model_files import CONFIG_FILE, HUB_FILES, is_from_hub
from app.preflight.check_results import EXIT_INPUT, CheckRecorder
from app.preflight.tables import format_size
from app.records.versions import (
    NOT_INSTALLED,
    QUANTIZATION_PACKAGE,
    TRAINING_PACKAGES,
    parse_release,
    program_versions,
    version_of,
)
from settings import Settings
from settings.errors import InputError

REQUEST_TIMEOUT_S = 5.0
"""Timeout of one HTTP request."""
TOTAL_TIMEOUT_S = 10.0
"""Longest wait for an answer, name resolution included."""
HUB_DATA_PREFIX = "hf:"
CACHED_ANY_COMMIT = "cached"
"""In place of the commit of a cached data set, which is not known."""
WANDB_URL = "https://api.wandb.ai"
WANDB_KEY = "WANDB_API_KEY"
VIEWER_QUERY = {"query": "query Viewer { viewer { username } }"}


class HubSource(NamedTuple):
    """A model or data set that a setting takes from the hub."""

    setting: str
    kind: Literal["model", "dataset"]
    hub_id: str
    revision: str | None


def hub_sources(settings: Settings) -> tuple[HubSource, ...]:
    """Returns everything that the settings take from the hub; empty if all is local."""
    model, critic, reward, data = settings.model, settings.critic, settings.reward, settings.data
    models = [("model.path", model.path, model.revision)]
    if settings.has_critic:
        models.append(("critic.path", critic.path or "", critic.revision))
    models.append(("reward.model", reward.model or "", reward.model_revision))
    data_sources = [("data.source", data.source, data.revision)]
    if settings.eval.every_steps:
        data_sources.append(("data.eval_source", data.eval_source or "", None))
    return (
        *(
            HubSource(s, "model", path, revision)
            for s, path, revision in models
            if path and is_from_hub(path) and is_hub_id(path)
        ),
        *(
            HubSource(setting, "dataset", source.removeprefix(HUB_DATA_PREFIX).partition(":")[0], revision)
            for setting, source, revision in data_sources
            if source.startswith(HUB_DATA_PREFIX)
        ),
    )


def start_request(send: Callable[[], str]) -> Future[str]:
    """Sends a request in a daemon thread, which does not keep the program from ending."""
    future: Future[str] = Future()

    def run() -> None:
        # Every exception, because `Future.result` raises it again.
        try:
            future.set_result(send())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def request_hub_commits(sources: Sequence[HubSource]) -> dict[str, Future[str]]:
    """Asks the hub for the newest commit of each source; setting -> the answer."""

    def sending(source: HubSource) -> Callable[[], str]:
        return lambda: latest_commit(
            source.hub_id, source.revision, kind=source.kind, file=CONFIG_FILE, timeout_s=REQUEST_TIMEOUT_S
        )

    return {source.setting: start_request(sending(source)) for source in sources}


def cached_model_commits(sources: Sequence[HubSource]) -> dict[str, str]:
    """Returns setting -> commit of each model that is complete in this machine's cache."""
    commits = {s.setting: cached_commit(s.hub_id, s.revision, files=HUB_FILES) for s in sources if s.kind == "model"}
    return {setting: commit for setting, commit in commits.items() if commit is not None}


@contextmanager
def hub_offline(sources: Sequence[HubSource]) -> Iterator[None]:
    """Makes the block read from this machine's cache only, as if HF_HUB_OFFLINE were set.

    No request to the hub may be in progress.
    """
    modules: list[Any] = [constants]
    if any(source.kind == "dataset" for source in sources):
        from datasets import config

        modules.append(config)
    before = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def check_hub_source(recorder: CheckRecorder, source: HubSource, request: Future[str], *, cached: str | None) -> None:
    """Checks that a run can get a model or data set from the hub or from the cache.

    Args:
        cached: its commit in this machine's cache, or `CACHED_ANY_COMMIT`; None if it is not there.
    """
    check, endpoint = f"hub: {source.setting}", constants.ENDPOINT
    origin = f"{endpoint}, HF_TOKEN {'known' if get_token() else 'not set'}"
    fetch = f"hf download {source.hub_id}{' --repo-type dataset' if source.kind == 'dataset' else ''}"
    state = f"{source.hub_id} is in this machine's cache"
    if cached is None:
        state = f"{source.hub_id} is not in this machine's cache"
    elif cached != CACHED_ANY_COMMIT:
        state += f", commit {cached[:12]}"
    try:
        newest = request.result(TOTAL_TIMEOUT_S)
    except InputError as error:
        if cached is None:
            recorder.fail(check, f"{source.hub_id}: {error}", exit_code=EXIT_INPUT)
        else:
            recorder.warn(check, f"{state}; the hub answers: {error}", "a run uses the cache; fix the access anyway")
        return
    except (ConnectionError, TimeoutError) as error:
        reason = str(error) or f"no answer in {TOTAL_TIMEOUT_S:.0f} s"
        if constants.is_offline_mode() and cached is None:
            recorder.fail(check, f"{state}, and HF_HUB_OFFLINE is set", f"unset HF_HUB_OFFLINE, or run: {fetch}")
        elif constants.is_offline_mode():
            recorder.ok(check, f"{state}; HF_HUB_OFFLINE is set, nothing is requested")
        elif cached is None:
            advice = "fix the network (proxy, HF_ENDPOINT), or use a local path"
            recorder.fail(check, f"{state}, and {endpoint} cannot be reached: {reason}", advice)
        else:
            advice = "a run uses the cache; HF_HUB_OFFLINE=1 avoids the wait"
            recorder.warn(check, f"{state}; {endpoint} cannot be reached: {reason}", advice)
        return
    if cached is None:
        found = f"{state}; commit {newest[:12]} would be fetched from {origin}"
        recorder.warn(check, found, f"fetch it before a long run, and check again: {fetch}")
    elif cached not in (CACHED_ANY_COMMIT, newest):
        found = f"{state}; a run would fetch commit {newest[:12]} from {origin}"
        recorder.warn(check, found, f"fetch it first ({fetch}), or pin {cached} as the revision of {source.setting}")
    else:
        recorder.ok(check, f"{state}; {origin}")


def uses_wandb_online(settings: Settings) -> bool:
    """Returns whether a run would upload to wandb."""
    return settings.logging.wandb_project is not None and settings.logging.wandb_mode == "online"


def fetch_wandb_user(key: str) -> str:
    """Returns the user of a wandb key, and the server.

    Raises:
        PermissionError: the server does not know the key.
        ConnectionError: the server does not answer.
    """
    url = os.environ.get("WANDB_BASE_URL") or WANDB_URL
    try:
        answer = httpx2.post(
            f"{url.rstrip('/')}/graphql", json=VIEWER_QUERY, auth=("api", key), timeout=REQUEST_TIMEOUT_S
        )
        viewer = answer.json()["data"]["viewer"] if answer.status_code == httpx2.codes.OK else None
    except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConnectionError(f"{url}: {' '.join(str(error).split()) or type(error).__name__}") from error
    if answer.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR:
        raise ConnectionError(f"{url} answers {answer.status_code}")
    if not viewer:
        raise PermissionError(f"{url} does not know the key")
    return f"{viewer['username']} at {url}"


def check_wandb(recorder: CheckRecorder, settings: Settings, request: Future[str] | None) -> None:
    """Checks the wandb key, if wandb is used. A wandb that does not start costs its charts, never the run."""
    project, mode = f"project {settings.logging.wandb_project}", settings.logging.wandb_mode
    if settings.logging.wandb_project is None or mode == "disabled":
        return
    if mode == "offline":
        recorder.ok("wandb", f"{project}, offline: `wandb sync` uploads it later")
    elif request is None:
        advice = f"set {WANDB_KEY} in the environment or a .env, or logging.wandb_mode: offline"
        recorder.warn("wandb", f"{project}: {WANDB_KEY} is not set, so only files would be written", advice)
    else:
        try:
            recorder.ok("wandb", f"{project}, as {request.result(TOTAL_TIMEOUT_S)}")
        except PermissionError as error:
            recorder.warn("wandb", f"{project}: {error}; there would be no charts", f"set another {WANDB_KEY}")
        except (ConnectionError, TimeoutError) as error:
            advice = "fix the network, or set logging.wandb_mode: offline and `wandb sync` later"
            recorder.warn("wandb", f"{project}: cannot be reached: {error}", advice)


def check_versions(recorder: CheckRecorder, lower_bounds: Mapping[str, str]) -> None:
    """Checks the packages that decide a run's results against the oldest tested versions."""
    shown = {name: version_of(name) for name in (*TRAINING_PACKAGES, QUANTIZATION_PACKAGE)}
    versions = ", ".join(f"{name} {version}" for name, version in shown.items() if version != NOT_INSTALLED)
    found = f"Python {program_versions(())['version of Python']}, {versions}"
    older = []
    for name, oldest in lower_bounds.items():
        version = version_of(name)
        if version == NOT_INSTALLED:
            older.append(f"{name} not installed")
        elif parse_release(version) < parse_release(oldest):
            older.append(f"{name} {version}, older than {oldest}")
    if older:
        recorder.warn(
            "versions", f"{found}; {', '.join(older)}", "install what pyproject.toml asks for: pip install -e ."
        )
    else:
        recorder.ok("versions", found)


def unused_accelerator(platform: str, devices: Path = Path("/dev")) -> str | None:
    """Returns the extra to install if JAX runs on the CPU of a machine with an accelerator; else None."""
    device_files = {"cuda": ("nvidia0",), "tpu": ("accel0", "vfio/0")} if platform == "cpu" else {}
    present = (extra for extra, names in device_files.items() if any((devices / name).exists() for name in names))
    return next(present, None)


def check_disk(recorder: CheckRecorder, folder: Path, settings: Settings, checkpoint_bytes: int | None) -> None:
    """Checks that the run directory's disk has space for the checkpoints.

    Args:
        checkpoint_bytes: size of one; None if it is not known.
    """
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    found = f"{format_size(free)} free at {parent}"
    if checkpoint_bytes is None:
        recorder.skip("disk", reason=f"{found}; the size of a checkpoint is not known without the model")
        return
    # The newest ones, the best one, and one that is being written.
    keeps_best = bool(settings.eval.every_steps and settings.checkpoint.best_metric)
    count = settings.checkpoint.keep + keeps_best + 1
    found += f"; a run keeps {count} checkpoints of {format_size(checkpoint_bytes)}"
    if count * checkpoint_bytes > free:
        recorder.fail("disk", found, "free some, lower checkpoint.keep, or choose another run.dir")
    else:
        recorder.ok("disk", found)
