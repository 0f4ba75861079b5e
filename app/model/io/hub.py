"""Downloads model files from the Hugging Face hub into the local cache, always from a single commit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of the HTTP library, which depends on the hub's version
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from settings.errors import InputError
from settings.schema.model import split_revision


def fetch_from_hub(path: str, *, files: Sequence[str]) -> Path:
    """Downloads files of one commit if needed, and returns their folder, whose name is the commit.

    Args:
        path: hub id, optionally followed by `@` and a commit, tag or branch; the default is the newest commit.
        files: names or patterns of the files to download.

    Raises:
        InputError: the model does not exist, is gated, or is neither reachable nor in the cache.
    """
    hub_id, revision = split_revision(path)
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(files)))
    except HFValidationError as error:
        raise InputError(
            f"model.path: {path!r} is neither an existing directory or file nor a hub id; correct the path, or give a "
            "hub id such as Qwen/Qwen3-0.6B"
        ) from error
    except (OSError, HTTPError) as error:
        which = f"revision {revision!r}" if revision else "the newest revision"
        raise InputError(
            f"model.path: {hub_id!r} is not a local path, and {which} cannot be downloaded from the hub: "
            f"{_explain_hub_error(error, hub_id)}, or set it to a local directory"
        ) from error


def is_hub_id(text: str) -> bool:
    """Returns whether the text has the form of a hub id: `owner/name` or `name`, not a longer path."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def is_cached(hub_id: str, revision: str | None, *, files: Sequence[str]) -> bool:
    """Returns whether all files of the model are in this machine's cache, so that nothing would be downloaded."""
    try:
        snapshot_download(hub_id, revision=revision, allow_patterns=list(files), local_files_only=True)
    except LocalEntryNotFoundError:
        return False
    return True


def latest_commit(
    hub_id: str, revision: str | None, *, kind: Literal["model", "dataset"], file: str, timeout_s: float
) -> str:
    """Returns the commit that would be downloaded now, without downloading it.

    Args:
        file: a required file of a model, which this user must be allowed to download; ignored for data sets.

    Raises:
        InputError: the model or data set does not exist, or this user has no access to it.
        ConnectionError: the hub does not answer, or offline mode is on.
    """
    try:
        if kind == "dataset":
            info = HfApi().dataset_info(hub_id, revision=revision, timeout=timeout_s)
            if info.siblings:
                # The hub lists the files of a gated data set for everybody, but refuses to serve them.
                url = hf_hub_url(hub_id, info.siblings[0].rfilename, repo_type="dataset", revision=info.sha)
                get_hf_file_metadata(url, timeout=timeout_s)
            return str(info.sha)
        return str(get_hf_file_metadata(hf_hub_url(hub_id, file, revision=revision), timeout=timeout_s).commit_hash)
    except RepositoryNotFoundError as error:  # GatedRepoError is a subclass
        page = f"datasets/{hub_id}" if kind == "dataset" else hub_id
        raise InputError(_explain_hub_error(error, page, kind=kind)) from error
    except (EntryNotFoundError, RevisionNotFoundError) as error:
        at = f"no revision {revision!r}" if isinstance(error, RevisionNotFoundError) else f"no {file}"
        raise InputError(f"it has {at}; choose another revision or repository") from error
    except (OSError, HTTPError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConnectionError(reason) from error


def _explain_hub_error(error: Exception, page: str, *, kind: str = "model") -> str:
    if isinstance(error, GatedRepoError):
        return (
            "it is gated, and this user has no access; "
            f"accept its license at https://huggingface.co/{page} and log in with HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no such {kind}, or it is private; check the id, or log in with HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return "it has no such revision; what follows the @ must be one of its commits, tags or branches"
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
    if isinstance(cause, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, but this machine's cache lacks some of its files; unset it for the first run"
    reason = " ".join(str(cause).split()) or type(cause).__name__
    return (
        f"{reason}; this machine's cache lacks some of its files. Try again with a network connection (a gated model "
        "also needs an accepted license and HF_TOKEN)"
    )
