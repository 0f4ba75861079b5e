"""Settings of the section `logging`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from settings.schema.section import Section


class LoggingSettings(Section):
    wandb_project: str | None = Field(default=None, description="wandb is used only when this is set.")
    wandb_mode: Literal["online", "offline", "disabled"] = Field(
        default="online", description="Offline is taken instead of online when no key is known."
    )
    profile_steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = Field(
        default=(),
        description="Steps of which `jax.profiler` writes a trace to profile/, as in [3, 5]. They run slower.",
    )
    save_rollouts: bool = Field(default=True, description="Write every step's samples to rollouts/.")
    completions_every_steps: int = Field(
        default=25, ge=0, description="Show some completions after step 1 and every so many steps; 0 = never."
    )
    report: bool = Field(
        default=True,
        description="Write report.html, rollouts.html and plots/ when the run ends; `grpo report` can, at any time.",
    )
