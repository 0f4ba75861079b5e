"""Settings of the watchdog: the time limit of each phase of a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from settings.schema.section import Section

HOUR_S = 3600.0

TimeLimit = Annotated[float, Field(gt=0, le=30 * 86_400)]


class WatchdogSettings(Section):
    """Time limits: if a phase takes longer, the run ends on every host with the stacks of all threads and exit code 70.

    For `grpo rollout` on several hosts, a phase is the time from one sample or segment to the next. For `grpo score`
    it is the time from one window to the next, or a host's whole share for a reward model; loading a checkpoint counts
    as `compile`. A host that has finished waits for the others without a limit, and reward functions have limits of
    their own.
    """

    compile_s: TimeLimit | None = HOUR_S
    """Seconds for loading and compiling, until the first step or evaluation ends; also added to the limit of the first
    pass of each other phase. null = no limit, here and in all of `watchdog`."""
    rollout_s: TimeLimit | None = HOUR_S
    """Seconds to generate one rollout and to synchronize the hosts after it."""
    reward_s: TimeLimit | None = HOUR_S
    """Seconds for the reward functions on one rollout."""
    score_s: TimeLimit | None = HOUR_S
    """Seconds for the scoring pass of one role."""
    update_s: TimeLimit | None = HOUR_S
    """Seconds for the advantages and all optimizer steps of a training step."""
    save_s: TimeLimit | None = HOUR_S
    """Seconds to save a checkpoint, and to write the report."""
    evaluate_s: TimeLimit | None = HOUR_S
    """Seconds for an evaluation."""
