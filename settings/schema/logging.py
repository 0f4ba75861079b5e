"""Settings of the section `logging`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from settings.schema.section import Section


class LoggingSettings(Section):
    wandb_project: str | None = None
    """Project on Weights & Biases (wandb), which is not used when null."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """Mode of wandb. Without an API key, online becomes offline."""
    tensorboard: bool = False
    """Also writes the metrics as TensorBoard events to tensorboard/. Needs the extra [tensorboard]."""
    profile_steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = ()
    """Training steps whose `jax.profiler` trace is written to profile/, as in [3, 5]. These steps are slower."""
    save_rollouts: bool = True
    """Writes the samples of every step to rollouts/."""
    completions_every_steps: int = Field(default=25, ge=0)
    """Training steps between completions printed to the console, starting with step 1; 0 = never."""
    report: bool = True
    """Writes report.html, rollouts.html and plots/ when the run ends. `grpo report` writes them at any time."""
