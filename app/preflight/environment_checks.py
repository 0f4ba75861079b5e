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

from app.model.io.hub import cached_commit, is_hub_id, newest_commit
from app.model.io.model_files import CONFIG_FILE, HUB_FILES, is_from_hub
from app.preflight.check_results import INPUT, RUN_TIME, Findings
from app.records.versions import NOT_INSTALLED, QUANTIZING, TRAINING, program_facts, release, version_of
from settings import Settings
from settings.errors import InputError

TIMEOUT_S = 5.0
"""Of a request."""
PATIENCE_S = 10.0
"""With all requests, names that are looked up among them: they go on at once, beside everything else."""
HUB_DATA = "hf:"
CACHED = "cached"
"""What is said of a data set that the cache holds, whatever its commit."""
WANDB = "https://api.wandb.ai"
WANDB_KEY = "WANDB_API_KEY"
WHO_AM_I = {"query": "query Viewer { viewer { username } }"}


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
        HubSource(setting, "dataset", source.removeprefix(HUB_DATA).partition(":")[0], revision)
        for setting, source, revision in data_sources
        if source.startswith(HUB_DATA)
    )


class Inquiry:
    """A question that is asked in a thread of its own, which nobody waits for when the program ends."""

    def __init__(self, ask: Callable[[], str]):
        self._ask = ask
        self._reply: str | None = None
        self._error: Exception | None = None
        self._deadline = time.monotonic() + PATIENCE_S
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Blanket, because it is raised where the reply is asked for.
        try:
            self._reply = self._ask()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Until there is a reply, or for `PATIENCE_S` since it was asked."""
        self._thread.join(max(self._deadline - time.monotonic(), 0))

    def reply(self) -> str:
        """Raises: whatever asking has raised; ConnectionError where it has taken too long."""
        self.wait()
        if self._error is not None:
            raise self._error
        if self._reply is None:
            raise ConnectionError(f"no answer in {PATIENCE_S:.0f} s")
        return self._reply


def ask_hub(sources: Sequence[HubSource]) -> dict[str, Inquiry]:
    """By setting, for the commit that a run would start from."""

    def asking(source: HubSource) -> Callable[[], str]:
        return lambda: newest_commit(
            source.hub_id, source.revision, kind=source.kind, file=CONFIG_FILE, timeout_s=TIMEOUT_S
        )

    return {source.setting: Inquiry(asking(source)) for source in sources}


def cached_models(sources: Sequence[HubSource]) -> dict[str, str]:
    """Setting -> the commit that this machine's cache holds whole; nothing of others."""
    found = {s.setting: cached_commit(s.hub_id, s.revision, files=HUB_FILES) for s in sources if s.kind == "model"}
    return {setting: commit for setting, commit in found.items() if commit is not None}


@contextmanager
def fetching_nothing(sources: Sequence[HubSource]) -> Iterator[None]:
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


def look_at_hub(look: Findings, source: HubSource, inquiry: Inquiry, *, cached: str | None) -> None:
    """Whether a run would get what a setting wants of the hub.

    Args:
        cached: what this machine's cache holds of it, a commit or `CACHED`; None: nothing.
    """
    check, what = f"hub: {source.setting}", source.hub_id
    from_where = f"{constants.ENDPOINT}, HF_TOKEN {'known' if get_token() else 'not set'}"
    fetch = f"hf download {source.hub_id}{' --repo-type dataset' if source.kind == 'dataset' else ''}"
    held = f"{what} is in this machine's cache{'' if cached in (None, CACHED) else f', commit {cached[:12]}'}"
    try:
        newest = inquiry.reply()
    except InputError as error:
        if cached is None:
            look.fail(check, f"{what}: {error}", exit_code=INPUT)
        else:
            look.warn(check, f"{held}; the hub says: {error}", "a run starts from the cache; mend it all the same")
    except ConnectionError as error:
        if constants.is_offline_mode():
            if cached is None:
                advice = f"unset HF_HUB_OFFLINE, or put it there with: {fetch}"
                found = f"{what} is not in this machine's cache, and HF_HUB_OFFLINE is set"
                look.fail(check, found, advice, exit_code=RUN_TIME)
            else:
                look.ok(check, f"{held}; HF_HUB_OFFLINE is set, nothing is asked")
        elif cached is None:
            advice = "mend the network (proxy, HF_ENDPOINT), or name a local path"
            found = f"{what} is not in this machine's cache, and {constants.ENDPOINT} cannot be reached: {error}"
            look.fail(check, found, advice, exit_code=RUN_TIME)
        else:
            found = f"{held}; {constants.ENDPOINT} cannot be reached: {error}"
            look.warn(check, found, "a run starts from the cache; HF_HUB_OFFLINE=1 saves it the waiting")
    else:
        if cached is None:
            found = f"{what} is not in this machine's cache; commit {newest[:12]} would be fetched from {from_where}"
            look.warn(check, found, f"fetch it before a long run, and look again: {fetch}")
        elif cached not in (CACHED, newest):
            found = f"{held}; a run would fetch commit {newest[:12]} from {from_where}"
            look.warn(check, found, f"fetch it before ({fetch}), or pin {cached} as {source.setting}'s revision")
        else:
            look.ok(check, f"{held}; {from_where}")


def asks_wandb(settings: Settings) -> bool:
    """Whether a run would upload anything."""
    return settings.logging.wandb_project is not None and settings.logging.wandb_mode == "online"


def ask_wandb(key: str) -> str:
    """Whose key it is.

    Raises:
        PermissionError: nobody's.
        ConnectionError: wandb does not answer.
    """
    place = os.environ.get("WANDB_BASE_URL") or WANDB
    try:
        answer = httpx2.post(f"{place.rstrip('/')}/graphql", json=WHO_AM_I, auth=("api", key), timeout=TIMEOUT_S)
        viewer = answer.json()["data"]["viewer"] if answer.status_code == httpx2.codes.OK else None
    except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConnectionError(f"{place}: {' '.join(str(error).split()) or type(error).__name__}") from error
    if answer.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR:
        raise ConnectionError(f"{place} answers {answer.status_code}")
    if not viewer:
        raise PermissionError(f"{place} does not know the key")
    return f"{viewer['username']} at {place}"


def look_at_wandb(look: Findings, settings: Settings, inquiry: Inquiry | None) -> None:
    """Nothing where wandb is not used. A wandb that does not start costs its charts, never the run."""
    project, mode = settings.logging.wandb_project, settings.logging.wandb_mode
    if project is None or mode == "disabled":
        return
    if mode == "offline":
        look.ok("wandb", f"project {project}, offline: `wandb sync` uploads it later")
        return
    if inquiry is None:
        advice = f"set {WANDB_KEY} in the environment or a .env, or logging.wandb_mode: offline"
        look.warn("wandb", f"project {project}: {WANDB_KEY} is not set, so it would write files only", advice)
        return
    try:
        look.ok("wandb", f"project {project}, as {inquiry.reply()}")
    except PermissionError as error:
        look.warn("wandb", f"project {project}: {error}; there would be no charts", f"give another {WANDB_KEY}")
    except ConnectionError as error:
        advice = "mend the network, or set logging.wandb_mode: offline and `wandb sync` later"
        look.warn("wandb", f"project {project}: cannot be reached: {error}", advice)


def look_at_versions(look: Findings, bounds: Mapping[str, str]) -> None:
    """Of what decides what a run becomes, against the oldest that the program was tested with."""
    told = (*TRAINING, QUANTIZING)
    versions = {name: version_of(name) for name in dict.fromkeys((*told, *bounds))}
    shown = [f"{name} {version}" for name in told if (version := versions[name]) != NOT_INSTALLED]
    found = f"Python {program_facts(())['version of Python']}, {', '.join(shown)}"
    older = [
        f"{name} {versions[name]}, older than {oldest}" if versions[name] != NOT_INSTALLED else f"{name} not installed"
        for name, oldest in bounds.items()
        if release(versions[name]) < release(oldest)
    ]
    if older:
        look.warn("versions", f"{found}; {', '.join(older)}", "install what pyproject.toml asks for: pip install .")
        return
    newer = [
        f"{name} {bounds[name]}" for name in TRAINING if release(versions[name])[:2] > release(bounds.get(name, "9999"))
    ]
    look.ok("versions", f"{found}; newer than tested with: {', '.join(newer)}" if newer else found)


def unused_accelerator(platform: str, devices: Path = Path("/dev")) -> str | None:
    """The extra to install where JAX has started on the CPU of a machine that has more; None elsewhere."""
    if platform != "cpu":
        return None
    there = {"cuda": ("nvidia0",), "tpu": ("accel0", "vfio/0")}
    return next((extra for extra, names in there.items() if any((devices / name).exists() for name in names)), None)


class Writes(NamedTuple):
    """Bytes that a run will keep on disk, at the longest completions."""

    checkpoint: int
    num_checkpoints: int
    """Kept at once: the newest, the best, and one that is being written."""
    rollouts: int

    @property
    def checkpoints(self) -> int:
        return self.checkpoint * self.num_checkpoints


BYTES_OF_A_RECORD, BYTES_OF_A_PROMPT_TOKEN, BYTES_OF_A_TOKEN, BYTES_OF_A_FLOAT = 500, 12, 12, 22
"""In rollouts/: of what stands there once, and of each token's id and text and of each of its floats."""


def writes_of(settings: Settings, *, checkpoint: int, prompt_tokens: float, num_hosts: int) -> Writes:
    """What a run under these settings writes.

    Args:
        checkpoint: bytes of one.
        prompt_tokens: of a prompt, on average.
    """
    rollout, keeps_best = settings.rollout, bool(settings.eval.every_steps and settings.checkpoint.best_metric)
    floats = 2 + len(settings.scored_roles) + settings.has_critic
    of_completion = rollout.max_new_tokens * (BYTES_OF_A_TOKEN + BYTES_OF_A_FLOAT * floats)
    of_sample = BYTES_OF_A_RECORD + BYTES_OF_A_PROMPT_TOKEN * prompt_tokens + of_completion
    samples = settings.run.steps * rollout.prompts_per_step * rollout.group_size * num_hosts
    return Writes(
        checkpoint,
        settings.checkpoint.keep + keeps_best + 1,
        round(samples * of_sample) if settings.logging.save_rollouts else 0,
    )


def look_at_disk(look: Findings, folder: Path, writes: Writes | None) -> None:
    """Whether there is room where the run directory is to lie; without `writes` only how much there is."""
    parent = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(parent).free
    found = f"{size_text(free)} free at {parent}"
    if writes is None:
        look.skip("disk", why=f"{found}; what a run writes follows from the model")
        return
    found += (
        f"; a run keeps {writes.num_checkpoints} checkpoints of {size_text(writes.checkpoint)}, and writes up to "
        f"{size_text(writes.rollouts)} of rollouts"
    )
    if writes.checkpoints > free:
        advice = "free some, lower checkpoint.keep, or choose another run.dir"
        look.fail("disk", found, advice, exit_code=RUN_TIME)
    elif writes.checkpoints + writes.rollouts > free:
        advice = "free some, set logging.save_rollouts: false, or choose another run.dir"
        look.warn("disk", found, advice)
    else:
        look.ok("disk", found)


def size_text(size: int) -> str:
    """In the unit that suits it."""
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"
