"""The settings of the watchdog: how long each phase of a run may take until it counts as stuck."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from settings.schema.section import Section

HOUR_S = 3600.0

TimeLimit = Annotated[float, Field(gt=0, le=30 * 86_400)]


class WatchdogSettings(Section):
    """A phase that takes longer ends the run on every host, with the stacks of all threads and exit code 70.

    Of `grpo rollout` on several hosts, a phase is the time from one sample or segment to the next, of `grpo score` from
    one window to the next, or a host's whole share for a reward model. There a host that is done waits for the others
    without a limit, and reward functions have their own.
    """

    compile_s: TimeLimit | None = Field(
        default=HOUR_S,
        description="Seconds to load and compile, until the first step or evaluation; the first pass of each other "
        "phase has so many more. null = no limit, here and below.",
    )
    rollout_s: TimeLimit | None = Field(
        default=HOUR_S, description="Seconds to generate a round, and to meet behind it."
    )
    reward_s: TimeLimit | None = Field(default=HOUR_S, description="Seconds for the reward functions of a round.")
    score_s: TimeLimit | None = Field(default=HOUR_S, description="Seconds for one role's scoring pass.")
    update_s: TimeLimit | None = Field(
        default=HOUR_S, description="Seconds from the samples' credit to the end of the step's optimizer steps."
    )
    save_s: TimeLimit | None = Field(default=HOUR_S, description="Seconds to save a checkpoint; to write the report.")
    evaluate_s: TimeLimit | None = Field(default=HOUR_S, description="Seconds for an evaluation.")
