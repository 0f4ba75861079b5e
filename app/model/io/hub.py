"""Models of the Hugging Face hub: fetched into its local cache, whole commits only, no code and no pickles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import httpx2
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from settings.errors import InputError


def fetch_from_hub(hub_id: str, revision: str | None, *, files: Sequence[str]) -> Path:
    """The folder of the files of one commit. It is named after the commit.

    Args:
        revision: commit, tag or branch; the newest commit when None.
        files: names, or patterns of names; nothing else is fetched.

    Raises: InputError where the model is absent, gated, or out of reach and not in the cache.
    """
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(files)))
    except HFValidationError as error:
        raise InputError(f"model.path: {hub_id!r} is neither an existing directory or file nor a hub id") from error
    except (OSError, httpx2.HTTPError) as error:
        at = f"revision {revision!r}" if revision else "its newest revision"
        raise InputError(
            f"model.path: {hub_id!r} is not a local path, and {at} of it cannot be fetched from the hub: "
            f"{_explain_hub_error(error, hub_id)}, or give the path of a local directory"
        ) from error


def is_hub_id(text: str) -> bool:
    """Whether it is spelled as one; a path of more than two parts is not."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def cached_commit(hub_id: str, revision: str | None, *, files: Sequence[str]) -> str | None:
    """The commit of which this machine's cache holds these files whole; None where they would have to be fetched.

    Without a revision it is the one that was the newest when they were.
    """
    try:
        found = snapshot_download(hub_id, revision=revision, allow_patterns=list(files), local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(found).name


def latest_commit(
    hub_id: str, revision: str | None, *, kind: Literal["model", "dataset"], file: str, timeout_s: float
) -> str:
    """The commit that would be fetched now. Fetches nothing.

    Args:
        file: of a model, one that it must have and that this user must be allowed to fetch; of a data set any will do.

    Raises:
        InputError: there is no such thing, or not for this user.
        ConnectionError: the hub does not answer, or is not to be asked.
    """
    try:
        if kind == "dataset":
            return _latest_dataset_commit(hub_id, revision, timeout_s=timeout_s)
        return str(get_hf_file_metadata(hf_hub_url(hub_id, file, revision=revision), timeout=timeout_s).commit_hash)
    except GatedRepoError as error:
        page = f"datasets/{hub_id}" if kind == "dataset" else hub_id
        raise InputError(_explain_hub_error(error, page)) from error
    except RepositoryNotFoundError as error:
        raise InputError(f"there is no such {kind}, or it is private; check the id, log in with HF_TOKEN") from error
    except (EntryNotFoundError, RevisionNotFoundError) as error:
        at = f"no revision {revision!r}" if isinstance(error, RevisionNotFoundError) else f"no {file}"
        raise InputError(f"it has {at}; choose another") from error
    except (OSError, httpx2.HTTPError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConnectionError(reason) from error


def _latest_dataset_commit(hub_id: str, revision: str | None, *, timeout_s: float) -> str:
    found = HfApi().dataset_info(hub_id, revision=revision, timeout=timeout_s)
    if found.siblings:
        # The hub tells everybody what a gated one consists of, and refuses its files.
        url = hf_hub_url(hub_id, found.siblings[0].rfilename, repo_type="dataset", revision=found.sha)
        get_hf_file_metadata(url, timeout=timeout_s)
    return str(found.sha)


def _explain_hub_error(error: Exception, page: str) -> str:
    if isinstance(error, GatedRepoError):
        return (
            "it is gated, and this user has no access; "
            f"accept its licence at https://huggingface.co/{page} and log in with HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such model, or it is private; check the id, log in with HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return "it has no such revision; set model.revision to a commit, tag or branch that it has"
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
    if isinstance(cause, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and this machine's cache does not hold it whole; unset it for the first run"
    reason = " ".join(str(cause).split()) or type(cause).__name__
    return (
        f"{reason}; this machine's cache does not hold it whole. Try again with a network (a gated model also wants "
        "its licence accepted and HF_TOKEN)"
    )
