"""Checks of a run's environment: package versions, hub, wandb and disk. They write nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from huggingface_hub import constants, get_token

from app.model.io.hub import cached_commit, is_hub_id, latest_commit
from app.model.io.model_files import CONFIG_FILE, HUB_FILES, is_from_hub
from app.preflight.check_results import EXIT_INPUT, CheckRecorder
from app.records.text_format import format_bytes
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
HUB_DATA_PREFIX = "hf:"
CACHED_ANY_COMMIT = "cached"
"""Placeholder for the unknown commit of a cached data set."""
WANDB_KEY = "WANDB_API_KEY"


class HubSource(NamedTuple):
    """A model or data set on the hub, with the setting that selects it."""

    setting: str
    kind: Literal["model", "dataset"]
    hub_id: str
    revision: str | None


def hub_sources(settings: Settings) -> tuple[HubSource, ...]:
    """Returns the hub models and data sets in the settings; empty if everything is local."""
    model, critic, reward, data = settings.model, settings.critic, settings.reward, settings.data
    models = {
        "model.path": (model.path, model.revision),
        "critic.path": (settings.has_critic and critic.path, critic.revision),
        "reward.model": (reward.model, reward.model_revision),
    }
    single = isinstance(data.source, str)
    data_sets = {
        **{
            "data.source" if single else f"data.source[{i}]": (one.source, one.revision)
            for i, one in enumerate(data.sources)
        },
        "data.eval_source": (settings.eval.every_steps and data.eval_source, None),
    }
    return (
        *(
            HubSource(setting, "model", path, revision)
            for setting, (path, revision) in models.items()
            if path and is_from_hub(path) and is_hub_id(path)
        ),
        *(
            HubSource(setting, "dataset", source.removeprefix(HUB_DATA_PREFIX).partition(":")[0], revision)
            for setting, (source, revision) in data_sets.items()
            if source and source.startswith(HUB_DATA_PREFIX)
        ),
    )


def cached_commit_of(source: HubSource) -> str | None:
    """Returns the commit of a model if it is complete in this machine's cache; None for any other source."""
    return cached_commit(source.hub_id, source.revision, files=HUB_FILES) if source.kind == "model" else None


@contextmanager
def hub_offline(sources: Sequence[HubSource]) -> Iterator[None]:
    """Makes hub libraries read only this machine's cache inside the block, as if HF_HUB_OFFLINE were set.

    No request to the hub may be in progress on entry.
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


def check_hub_source(recorder: CheckRecorder, source: HubSource, *, cached: str | None) -> None:
    """Checks that a run can get a model or data set from the hub or from the cache. Downloads nothing.

    Args:
        cached: commit in this machine's cache, or `CACHED_ANY_COMMIT`; None if it is not in the cache.
    """
    check, endpoint = f"hub: {source.setting}", constants.ENDPOINT
    origin = f"{endpoint}, HF_TOKEN {'is set' if get_token() else 'is not set'}"
    fetch = f"hf download {source.hub_id}{' --repo-type dataset' if source.kind == 'dataset' else ''}"
    state = f"{source.hub_id} is {'not ' if cached is None else ''}in this machine's cache"
    if cached not in (None, CACHED_ANY_COMMIT):
        state += f", commit {cached[:12]}"
    try:
        newest = latest_commit(
            source.hub_id, source.revision, kind=source.kind, file=CONFIG_FILE, timeout_s=REQUEST_TIMEOUT_S
        )
    except InputError as error:
        if cached is None:
            recorder.fail(check, f"{source.hub_id}: {error}", exit_code=EXIT_INPUT)
        else:
            recorder.warn(check, f"{state}; hub error: {error}", "a run can use the cache; fix the access to the hub")
        return
    except ConnectionError as error:
        is_offline = constants.is_offline_mode()
        reason = "HF_HUB_OFFLINE is set" if is_offline else f"{endpoint} cannot be reached: {error}"
        if cached is None:
            advice = "unset HF_HUB_OFFLINE, fix the network (proxy, HF_ENDPOINT), or use a local path"
            recorder.fail(check, f"{state}, and {reason}", advice)
        elif is_offline:
            recorder.ok(check, f"{state}; {reason}")
        else:
            recorder.warn(check, f"{state}; {reason}", "a run can use the cache; HF_HUB_OFFLINE=1 avoids the wait")
        return
    if cached is None:
        found = f"{state}; a run would download commit {newest[:12]} from {origin}"
        recorder.warn(check, found, f"download it before a long run: {fetch}")
    elif cached not in (CACHED_ANY_COMMIT, newest):
        found = f"{state}; a run would download the newer commit {newest[:12]} from {origin}"
        recorder.warn(check, found, f"download it first ({fetch}), or pin the revision of {source.setting} to {cached}")
    else:
        recorder.ok(check, f"{state}; {origin}")


def check_wandb(recorder: CheckRecorder, settings: Settings) -> None:
    """Checks that there is a key if wandb is used. If wandb is unavailable, a run continues without charts."""
    project, mode = f"project {settings.logging.wandb_project}", settings.logging.wandb_mode
    if settings.logging.wandb_project is None or mode == "disabled":
        return
    if mode == "offline":
        recorder.ok("wandb", f"{project}, offline: upload it later with `wandb sync`")
    elif os.environ.get(WANDB_KEY):
        recorder.ok("wandb", f"{project}, {WANDB_KEY} is set")
    else:
        advice = f"set {WANDB_KEY} in the environment or a .env, or set logging.wandb_mode: offline"
        recorder.warn("wandb", f"{project}: {WANDB_KEY} is not set, so a run would only write local files", advice)


def check_versions(recorder: CheckRecorder, lower_bounds: Mapping[str, str]) -> None:
    """Checks that the packages that determine a run's results are not older than the required versions."""
    shown = {name: version_of(name) for name in (*TRAINING_PACKAGES, QUANTIZATION_PACKAGE)}
    versions = ", ".join(f"{name} {version}" for name, version in shown.items() if version != NOT_INSTALLED)
    found = f"Python {program_versions(())['version of Python']}, {versions}"
    # parse_release returns () for a package that is not installed.
    installed = {name: version_of(name) for name in lower_bounds}
    older = [
        f"{name} {installed[name]}, but {oldest} or later is required"
        for name, oldest in lower_bounds.items()
        if parse_release(installed[name]) < parse_release(oldest)
    ]
    if older:
        recorder.warn("versions", f"{found}; {'; '.join(older)}", "install the required versions: pip install -e .")
    else:
        recorder.ok("versions", found)


def check_disk(recorder: CheckRecorder, folder: Path, settings: Settings, checkpoint_bytes: int | None) -> None:
    """Checks that the disk of the run directory has enough space for the checkpoints.

    Args:
        checkpoint_bytes: size of one checkpoint; None if unknown.
    """
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    found = f"{format_bytes(free)} free at {parent}"
    if checkpoint_bytes is None:
        recorder.skip("disk", reason=f"{found}; the size of a checkpoint is unknown without the model")
        return
    # The newest ones, the best one, and the one being written.
    keeps_best = bool(settings.eval.every_steps and settings.checkpoint.best_metric)
    count = settings.checkpoint.keep + keeps_best + 1
    found += f"; a run needs space for {count} checkpoints of {format_bytes(checkpoint_bytes)}"
    if count * checkpoint_bytes > free:
        recorder.fail("disk", found, "free some space, lower checkpoint.keep, or choose another run.dir")
    else:
        recorder.ok("disk", found)
