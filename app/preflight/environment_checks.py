"""Checks of a run's environment: package versions, hub, wandb and disk. They write nothing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from huggingface_hub import constants, get_token

from app.model.io.hub import is_cached, is_hub_id, latest_commit
from app.model.io.model_files import CONFIG_FILE, HUB_FILES, is_from_hub
from app.preflight.check_results import EXIT_INPUT, CheckRecorder
from app.preflight.sample_file_size import SampleFileSize
from app.prompts.dataset import split_hub_source
from app.records.run_directory import is_address
from app.records.text_format import format_bytes
from app.records.versions import (
    NOT_INSTALLED,
    QUANTIZATION_PACKAGE,
    TRAINING_PACKAGES,
    parse_release,
    version_of,
)
from settings import Settings
from settings.errors import InputError
from settings.schema.model import split_revision

REQUEST_TIMEOUT_S = 5.0
HUB_DATA_PREFIX = "hf:"
WANDB_KEY = "WANDB_API_KEY"


class HubSource(NamedTuple):
    """A model or data set on the hub, with the setting that selects it."""

    setting: str
    kind: Literal["model", "dataset"]
    hub_id: str
    revision: str | None

    @property
    def is_cached_model(self) -> bool:
        """Whether this is a model whose files are all in this machine's cache; always false for a data set."""
        return self.kind == "model" and is_cached(self.hub_id, self.revision, files=HUB_FILES)


def hub_sources(settings: Settings) -> tuple[HubSource, ...]:
    """Returns the hub models and data sets in the settings; empty if everything is local."""
    data, reference = settings.data, settings.reference
    models = {
        "model.path": settings.model.path,
        "reference.path": settings.has_teacher and reference.source,
        "critic.path": settings.has_critic and settings.critic.path,
        "reward.model": settings.reward.model,
    }
    single = isinstance(data.source, str)
    data_sets = {"data.source" if single else f"data.source[{i}]": one.source for i, one in enumerate(data.sources)}
    if settings.eval.every_steps and data.eval_source:
        data_sets["data.eval_source"] = data.eval_source
    found = []
    for setting, path in models.items():
        if path and is_from_hub(path) and is_hub_id(split_revision(path)[0]):
            found.append(HubSource(setting, "model", *split_revision(path)))
    for setting, source in data_sets.items():
        if source.startswith(HUB_DATA_PREFIX):
            hub_id, _, revision = split_hub_source(source)
            found.append(HubSource(setting, "dataset", hub_id, revision))
    return tuple(found)


@contextmanager
def hub_offline(sources: Sequence[HubSource]) -> Iterator[None]:
    """Returns a context manager in which Hugging Face libraries read only this machine's cache (HF_HUB_OFFLINE).

    No request to the hub may be in progress when it is entered.
    """
    modules: list[Any] = [constants]
    if any(source.kind == "dataset" for source in sources):
        from datasets import config

        modules.append(config)
    with ExitStack() as stack:
        for module in modules:
            stack.callback(setattr, module, "HF_HUB_OFFLINE", module.HF_HUB_OFFLINE)
            module.HF_HUB_OFFLINE = True
        yield


def check_hub_source(recorder: CheckRecorder, source: HubSource, *, is_cached: bool) -> None:
    """Checks that a model or data set is cached on this machine (`is_cached`) or that this user may download it."""
    check, endpoint = f"hub: {source.setting}", constants.ENDPOINT
    if is_cached:
        recorder.ok(check, f"{source.hub_id} is in this machine's cache")
        return
    state = f"{source.hub_id} is not in this machine's cache"
    try:
        commit = latest_commit(
            source.hub_id, source.revision, kind=source.kind, file=CONFIG_FILE, timeout_s=REQUEST_TIMEOUT_S
        )
    except InputError as error:
        recorder.fail(check, f"{source.hub_id}: {error}", exit_code=EXIT_INPUT)
    except ConnectionError as error:
        reason, way = f"{endpoint} cannot be reached: {error}", "fix the network (proxy, HF_ENDPOINT)"
        if constants.is_offline_mode():
            reason, way = "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
        recorder.fail(check, f"{state}, and {reason}", f"{way}, or use a local path")
    else:
        token = f"HF_TOKEN {'is set' if get_token() else 'is not set'}"
        fetch = f"hf download {source.hub_id}{' --repo-type dataset' if source.kind == 'dataset' else ''}"
        found = f"{state}; a run would download commit {commit[:12]} from {endpoint}, {token}"
        recorder.warn(check, found, f"download it before a long run: {fetch}")


def check_wandb(recorder: CheckRecorder, settings: Settings) -> None:
    """Warns if wandb is used without an API key. A run without access to wandb continues, but without its charts."""
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
    found = f"Python {platform.python_version()}, {versions}"
    # parse_release returns () for a package that is not installed.
    older = [
        f"{name} {version_of(name)}, but {oldest} or later is required"
        for name, oldest in lower_bounds.items()
        if parse_release(version_of(name)) < parse_release(oldest)
    ]
    if older:
        recorder.warn("versions", f"{found}; {'; '.join(older)}", "install the required versions: pip install -e .")
    else:
        recorder.ok("versions", found)


def check_disk(
    recorder: CheckRecorder,
    folder: Path,
    settings: Settings,
    checkpoint_bytes: int | None,
    samples: SampleFileSize | None,
    *,
    gathers: bool = False,
) -> None:
    """Checks that the disk of the run directory has enough space for the checkpoints and the samples.

    Args:
        checkpoint_bytes: size of one checkpoint; None if unknown.
        samples: size of the sample files; None if unknown.
        gathers: whether process 0 gathers the arrays of a checkpoint in files before writing it.
    """
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    found = f"{format_bytes(free)} free at {parent}"
    if checkpoint_bytes is None:
        recorder.skip("disk", reason=f"{found}; the size of a checkpoint is unknown without the model")
        return
    # The newest checkpoints, the best one, the one being written, the arrays gathered for it, and one that a slow copy
    # to a bucket keeps.
    keeps_best = bool(settings.eval.every_steps and settings.checkpoint.best_metric)
    count = settings.checkpoint.keep + keeps_best + 1 + gathers + is_address(settings.run.dir)
    found += f"; a run needs space for {count} checkpoints of {format_bytes(checkpoint_bytes)}"
    found += "" if samples is None else f", and {samples.to_text()}"
    if count * checkpoint_bytes > free:
        recorder.fail("disk", found, "free some space, lower checkpoint.keep, or choose another run.dir")
    elif samples is not None and count * checkpoint_bytes + samples.total > free:
        advice = "free some space, set logging.save_rollouts: false, or choose another run.dir"
        # Completions are usually shorter than the limit.
        recorder.warn("disk", found, advice)
    else:
        recorder.ok("disk", found)
