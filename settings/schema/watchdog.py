"""Settings of the watchdog: the time limit of the phases of a run."""

from __future__ import annotations

from pydantic import Field

from settings.schema.section import Section


class WatchdogSettings(Section):
    phase_s: float | None = Field(default=3600.0, gt=0, le=30 * 86_400)
    """Seconds that a phase may take: loading and compiling, a rollout, the reward functions, the scoring pass of a
    role, the optimizer steps of a training step, a checkpoint, an evaluation. If one takes longer, the run ends on
    every host with the stacks of all threads and exit code 70. The first pass of a phase may take twice as long,
    because it compiles. null = no limit.

    For `grpo rollout` on several hosts, a phase is the time from one sample or segment to the next. For `grpo score`
    it is the time from one window to the next, or a host's whole share for a reward model. A host that has finished
    waits for the others without a limit, and reward functions have limits of their own."""
