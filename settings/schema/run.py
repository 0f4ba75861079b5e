"""Settings of a run: name, steps, checkpoints, evaluations, logs and watchdog."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from settings.schema.section import Section


def _validate_run_name(value: str) -> str:
    if len(value) > 100 or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError("expected 1 to 100 letters, digits, `.`, `_` or `-`, starting with a letter or digit")
    return value


def _validate_run_dir(value: str) -> str:
    scheme, separator, place = value.partition("://")
    parts = place.rstrip("/").split("/")
    if separator and not (scheme in ("gs", "gcs", "s3") and {"", ".", ".."}.isdisjoint(parts)):
        raise ValueError("expected a folder, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER")
    return value


class EarlyStoppingSettings(Section):
    """Ends a run early if evaluations stop improving, as measured by `checkpoint.best_metric`."""

    patience: int | None = Field(default=None, ge=1)
    """Number of evaluations in a row without an improvement of `checkpoint.best_metric` after which the run ends. If
    null, the run never ends early."""


class RunSettings(Section):
    name: Annotated[str, AfterValidator(_validate_run_name)] | None = None
    """Name of the run directory. If null, it is `<config>-seed<seed>`; further runs get `-2`, `-3` and so on appended,
    and `--resume` continues the newest."""
    dir: Annotated[str, AfterValidator(_validate_run_dir)] = Field(default="runs", min_length=1)
    """Directory that contains the run directories. If it is in a bucket (`gs://BUCKET/FOLDER` or `s3://BUCKET/FOLDER`),
    runs are written to `runs/gs/BUCKET/FOLDER` or `runs/s3/BUCKET/FOLDER` and copied to the bucket."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of all random numbers, for example for the order of the data and for sampling."""
    steps: int = Field(default=100, ge=1)
    """Number of training steps. Each step generates samples, computes their rewards and advantages, and updates the
    model; with `algorithm.name: sft`, it only updates the model."""
    early_stopping: EarlyStoppingSettings = EarlyStoppingSettings()


class CheckpointSettings(Section):
    every_steps: int = Field(default=50, ge=1)
    """Number of training steps between checkpoints. A checkpoint is also saved after the last step."""
    every_minutes: float | None = Field(default=None, gt=0)
    """Also saves a checkpoint if the last one is older than this many minutes. If null, age does not matter."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints that are kept, in addition to the best one."""
    best_metric: str | None = "eval/accuracy"
    """Metric by which checkpoints are compared; the best is kept as checkpoints/best, unless the model was better
    before training. Null keeps none. Lower values are better for eval/mean_length, eval/truncated_fraction and
    eval/error_count. If values are equal, the earliest checkpoint is kept."""


class EvalSettings(Section):
    every_steps: int = Field(default=25, ge=0)
    """Number of training steps between evaluations. There is also one before the first step and one after the last
    step; 0 disables all of them."""
    num_prompts: int | None = Field(default=128, ge=1, le=1_000_000)
    """Number of held-out prompts in an evaluation, which are the same in all evaluations. If null, the whole data set
    is used."""
    num_samples: int = Field(default=1, ge=1, le=2**16)
    """Samples per prompt in an evaluation. With more than one, pass@k and maj@k are also measured, and
    `eval.temperature` must be above 0."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of evaluations; 0 always selects the most likely token."""


class LoggingSettings(Section):
    wandb_project: str | None = None
    """Project on Weights & Biases (wandb) to which metrics are logged. If null, wandb is not used."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """Whether wandb uploads during the run (online), only writes local files (offline), or logs nothing (disabled).
    Without `WANDB_API_KEY`, online becomes offline."""
    tensorboard: bool = False
    """Also writes the metrics as TensorBoard events to the run's tensorboard/. This needs the extra [tensorboard]."""
    profile_steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = ()
    """Training steps that `jax.profiler` traces, such as `[3, 5]`; traces are written to the run's profile/. These
    steps are slower."""
    save_rollouts: bool = True
    """Writes the samples of every step to the run's rollouts/, for the report and for `--from-rollouts`. Set it to
    false to save disk space."""
    completions_every_steps: int = Field(default=25, ge=0)
    """Number of training steps between completions that are printed to the console, beginning with step 1; 0 prints
    none."""
    report: bool = True
    """Writes report.html, rollouts.html and plots/ when the run ends. `grpo report` can also write them, at any
    time."""


class WatchdogSettings(Section):
    phase_s: float | None = Field(default=3600.0, gt=0, le=30 * 86_400)
    """Time limit in seconds for each phase of a run: loading and compiling, a rollout, the reward functions, the
    scoring pass of a model, the optimizer steps of a training step, a checkpoint, or an evaluation. If a phase takes
    longer, every host prints the stacks of its threads and exits with code 70; a phase after loading may take twice as
    long the first time, because it compiles. Raise it if phases are slow but not stuck; null disables the limit. It
    also applies to `grpo rollout`, `evaluate` and `score` on several hosts, where it restarts whenever samples are
    finished."""
