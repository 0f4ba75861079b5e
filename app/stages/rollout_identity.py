"""The identity of a rollout: everything that determines its samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from app.checkpoint.saved_policy import PolicyCheckpoint
from app.records.identity import Identity, prompts_digest
from app.records.sample import Prompt
from app.runtime.environments import environment_facts
from app.runtime.model_spec import ModelSpec
from settings import Settings

FREE = (
    *("rollout.kv_blocks", "rollout.ray.address", "rollout.devices", "rollout.max_staleness"),
    "rollout.max_length_total",
)
"""Settings that affect no sample of a rollout in exact mode, and at most its rounding in fast mode."""
FREE_IN_FAST_MODE = (
    *("rollout.slots", "rollout.workers.", "rollout.ray."),
    "rollout.prompts_per_step",
)
"""Beginnings of the names of settings that affect only the rounding of samples, which matters in exact mode."""


def rollout_identity(
    settings: Settings, model: ModelSpec, prompts: Sequence[Prompt], saved_policy: PolicyCheckpoint | None = None
) -> Identity:
    """Returns everything that determines the samples. The devices must have been started."""
    exact = settings.rollout.mode == "exact"
    rollout = dict(_flatten("rollout", settings.rollout.model_dump(mode="json")))
    free = FREE if exact else (*FREE, *FREE_IN_FAST_MODE)
    kept = {name: value for name, value in rollout.items() if not name.startswith(free)}
    devices = f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"
    placed = {
        "mesh.shape": settings.mesh.shape,
        "the devices": devices,
        "whether workers are Ray actors": settings.rollout.uses_ray,
    }
    return {
        "the model's files": model.files.fingerprint,
        "the tokenizer": model.tokenizer.fingerprint,
        **({} if saved_policy is None else {"the checkpoint": saved_policy.describe()}),
        "the prompts": prompts_digest(prompts),
        "run.seed": settings.run.seed,
        "model.dtype": settings.model.dtype,
        "data.max_prompt_length": settings.data.max_prompt_length,
        **kept,
        **environment_facts(settings.env),
        **(placed if exact else {}),
    }


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (dotted setting name, value) for every setting in a section."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}", inner)
    else:
        yield name, value
