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
    if "://" in value and not re.fullmatch(r"(gs|gcs|s3)://[^/]+(/.*)?", value):
        raise ValueError("expected a folder, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER")
    return value


class EarlyStoppingSettings(Section):
    """Ends a run before its last step. Evaluations are compared by `checkpoint.best_metric`."""

    patience: int | None = Field(default=None, ge=1)
    """Ends the run after this many evaluations in a row without an improvement of `checkpoint.best_metric`; null =
    never."""


class RunSettings(Section):
    name: Annotated[str, AfterValidator(_validate_run_name)] | None = None
    """Name of the run directory. When null, `<config>-seed<seed>`; further runs get `-2`, `-3` and so on appended, and
    `--resume` continues the newest."""
    dir: Annotated[str, AfterValidator(_validate_run_dir)] = Field(default="runs", min_length=1)
    """Directory that contains the run directories. With a bucket, `gs://BUCKET/FOLDER` or `s3://BUCKET/FOLDER`, they
    are in `runs/gs/BUCKET/FOLDER` or `runs/s3/BUCKET/FOLDER` and are copied to the bucket."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of all random numbers: for the order of the data and for sampling."""
    steps: int = Field(default=100, ge=1)
    """Number of training steps; each consists of rollout, reward, score, advantage and update, or with `algorithm.name:
    sft` of an update only."""
    early_stopping: EarlyStoppingSettings = EarlyStoppingSettings()


class CheckpointSettings(Section):
    every_steps: int = Field(default=50, ge=1)
    """Steps between checkpoints. The last step is always saved."""
    every_minutes: float | None = Field(default=None, gt=0)
    """Also saves a checkpoint if the last one is older than this many minutes; null disables this."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints kept, in addition to the best one."""
    best_metric: str | None = "eval/accuracy"
    """Metric whose best checkpoint is kept as checkpoints/best, unless step 0 was better; null keeps none. Lower is
    better for eval/mean_length, eval/truncated_fraction and eval/error_count. Of equal values, the earliest is kept."""


class EvalSettings(Section):
    every_steps: int = Field(default=25, ge=0)
    """Training steps between evaluations; there is also one before step 1 and one after the last step. 0 disables
    evaluation."""
    num_prompts: int | None = Field(default=128, ge=1, le=1_000_000)
    """Number of held-out prompts, the same ones in every evaluation; null = the whole data set."""
    num_samples: int = Field(default=1, ge=1, le=2**16)
    """Samples per prompt. With more than one, pass@k and maj@k are also measured, and temperature must be above 0."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of evaluations; 0 = greedy."""


class LoggingSettings(Section):
    wandb_project: str | None = None
    """Project on Weights & Biases (wandb); null = no logging there."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """wandb's mode: upload during the run (online), write local files only (offline), or log nothing (disabled).
    Without an API key, online becomes offline."""
    tensorboard: bool = False
    """Also writes the metrics as TensorBoard events to tensorboard/. Needs the extra [tensorboard]."""
    profile_steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = ()
    """Training steps to trace with `jax.profiler` into profile/, as in [3, 5]. These steps are slower."""
    save_rollouts: bool = True
    """Writes the samples of every step to rollouts/, for the report and for `--from-rollouts`. Set to false to save
    disk space."""
    completions_every_steps: int = Field(default=25, ge=0)
    """Training steps between completions printed to the console, starting with step 1; 0 = never."""
    report: bool = True
    """Writes report.html, rollouts.html and plots/ when the run ends. `grpo report` writes them at any time."""


class WatchdogSettings(Section):
    phase_s: float | None = Field(default=3600.0, gt=0, le=30 * 86_400)
    """Seconds that a phase may take: loading and compiling, a rollout, the reward functions, the scoring pass of a
    role, the optimizer steps of a training step, a checkpoint, an evaluation. If one takes longer, the run ends on
    every host with the stacks of all threads and exit code 70. The first pass of a phase may take twice as long,
    because it compiles. null = no limit.

    For `grpo rollout` on several hosts, a phase is the time from one sample or segment to the next. For `grpo score` it
    is the time from one window to the next, or a host's whole share for a reward model. A host that has finished waits
    for the other hosts without a limit, and reward functions have their own limits."""
