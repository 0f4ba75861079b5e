"""Writes the log of a run on process 0: metrics.jsonl, sessions.jsonl, TensorBoard and wandb."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from app.records.atomic_write import write_atomic
from app.records.jsonl import parse_object, replace_floats, to_json_line
from app.records.run_directory import RunDirectory
from app.records.sample import Sample
from app.records.sample_json import sample_to_record
from app.records.shared_rows import share_rows
from app.records.versions import version_of
from app.report.alerts import Alert
from settings import InputError, Resolved

if TYPE_CHECKING:
    from app.tracking.tensorboard import TensorBoardWriter

log = logging.getLogger(__name__)

Metrics = Mapping[str, float | int | None]

WANDB_SECTIONS = (
    "run", "model", "data", "rollout", "reward", "score", "algorithm", "reference", "critic", "optimizer",
    "checkpoint", "env", "eval",
)  # fmt: skip
"""Sections of the settings that are uploaded to wandb; new sections stay private until they are listed here."""


def _read_metrics_lines(path: Path, *, last_step: int) -> list[tuple[bytes, dict[str, Any]]]:
    content = path.read_bytes() if path.exists() else b""
    kept = []
    for line in content.splitlines(keepends=True):
        # A line may be damaged, or incomplete after a kill.
        with suppress(InputError):
            record = parse_object(line, "metrics.jsonl")
            if line.endswith(b"\n") and type(record.get("step")) is int and record["step"] <= last_step:
                kept.append((line, record))
    return kept


def replace_nonfinite(value: Any) -> Any:
    """Returns a JSON value with NaN and infinities replaced by None, so that a diverging run can still be logged."""
    return replace_floats(value, lambda number: not math.isfinite(number))


def samples_to_jsonl(samples: Sequence[Sample], *, step: int) -> bytes:
    """Returns the samples of a step serialized as JSON Lines."""
    records = ({"step": step, **record} for record in share_rows(map(sample_to_record, samples)))
    return b"".join(to_json_line(replace_nonfinite(record), "a sample") for record in records)


def session_record() -> dict[str, Any]:
    """Returns this session's entry in `sessions.jsonl`: start time, versions and devices."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "grpo": version_of("grpo-jax"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }


class RunLog:
    """Writes a line per session to `sessions.jsonl`, and the metrics to `metrics.jsonl`, TensorBoard and wandb.

    Args:
        last_step: the last step whose metrics a resumed run keeps; None for a new run.
        session_fields: additional fields of this session's line in `sessions.jsonl`.
    """

    def __init__(
        self,
        run: RunDirectory,
        resolved: Resolved,
        *,
        last_step: int | None,
        wandb_id: str | None,
        session_fields: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.run = run
        kept = [] if last_step is None else _read_metrics_lines(run.metrics_path, last_step=last_step)
        self.history: list[dict[str, Any]] = [record for _, record in kept]
        last_line = max((record["step"] for record in self.history), default=0)
        # The line of the last step is missing if its evaluation was interrupted.
        if last_step is not None and last_line < last_step - 1:
            missing = f"steps {last_line + 1} to {last_step}"
            log.warning("%s has no lines for %s; report and alerts omit them", run.metrics_path, missing)
        # Written first: it marks the folder as a run directory, so that a killed start can be repeated.
        earlier = run.sessions_path.read_bytes() if last_step is not None and run.sessions_path.exists() else b""
        # The last line is incomplete if the program was killed.
        separator = b"\n" if earlier and not earlier.endswith(b"\n") else b""
        line = json.dumps({**session_record(), **session_fields}).encode() + b"\n"
        # Replace the file rather than write through a link.
        write_atomic(run.sessions_path, earlier + separator + line)
        write_atomic(run.metrics_path, b"".join(line for line, _ in kept))
        self._wandb = open_wandb(run, resolved, wandb_id)
        next_step = self.history[-1]["step"] + 1 if self.history else 0
        self._tensorboard = open_tensorboard(run, resolved, next_step=next_step)

    @property
    def wandb_id(self) -> str | None:
        return self._wandb.id if self._wandb is not None else None

    def write_metrics(self, step: int, metrics: Metrics) -> None:
        """Appends the metrics of a step, or all lines if the file has been deleted."""
        record = replace_nonfinite({"step": step, **metrics})
        self.history.append(record)
        missing = [record]
        if not self.run.metrics_path.exists():
            log.warning("%s was deleted during the run and is written again", self.run.metrics_path)
            missing = self.history
        with self.run.metrics_path.open("ab") as file:
            file.write(b"".join(to_json_line(line, "metrics") for line in missing))
        known = {name: value for name, value in record.items() if value is not None}
        if self._wandb is not None:
            self._wandb.log(known, step=step)
        if self._tensorboard is not None:
            self._tensorboard.add_scalars({name: known[name] for name in known.keys() - {"step"}}, step)

    def alert(self, alert: Alert) -> None:
        """Sends an alert to TensorBoard and wandb. Files do not contain it, as it can be derived from the metrics."""
        if self._tensorboard is not None:
            self._tensorboard.add_text(f"alerts/{alert.title}", alert.text, alert.step)
        if self._wandb is not None:
            self._wandb.alert(title=alert.title, text=f"Step {alert.step}. {alert.text}")

    def close(self) -> None:
        if self._tensorboard is not None:
            # Its errors were already raised when an event could not be written; try again here.
            with suppress(OSError):
                self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def open_wandb(run: RunDirectory, resolved: Resolved, wandb_id: str | None) -> Any:
    """Returns a wandb run, offline if WANDB_API_KEY is not set; None if `logging.*` disables wandb.

    If wandb cannot start, a warning is logged, and None is returned, so that training continues without it.
    """
    logging_settings = resolved.settings.logging
    if logging_settings.wandb_project is None or logging_settings.wandb_mode == "disabled":
        return None
    import wandb

    online = logging_settings.wandb_mode == "online" and bool(os.environ.get("WANDB_API_KEY"))
    if not online and logging_settings.wandb_mode == "online":
        log.warning(
            "WANDB_API_KEY is not set: wandb writes only to %s; upload it later with `wandb sync`", run.path / "wandb"
        )
    try:
        return wandb.init(
            project=logging_settings.wandb_project,
            name=resolved.settings.run.name,
            id=wandb_id,
            resume="allow",
            dir=run.path,
            mode="online" if online else "offline",
            config=resolved.settings.model_dump(include=set(WANDB_SECTIONS), mode="json"),
            # Command line, source code and console are private.
            settings=wandb.Settings(x_disable_meta=True, save_code=False, init_timeout=60, silent=True, console="off"),
        )
    except (wandb.Error, OSError) as error:
        log.warning("wandb did not start (%s); metrics are written only to %s", type(error).__name__, run.metrics_path)
        return None


def open_tensorboard(run: RunDirectory, resolved: Resolved, *, next_step: int) -> TensorBoardWriter | None:
    """Opens a TensorBoard writer and logs the settings to it; returns None without `logging.tensorboard`.

    Args:
        next_step: first step of this session; events of this step and later steps from earlier sessions are discarded.
    """
    if not resolved.settings.logging.tensorboard:
        return None
    from app.tracking.tensorboard import TensorBoardWriter

    writer = TensorBoardWriter(run.tensorboard_dir, next_step=next_step)
    writer.add_text("settings", "    " + resolved.to_yaml().replace("\n", "\n    "), next_step)
    return writer


class NullRunLog:
    """A run log that writes nothing; used by all processes except process 0."""

    history: Sequence[dict[str, Any]] = ()
    wandb_id: str | None = None

    def _ignore(self, *_: object, **__: object) -> None: ...

    write_metrics = alert = close = _ignore
