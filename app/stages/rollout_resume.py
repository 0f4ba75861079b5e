"""Continuation of a killed `grpo rollout`: its finished samples, and the facts that determine them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from app.checkpoint.saved_policy import PolicyCheckpoint
from app.distributed.host_consistency import prompts_fingerprint
from app.records.atomic_write import is_partial_file
from app.records.partial_samples import read_parts, whole_samples
from app.records.sample import Prompt, Sample
from app.runtime.environments import environment_facts
from app.runtime.model_spec import ModelSpec
from settings import Settings
from settings.errors import InputError

FORMAT = "grpo-rollout-part/1"
FREE = (
    *("rollout.kv_blocks", "rollout.workers.lease_s", "rollout.workers.deterministic", "rollout.ray.address"),
    *("rollout.ray.start_timeout_s", "rollout.devices", "rollout.max_staleness", "rollout.max_length_total"),
)
"""Settings that affect no sample of a rollout in exact mode, and at most its rounding in fast mode."""
FREE_IN_FAST_MODE = (
    *("rollout.slots", "rollout.workers.", "rollout.kv_block_size", "rollout.pool", "rollout.ray."),
    "rollout.prompts_per_step",
)
"""Beginnings of the names of settings that affect only the rounding of samples, which matters in exact mode."""
MAX_SHOWN_CHARS = 40
"""Maximum length of a value shown in an error message; longer values are hashes."""

RolloutFacts = Mapping[str, Any]
"""Everything that determines the samples of a rollout: name -> JSON value."""


def rollout_facts(
    settings: Settings, model: ModelSpec, prompts: Sequence[Prompt], saved_policy: PolicyCheckpoint | None = None
) -> RolloutFacts:
    """Returns everything that determines the samples. The devices must have been started."""
    exact = settings.rollout.mode == "exact"
    rollout = dict(_flatten("rollout", settings.rollout.model_dump(mode="json")))
    free = FREE if exact else (*FREE, *FREE_IN_FAST_MODE)
    kept = {name: value for name, value in rollout.items() if not name.startswith(free)}
    devices = f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"
    return {
        "the model's files": model.files.fingerprint,
        "the tokenizer": model.tokenizer.fingerprint,
        **({} if saved_policy is None else {"the checkpoint": saved_policy.describe()}),
        "the prompts": prompts_fingerprint(prompts),
        "run.seed": settings.run.seed,
        "model.dtype": settings.model.dtype,
        "data.max_prompt_length": settings.data.max_prompt_length,
        **kept,
        **environment_facts(settings.env),
        **({"mesh.shape": settings.mesh.shape, "the devices": devices} if exact else {}),
    }


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (dotted setting name, value) for every setting in a section."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}", inner)
    else:
        yield name, value


def part_header(facts: RolloutFacts) -> str:
    """Returns the header of the part files of a rollout."""
    return json.dumps({"format": FORMAT, "run": facts})


def read_finished_samples(
    out: Path, facts: RolloutFacts, prompts: Sequence[Prompt], *, group_size: int
) -> dict[str, Sample]:
    """Returns the finished samples of a killed rollout to `out`, by uid, from the part files visible to this host.

    Incomplete lines, and lines that are not samples of these prompts, are skipped.

    Raises:
        InputError: a part file belongs to another rollout, or is not a part file.
    """
    by_uid, finished = {prompt.uid: prompt for prompt in prompts}, dict[str, Sample]()
    for path, records in read_parts(out, lambda path, header: _check_header(path, header, facts)):
        finished |= {one.uid: one for one in whole_samples(path, records, by_uid, num_samples=group_size)}
    return finished


def _check_header(path: Path, header: bytes, facts: RolloutFacts) -> None:
    try:
        stored = json.loads(header)
        stored_facts = dict(stored["run"]) if stored["format"] == FORMAT else None
    except (ValueError, LookupError, TypeError, RecursionError):
        stored_facts = None
    if stored_facts is None:
        raise InputError(f"--out: {path} is not a part file of a rollout ({FORMAT}); move it, or choose another --out")
    if stored_facts == facts:
        return
    differences = []
    for name in {**stored_facts, **facts}:
        there, here = (json.dumps(one.get(name)) for one in (stored_facts, facts))
        if there != here:
            is_short = max(len(there), len(here)) <= MAX_SHOWN_CHARS
            differences.append(f"{name} ({there} there, {here} here)" if is_short else name)
    raise InputError(
        f"--out: {path} contains samples of another, unfinished rollout. Different: {', '.join(differences)}. "
        "Use the same settings to finish that rollout, delete the file to start over, or choose another --out"
    )


def remove_unfinished_output(out: Path) -> None:
    """Removes the temporary files of `out` left behind by a killed process."""
    for path in out.absolute().parent.iterdir():
        if is_partial_file(path, target=out.absolute()):
            # Hosts that share a folder may remove the files at the same time.
            path.unlink(missing_ok=True)
