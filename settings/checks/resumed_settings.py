"""Finds settings that have changed when a run is resumed, and refuses changes that affect what it learns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from settings.errors import InputError
from settings.loading.fields import FIELDS, SECTIONS, suggest_fields

OPTION = "--allow-changed"

PLACE_OF_RUN = ("run.name", "run.dir")
"""The settings that determine where the run directory is. Moving it does not affect the run."""

FREE_SETTINGS = (
    # Number of steps, outputs and devices.
    *("run.steps", "run.early_stopping", "logging", "eval", "checkpoint", "watchdog", "mesh"),
    *("data.eval_source", "data.eval_split"),
    # Speed and memory.
    *("model.remat", "model.attention", "model.logits_chunk", "score", "algorithm.balance_batch"),
    *("algorithm.dynamic_microbatch", "algorithm.max_tokens_per_device", "algorithm.rows_per_device"),
    "algorithm.gae_chunk_size",
    *("critic.max_tokens_per_device", "critic.rows_per_device"),
    *("rollout.slots", "rollout.kv_blocks", "rollout.mode", "rollout.scheduler"),
    *("rollout.placement", "rollout.devices"),
    *("rollout.mesh", "rollout.segment", "rollout.pdsr", "rollout.workers", "rollout.ray"),
    *("rollout.prefill_length_min", "rollout.max_length_total"),
    *("reward.batch_size", "optimizer.offload"),
    *("plugins", "env.step_timeout_s", "env.concurrency", "env.max_suspended"),
    # Checkpoints contain fingerprints of the models and data that these select.
    *("model.path", "model.lora", "reference", "critic.path"),
    "reward.model",
    *("rollout.prompts_per_step", "algorithm.mini_batch_prompts"),
    *("data.source", "data.split", "data.prompt_column", "data.answer_column"),
)
"""Settings and sections that may change when a run resumes, because they do not affect what it learns."""


class SettingChange(NamedTuple):
    """A setting whose value differs between the run so far and the resumed run."""

    name: str
    before: Any
    after: Any
    is_derived: bool
    """Whether the old or the new value is derived from another setting."""

    @property
    def is_decisive(self) -> bool:
        """Whether the change affects what the run learns."""
        return not is_in(self.name, FREE_SETTINGS)

    def to_text(self) -> str:
        return f"{self.name} was {self.before!r} and is now {self.after!r}"


def changed_settings(
    before: Mapping[str, tuple[Any, str]], after: Mapping[str, tuple[Any, str]]
) -> list[SettingChange]:
    """Returns the settings whose values differ, except `PLACE_OF_RUN` and settings that only one mapping contains.

    Args:
        before: settings of the run so far: dotted name -> (value, provenance), as `from_yaml` returns them.
        after: settings of the resumed run, in the same form.
    """
    return [
        SettingChange(name, before[name][0], value, is_derived="derived" in (origin, before[name][1]))
        for name, (value, origin) in after.items()
        if name in before and name not in PLACE_OF_RUN and before[name][0] != value
    ]


def check_allowed(changes: Sequence[SettingChange], allowed: Collection[str]) -> None:
    """Raises InputError for a change that affects what the run learns, unless `allowed` has its setting or section."""
    for name in allowed:
        if name not in FIELDS and name not in SECTIONS:
            raise InputError(f"{OPTION}: there is no setting or section {name}{suggest_fields(name)[1]}")
    decisive = [change for change in changes if change.is_decisive]
    # Allowing a setting also allows the settings derived from it.
    decisive = [change for change in decisive if not change.is_derived] or decisive
    refused = [change for change in decisive if not is_in(change.name, allowed)]
    if refused:
        lines = "".join(f"\n  {change.to_text()}" for change in refused)
        names = " ".join(f"{OPTION} {change.name}" for change in refused)
        raise InputError(
            f"--resume: these settings differ from those of the run so far and change what it learns:{lines}\n"
            f"Set them as before, start a new run with another run.name, or accept the new values with {names}"
        )


def is_in(name: str, settings: Collection[str]) -> bool:
    """Returns whether a dotted name, or a section that contains it, is among `settings`."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in settings for count in range(1, len(parts) + 1))
