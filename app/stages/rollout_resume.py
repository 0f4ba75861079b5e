"""What `grpo rollout` writes beside its output while it runs, so that it can go on after it was killed."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from app.distributed.host_consistency import prompts_fingerprint
from app.distributed.lockstep import per_host_path
from app.records.atomic_write import is_partial_file
from app.records.sample import Prompt
from app.rollout.scheduling.event_log import EventLog, RunIdentity
from app.runtime.model_spec import ModelSpec
from app.tracking.console import num_done
from settings import Settings
from settings.errors import InputError

EXACT_MODE_SETTINGS = ("rollout.workers.", "rollout.pool", "rollout.ray.", "rollout.prompts_per_step")
"""Else who decodes a sample, and how many prompts its worker keeps, changes nothing but its rounding."""
IGNORED_SETTINGS = (
    *("rollout.workers.lease_s", "rollout.workers.deterministic"),
    *("rollout.max_staleness", "rollout.max_length_total"),
    *("rollout.ray.address", "rollout.ray.start_timeout_s"),
)
"""What workers do not read, or what changes only when they do what they do."""


@dataclass(frozen=True)
class PreviousProgress:
    """What a rollout that was killed had sampled."""

    path: Path
    """Of the log that tells."""
    num_done: int
    num_started: int
    num_samples: int
    num_tokens: int

    @classmethod
    def from_log(cls, log: EventLog | None) -> PreviousProgress | None:
        """None for a rollout that starts now."""
        if log is None or log.state is None:
            return None
        ledger = log.state.scheduler.samples
        num_tokens = sum(entry.num_tokens for entry in ledger)
        num_begun = sum(entry.num_tokens > 0 and entry.finish is None for entry in ledger)
        return cls(log.path, num_done(ledger), num_begun, len(ledger.entries), num_tokens)

    def to_text(self) -> str:
        done = f"{self.num_done} of {self.num_samples} samples done"
        return f"going on from {self.path}: {done}, {self.num_started} begun"


def open_event_log(out: Path, settings: Settings, model: ModelSpec, prompts: Sequence[Prompt]) -> EventLog:
    """The log of the rollout that writes `out`, new or left by a process that was killed; each host has its own.

    Args:
        prompts: this host's.

    Raises:
        InputError: a rollout on another number of hosts was not finished here; see `EventLog`, too.
    """
    _check_same_num_hosts(out)
    log = EventLog(per_host_path(out.with_name(f"{out.name}.log")), identity=rollout_facts(settings, model, prompts))
    if log.state is not None:
        _remove_leftovers(out)
    return log


def _check_same_num_hosts(out: Path) -> None:
    """They share prompts out otherwise, so nothing can go on from their logs."""
    counts = {
        path: int(path.stem.rpartition("_of_")[2])
        for path in out.parent.glob(f"{glob.escape(out.name)}.host_*_of_*.log")
    }
    alone = out.with_name(f"{out.name}.log")
    if alone.exists():
        counts[alone] = 1
    others = {path: count for path, count in counts.items() if count != jax.process_count()}
    if others:
        path, count = min(others.items())
        raise InputError(
            f"--out: a rollout on {count} host{'s' if count > 1 else ''} to {out} was not finished, as {path} says; go "
            "on with it there, or delete its logs"
        )


def rollout_facts(settings: Settings, model: ModelSpec, prompts: Sequence[Prompt]) -> RunIdentity:
    """Whatever decides a rollout's samples, by name, as JSON has it. The devices must have been started."""
    exact = settings.rollout.mode == "exact"
    rollout = dict(_flatten("rollout", settings.rollout.model_dump(mode="json")))
    kept = {
        name: value
        for name, value in rollout.items()
        if name not in IGNORED_SETTINGS and (exact or not name.startswith(EXACT_MODE_SETTINGS))
    }
    on_devices = {"mesh.shape": settings.mesh.shape, "the devices": _describe_devices()} if exact else {}
    return {
        "the model's files": model.files.fingerprint,
        "the tokenizer": model.tokenizer.fingerprint,
        "the prompts": prompts_fingerprint(prompts),
        "run.seed": settings.run.seed,
        "model.dtype": settings.model.dtype,
        "data.max_prompt_length": settings.data.max_prompt_length,
        **kept,
        **on_devices,
    }


def _describe_devices() -> str:
    return f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (dotted setting, value)."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}", inner)
    else:
        yield name, value


def _remove_leftovers(out: Path) -> None:
    """Of the process that was killed: what it had written of the output."""
    for path in out.absolute().parent.iterdir():
        if is_partial_file(path, target=out.absolute()):
            # Hosts that share a folder clear it at the same time.
            path.unlink(missing_ok=True)
