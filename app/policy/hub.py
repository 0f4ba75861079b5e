"""Models of the Hugging Face hub: fetched into its local cache, whole commits only, no code and no pickles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

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
            f"{_reason_and_way_out(error, hub_id)}, or give the path of a local directory"
        ) from error


def _reason_and_way_out(error: Exception, hub_id: str) -> str:
    if isinstance(error, GatedRepoError):
        return (
            "it is gated, and this user has no access; "
            f"accept its licence at https://huggingface.co/{hub_id} and log in with HF_TOKEN"
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
