"""What goes wrong in reinforcement learning, noticed in the metrics and said in plain words.

A rule is a pure function of the steps so far. Thresholds stand below, each with its reason: they are meant to
stay silent on a run that learns, so that a person still reads them when one speaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from app.report.metrics_history import (
    History,
    MetricsRecord,
    Series,
    finite_metric,
    matching_metric_names,
    training_steps,
)

REARM_STEPS = 25
"""An alert is said once, and again only after its condition has been absent for so many steps."""
SHORT_WINDOW_STEPS, LONG_WINDOW_STEPS = 5, 10
"""Steps over which a level is judged: one step's value is noise; a dead reward is worth waiting a little longer."""
ENTROPY_COLLAPSE_FRACTION = 0.1
"""Of the starting entropy. A run that learns well keeps more: the quickstart ends at a quarter of its start."""
SOLVED_REWARD = 0.95
"""Every reward function's mean, for functions that give values in [0, 1]: there is nothing left to learn."""
ZERO_VARIANCE_THRESHOLD = 0.95
"""Groups whose rewards are all equal. At 0.95 the reward teaches by a twentieth of the samples that were paid for."""
TRUNCATION_THRESHOLD = 0.25
"""A quarter of the answers is cut: what remains is graded on luck, and length becomes the lesson."""
KL_THRESHOLD = 0.5
"""Nats per token from the starting model; usual runs stay below 0.1, beyond 0.5 the text is another language."""
RATIO_THRESHOLD = 10.0
"""Clipping bounds the gain of a ratio above 1 + clip_high, but a negative advantage times 10 is still paid in full."""
CLIP_FRACTION_THRESHOLD = 0.3
"""With so many tokens clipped the later updates of a step mostly do nothing."""
MISMATCH_THRESHOLD = 0.02
"""Mean nats between sampler and trainer on the same tokens: float32 gives 1e-7, bfloat16 0.004 (the quickstart)."""
ROUNDING_TOLERANCE = 1e-9
"""Equal weighted sums may differ by so much."""
WARM_UP_STEPS = 20
"""Steps in which new shapes may still be met."""


@dataclass(frozen=True, slots=True)
class Alert:
    """Something to look at, at the step where it was noticed."""

    step: int
    title: str
    text: str
    """Cause, and what to change."""


@dataclass(frozen=True, slots=True)
class AlertRule:
    title: str
    check: Callable[[Sequence[MetricsRecord]], str | None]
    """The text of an alert about the newest of these steps, or None."""


class AlertMonitor:
    """Follows a run step by step and says each thing once."""

    def __init__(self, history: History = ()):
        """`history` has been watched before: what it gave rise to is not said again."""
        self._steps: list[MetricsRecord] = []
        self._absent_steps = dict.fromkeys(RULES, REARM_STEPS)
        self.alerts = [alert for record in history for alert in self.observe(record)]
        """Of `history`."""

    def observe(self, record: MetricsRecord) -> list[Alert]:
        """What the newest line of the history gives rise to."""
        if not training_steps([record]):
            return []
        self._steps.append(record)
        return [Alert(record["step"], rule.title, text) for rule in RULES if (text := self._check_rule(rule))]

    def _check_rule(self, rule: AlertRule) -> str | None:
        text = rule.check(self._steps)
        if text is None:
            self._absent_steps[rule] += 1
            return None
        absent, self._absent_steps[rule] = self._absent_steps[rule], 0
        return text if absent >= REARM_STEPS else None


def find_alerts(history: History) -> list[Alert]:
    """Every alert of a run, in order: a function of its metrics alone."""
    return AlertMonitor(history).alerts


def _last_values(steps: Sequence[MetricsRecord], name: str, count: int) -> np.ndarray | None:
    """The metric in the last `count` steps; None unless each of them has it."""
    values = Series.from_history(steps[-count:], name).values
    return values if len(values) == count else None


def _nonfinite_update(steps: Sequence[MetricsRecord]) -> str | None:
    in_a_row = finite_metric(steps[-1], "policy/nonfinite_in_a_row") or 0
    # The count is 0 again when a later update of the same step was fine; the total still grew.
    before = finite_metric(steps[-2], "policy/nonfinite_updates") if len(steps) > 1 else 0
    grown = (finite_metric(steps[-1], "policy/nonfinite_updates") or 0) > (before or 0)
    if not in_a_row and not grown:
        return None
    return (
        "The loss or its gradient was NaN or infinite, so the update was skipped and the weights are as before. "
        "Usual causes: a learning rate that is too high, or bfloat16. Lower optimizer.learning_rate, or set "
        "model.dtype: float32. optimizer.max_nonfinite_steps such updates in a row end the run."
    )


def _entropy_collapse(steps: Sequence[MetricsRecord]) -> str | None:
    if len(steps) < 2 * SHORT_WINDOW_STEPS or _is_solved(steps):
        return None
    start, now = (
        Series.from_history(steps[:SHORT_WINDOW_STEPS], "policy/entropy").values,
        _last_values(steps, "policy/entropy", SHORT_WINDOW_STEPS),
    )
    if not len(start) or now is None or not start.mean() > 0 or now.mean() >= ENTROPY_COLLAPSE_FRACTION * start.mean():
        return None
    return (
        f"Entropy is {now.mean():.3g} nats per token, {now.mean() / start.mean():.0%} of its start: the samples of a "
        "prompt are nearly alike, so there is little left to compare. Lower optimizer.learning_rate, raise "
        "algorithm.clip_high, or hold the policy back with algorithm.beta."
    )


def _constant_reward(steps: Sequence[MetricsRecord]) -> str | None:
    means, deviations = (
        _last_values(steps, "reward/mean", LONG_WINDOW_STEPS),
        _last_values(steps, "reward/std", LONG_WINDOW_STEPS),
    )
    if means is None or deviations is None or max(deviations.max(), np.ptp(means)) > ROUNDING_TOLERANCE:
        return None
    if means[0] == 0:
        cause = "Either no answer is ever right (prompts too hard, answers cut, wrong chat template), or the reward "
        cause += "function does not recognise right answers"
    else:
        cause = "Either everything is solved, or the reward function does not look at the answer"
    return (
        f"Every sample of the last {LONG_WINDOW_STEPS} steps had reward {means[0]:g}, so the reward teaches nothing; "
        f"at most a KL "
        f"penalty or an entropy bonus moves the policy. {cause}. Read some samples in rollouts.html, and try `grpo "
        "score --role reward` on them."
    )


def _equal_rewards(steps: Sequence[MetricsRecord]) -> str | None:
    shares = _last_values(steps, "reward/zero_variance_fraction", LONG_WINDOW_STEPS)
    if shares is None or shares.mean() < ZERO_VARIANCE_THRESHOLD or _constant_reward(steps):
        return None
    cure = "Everything is nearly solved: take harder prompts, or stop here."
    if not _is_solved(steps):
        cure = "Take prompts that are sometimes right (easier or harder ones), or raise rollout.group_size."
    return (
        f"In {shares.mean():.0%} of the groups of the last {LONG_WINDOW_STEPS} steps all samples had the same reward; "
        f"from such "
        f"groups the reward teaches nothing. {cure}"
    )


def _truncation(steps: Sequence[MetricsRecord]) -> str | None:
    shares = _last_values(steps, "completions/truncated_fraction", SHORT_WINDOW_STEPS)
    if shares is None or shares.mean() < TRUNCATION_THRESHOLD:
        return None
    return (
        f"{shares.mean():.0%} of the completions of the last {SHORT_WINDOW_STEPS} steps were cut at "
        f"rollout.max_new_tokens before "
        "they had ended. Raise it, ask for short answers in data.system_prompt, or reward them. If all are cut, the "
        "model may never say its end-of-sequence token: is this an instruct model with its own chat template?"
    )


def _high_kl(steps: Sequence[MetricsRecord]) -> str | None:
    kl = _last_values(steps, "policy/kl", SHORT_WINDOW_STEPS)
    if kl is None or kl.mean() < KL_THRESHOLD:
        return None
    return (
        f"KL to the starting model is {kl.mean():.2g} nats per token over the last {SHORT_WINDOW_STEPS} steps: the "
        f"policy has left "
        "the language it came from. Raise algorithm.beta or lower optimizer.learning_rate, and go back to a "
        "checkpoint from before the rise."
    )


def _ratio_blow_up(steps: Sequence[MetricsRecord]) -> str | None:
    # No token is in two of them: by side of the ratio, and by the sign of its advantage.
    parts = [
        _last_values(steps, f"policy/clip_fraction_{side}", SHORT_WINDOW_STEPS) for side in ("low", "high", "dual")
    ]
    ratios = _last_values(steps, "policy/ratio_max", SHORT_WINDOW_STEPS)
    clipped = float(sum(part.mean() for part in parts if part is not None))
    largest = 0.0 if ratios is None else float(ratios.min())
    if clipped < CLIP_FRACTION_THRESHOLD and largest < RATIO_THRESHOLD:
        return None
    what = f"{clipped:.0%} of the tokens were clipped"
    if largest >= RATIO_THRESHOLD:
        what = f"in each of them some token became {largest:.3g} times as likely within the step, and {what}"
    return (
        f"Over the last {SHORT_WINDOW_STEPS} steps {what}: the updates go further than the samples can justify. Lower "
        "optimizer.learning_rate or algorithm.epochs, or make algorithm.mini_batch_prompts larger."
    )


def _sampler_mismatch(steps: Sequence[MetricsRecord]) -> str | None:
    if any(finite_metric(step, "perf/rollout/staleness_max") for step in steps[-SHORT_WINDOW_STEPS:]):
        # Drawn by an older policy, as was asked for.
        return None
    differences = _last_values(steps, "rollout/sampler_scorer_logprob_diff_mean", SHORT_WINDOW_STEPS)
    if differences is None or differences.mean() < MISMATCH_THRESHOLD:
        return None
    return (
        f"Sampler and trainer disagree by {differences.mean():.2g} nats on the average token, so the gradient is that "
        "of another policy than the one that sampled. Set model.dtype: float32; if that does not help it is a bug, "
        "please report it."
    )


def _reward_errors(steps: Sequence[MetricsRecord]) -> str | None:
    names = [name for name in steps[-1] if name.startswith("reward/") and name.endswith("error_count")]
    count = max((finite_metric(steps[-1], name) or 0 for name in names), default=0)
    if not count:
        return None
    return (
        f"Reward functions failed on {count:.0f} samples of this step; reward.on_error decides what such samples "
        "count. Try the function on saved samples with `grpo score --role reward`."
    )


def _recompilation(steps: Sequence[MetricsRecord]) -> str | None:
    compilations = _last_values(steps, "perf/compilations", LONG_WINDOW_STEPS)
    if len(steps) < WARM_UP_STEPS + LONG_WINDOW_STEPS or compilations is None or not compilations.all():
        return None
    return (
        f"Each of the last {LONG_WINDOW_STEPS} steps compiled a program anew, which costs more time than it computes. "
        f"Shapes should "
        "repeat after the first steps; this is a bug, please report it with settings.yaml and the lengths in "
        "metrics.jsonl."
    )


def _is_solved(steps: Sequence[MetricsRecord]) -> bool:
    recent = steps[-SHORT_WINDOW_STEPS:]
    means = [Series.from_history(recent, name).values for name in matching_metric_names(recent, "reward/", "/mean")]
    return bool(means) and all(len(values) and values.mean() >= SOLVED_REWARD for values in means)


RULES = (
    AlertRule("An update was skipped: NaN or infinity", _nonfinite_update),
    AlertRule("Entropy has collapsed", _entropy_collapse),
    AlertRule("All rewards are the same", _constant_reward),
    AlertRule("Hardly any group has rewards that differ", _equal_rewards),
    AlertRule("Many answers are cut", _truncation),
    AlertRule("The policy is far from where it started", _high_kl),
    AlertRule("The policy moves too far within a step", _ratio_blow_up),
    AlertRule("Sampler and trainer disagree", _sampler_mismatch),
    AlertRule("A reward function fails", _reward_errors),
    AlertRule("Every step compiles", _recompilation),
)
