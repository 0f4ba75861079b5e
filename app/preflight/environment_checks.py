"""What a run needs around it: versions, the hub, wandb, room on the disk. Asks each, and writes nothing."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx2
from huggingface_hub import constants, get_token

from app.model.io.hub import cached_commit, is_hub_id, latest_commit
from app.model.io.model_files import CONFIG_FILE, HUB_FILES, is_from_hub
from app.preflight.check_results import EXIT_ENVIRONMENT, EXIT_INPUT, CheckRecorder
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
"""Of a request."""
TOTAL_TIMEOUT_S = 10.0
"""With all requests, names that are looked up among them: they go on at once, beside everything else."""
HUB_DATA_PREFIX = "hf:"
CACHED_ANY_COMMIT = "cached"
"""What is said of a data set that the cache holds, whatever its commit."""
WANDB_URL = "https://api.wandb.ai"
WANDB_KEY = "WANDB_API_KEY"
VIEWER_QUERY = {"query": "query Viewer { viewer { username } }"}


class HubSource(NamedTuple):
    """What a setting wants of the hub."""

    setting: str
    kind: Literal["model", "dataset"]
    hub_id: str
    revision: str | None


def hub_sources(settings: Settings) -> tuple[HubSource, ...]:
    """All of them; none where everything is local. What is no hub id at all is told by whoever opens it."""
    model, critic, reward, data = settings.model, settings.critic, settings.reward, settings.data
    models = [("model.path", model.path, model.revision)]
    if settings.has_critic and critic.path is not None:
        models.append(("critic.path", critic.path, critic.revision))
    if reward.model is not None:
        models.append(("reward.model", reward.model, reward.model_revision))
    sources = [
        HubSource(s, "model", path, revision) for s, path, revision in models if is_from_hub(path) and is_hub_id(path)
    ]
    data_sources = [("data.source", data.source, data.revision)]
    if settings.eval.every_steps and data.eval_source is not None:
        data_sources.append(("data.eval_source", data.eval_source, None))
    return *sources, *(
        HubSource(setting, "dataset", source.removeprefix(HUB_DATA_PREFIX).partition(":")[0], revision)
        for setting, source, revision in data_sources
        if source.startswith(HUB_DATA_PREFIX)
    )


class BackgroundRequest:
    """A question that is asked in a thread of its own, which nobody waits for when the program ends."""

    def __init__(self, send: Callable[[], str]):
        self._send = send
        self._result: str | None = None
        self._error: Exception | None = None
        self._deadline = time.monotonic() + TOTAL_TIMEOUT_S
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Blanket, because it is raised where the reply is asked for.
        try:
            self._result = self._send()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Until there is a reply, or for `PATIENCE_S` since it was asked."""
        self._thread.join(max(self._deadline - time.monotonic(), 0))

    def result(self) -> str:
        """Raises: whatever asking has raised; ConnectionError where it has taken too long."""
        self.wait()
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise ConnectionError(f"no answer in {TOTAL_TIMEOUT_S:.0f} s")
        return self._result


def request_hub_commits(sources: Sequence[HubSource]) -> dict[str, BackgroundRequest]:
    """By setting, for the commit that a run would start from."""

    def asking(source: HubSource) -> Callable[[], str]:
        return lambda: latest_commit(
            source.hub_id, source.revision, kind=source.kind, file=CONFIG_FILE, timeout_s=REQUEST_TIMEOUT_S
        )

    return {source.setting: BackgroundRequest(asking(source)) for source in sources}


def cached_model_commits(sources: Sequence[HubSource]) -> dict[str, str]:
    """Setting -> the commit that this machine's cache holds whole; nothing of others."""
    found = {s.setting: cached_commit(s.hub_id, s.revision, files=HUB_FILES) for s in sources if s.kind == "model"}
    return {setting: commit for setting, commit in found.items() if commit is not None}


@contextmanager
def hub_offline(sources: Sequence[HubSource]) -> Iterator[None]:
    """What is opened inside comes from this machine's cache, as where HF_HUB_OFFLINE is set.

    Nobody may ask the hub meanwhile.
    """
    places: list[Any] = [constants]
    if any(source.kind == "dataset" for source in sources):
        from datasets import config

        places.append(config)
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def check_hub_source(
    recorder: CheckRecorder, source: HubSource, request: BackgroundRequest, *, cached: str | None
) -> None:
    """Whether a run would get what a setting wants of the hub.

    Args:
        cached: what this machine's cache holds of it, a commit or `CACHED`; None: nothing.
    """
    check, what = f"hub: {source.setting}", source.hub_id
    from_where = f"{constants.ENDPOINT}, HF_TOKEN {'known' if get_token() else 'not set'}"
    fetch = f"hf download {source.hub_id}{' --repo-type dataset' if source.kind == 'dataset' else ''}"
    held = (
        f"{what} is in this machine's cache{'' if cached in (None, CACHED_ANY_COMMIT) else f', commit {cached[:12]}'}"
    )
    try:
        newest = request.result()
    except InputError as error:
        if cached is None:
            recorder.fail(check, f"{what}: {error}", exit_code=EXIT_INPUT)
        else:
            recorder.warn(check, f"{held}; the hub says: {error}", "a run starts from the cache; mend it all the same")
    except ConnectionError as error:
        if constants.is_offline_mode():
            if cached is None:
                advice = f"unset HF_HUB_OFFLINE, or put it there with: {fetch}"
                found = f"{what} is not in this machine's cache, and HF_HUB_OFFLINE is set"
                recorder.fail(check, found, advice, exit_code=EXIT_ENVIRONMENT)
            else:
                recorder.ok(check, f"{held}; HF_HUB_OFFLINE is set, nothing is asked")
        elif cached is None:
            advice = "mend the network (proxy, HF_ENDPOINT), or name a local path"
            found = f"{what} is not in this machine's cache, and {constants.ENDPOINT} cannot be reached: {error}"
            recorder.fail(check, found, advice, exit_code=EXIT_ENVIRONMENT)
        else:
            found = f"{held}; {constants.ENDPOINT} cannot be reached: {error}"
            recorder.warn(check, found, "a run starts from the cache; HF_HUB_OFFLINE=1 saves it the waiting")
    else:
        if cached is None:
            found = f"{what} is not in this machine's cache; commit {newest[:12]} would be fetched from {from_where}"
            recorder.warn(check, found, f"fetch it before a long run, and look again: {fetch}")
        elif cached not in (CACHED_ANY_COMMIT, newest):
            found = f"{held}; a run would fetch commit {newest[:12]} from {from_where}"
            recorder.warn(check, found, f"fetch it before ({fetch}), or pin {cached} as {source.setting}'s revision")
        else:
            recorder.ok(check, f"{held}; {from_where}")


def uses_wandb_online(settings: Settings) -> bool:
    """Whether a run would upload anything."""
    return settings.logging.wandb_project is not None and settings.logging.wandb_mode == "online"


def fetch_wandb_user(key: str) -> str:
    """Whose key it is.

    Raises:
        PermissionError: nobody's.
        ConnectionError: wandb does not answer.
    """
    place = os.environ.get("WANDB_BASE_URL") or WANDB_URL
    try:
        answer = httpx2.post(
            f"{place.rstrip('/')}/graphql", json=VIEWER_QUERY, auth=("api", key), timeout=REQUEST_TIMEOUT_S
        )
        viewer = answer.json()["data"]["viewer"] if answer.status_code == httpx2.codes.OK else None
    except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConnectionError(f"{place}: {' '.join(str(error).split()) or type(error).__name__}") from error
    if answer.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR:
        raise ConnectionError(f"{place} answers {answer.status_code}")
    if not viewer:
        raise PermissionError(f"{place} does not know the key")
    return f"{viewer['username']} at {place}"


def check_wandb(recorder: CheckRecorder, settings: Settings, request: BackgroundRequest | None) -> None:
    """Nothing where wandb is not used. A wandb that does not start costs its charts, never the run."""
    project, mode = settings.logging.wandb_project, settings.logging.wandb_mode
    if project is None or mode == "disabled":
        return
    if mode == "offline":
        recorder.ok("wandb", f"project {project}, offline: `wandb sync` uploads it later")
        return
    if request is None:
        advice = f"set {WANDB_KEY} in the environment or a .env, or logging.wandb_mode: offline"
        recorder.warn("wandb", f"project {project}: {WANDB_KEY} is not set, so it would write files only", advice)
        return
    try:
        recorder.ok("wandb", f"project {project}, as {request.result()}")
    except PermissionError as error:
        recorder.warn("wandb", f"project {project}: {error}; there would be no charts", f"give another {WANDB_KEY}")
    except ConnectionError as error:
        advice = "mend the network, or set logging.wandb_mode: offline and `wandb sync` later"
        recorder.warn("wandb", f"project {project}: cannot be reached: {error}", advice)


def check_versions(recorder: CheckRecorder, lower_bounds: Mapping[str, str]) -> None:
    """Of what decides what a run becomes, against the oldest that the program was tested with."""
    told = (*TRAINING_PACKAGES, QUANTIZATION_PACKAGE)
    versions = {name: version_of(name) for name in dict.fromkeys((*told, *lower_bounds))}
    shown = [f"{name} {version}" for name in told if (version := versions[name]) != NOT_INSTALLED]
    found = f"Python {program_versions(())['version of Python']}, {', '.join(shown)}"
    older = [
        f"{name} {versions[name]}, older than {oldest}" if versions[name] != NOT_INSTALLED else f"{name} not installed"
        for name, oldest in lower_bounds.items()
        if parse_release(versions[name]) < parse_release(oldest)
    ]
    if older:
        recorder.warn("versions", f"{found}; {', '.join(older)}", "install what pyproject.toml asks for: pip install .")
        return
    newer = [
        f"{name} {lower_bounds[name]}"
        for name in TRAINING_PACKAGES
        if parse_release(versions[name])[:2] > parse_release(lower_bounds.get(name, "9999"))
    ]
    recorder.ok("versions", f"{found}; newer than tested with: {', '.join(newer)}" if newer else found)


def unused_accelerator(platform: str, devices: Path = Path("/dev")) -> str | None:
    """The extra to install where JAX has started on the CPU of a machine that has more; None elsewhere."""
    if platform != "cpu":
        return None
    there = {"cuda": ("nvidia0",), "tpu": ("accel0", "vfio/0")}
    return next((extra for extra, names in there.items() if any((devices / name).exists() for name in names)), None)


class DiskUsage(NamedTuple):
    """Bytes that a run will keep on disk, at the longest completions."""

    checkpoint_bytes: int
    num_checkpoints: int
    """Kept at once: the newest, the best, and one that is being written."""
    rollout_bytes: int

    @property
    def all_checkpoint_bytes(self) -> int:
        return self.checkpoint_bytes * self.num_checkpoints


BYTES_PER_RECORD, BYTES_PER_PROMPT_TOKEN, BYTES_PER_TOKEN, BYTES_PER_FLOAT = 500, 12, 12, 22
"""In rollouts/: of what stands there once, and of each token's id and text and of each of its floats."""


def estimate_disk_usage(
    settings: Settings, *, checkpoint_bytes: int, mean_prompt_tokens: float, num_hosts: int
) -> DiskUsage:
    """What a run under these settings writes.

    Args:
        checkpoint: bytes of one.
        prompt_tokens: of a prompt, on average.
    """
    rollout, keeps_best = settings.rollout, bool(settings.eval.every_steps and settings.checkpoint.best_metric)
    floats = 2 + len(settings.scored_roles) + settings.has_critic
    of_completion = rollout.max_new_tokens * (BYTES_PER_TOKEN + BYTES_PER_FLOAT * floats)
    of_sample = BYTES_PER_RECORD + BYTES_PER_PROMPT_TOKEN * mean_prompt_tokens + of_completion
    samples = settings.run.steps * rollout.prompts_per_step * rollout.group_size * num_hosts
    return DiskUsage(
        checkpoint_bytes,
        settings.checkpoint.keep + keeps_best + 1,
        round(samples * of_sample) if settings.logging.save_rollouts else 0,
    )


def check_disk(recorder: CheckRecorder, folder: Path, disk_usage: DiskUsage | None) -> None:
    """Whether there is room where the run directory is to lie; without `writes` only how much there is."""
    parent = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(parent).free
    found = f"{format_size(free)} free at {parent}"
    if disk_usage is None:
        recorder.skip("disk", reason=f"{found}; what a run writes follows from the model")
        return
    found += (
        f"; a run keeps {disk_usage.num_checkpoints} checkpoints of {format_size(disk_usage.checkpoint_bytes)}, and "
        f"writes up to "
        f"{format_size(disk_usage.rollout_bytes)} of rollouts"
    )
    if disk_usage.all_checkpoint_bytes > free:
        advice = "free some, lower checkpoint.keep, or choose another run.dir"
        recorder.fail("disk", found, advice, exit_code=EXIT_ENVIRONMENT)
    elif disk_usage.all_checkpoint_bytes + disk_usage.rollout_bytes > free:
        advice = "free some, set logging.save_rollouts: false, or choose another run.dir"
        recorder.warn("disk", found, advice)
    else:
        recorder.ok("disk", found)


def format_size(size: int) -> str:
    """In the unit that suits it."""
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"
