"""Alerts about common failures of reinforcement learning, detected in the metrics of a run.

A rule is a pure function of the steps so far. Thresholds are constants, each with its reason. They are chosen so that a
run that learns raises no alert: people ignore alerts that are often wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from app.records.text_format import format_percent
from app.report.metrics_history import (
    EVAL_PROMPTS,
    History,
    MetricsRecord,
    Series,
    finite_metric,
    matching_metric_names,
    training_steps,
)

REARM_STEPS = 25
"""Steps after which an alert may be raised again, if its condition was absent in all of them."""
SHORT_WINDOW_STEPS, LONG_WINDOW_STEPS = 5, 10
"""Numbers of steps over which a metric is averaged: one step is noisy, and a constant reward needs the longer
window."""
ENTROPY_COLLAPSE_FRACTION = 0.1
"""Fraction of the initial entropy that counts as a collapse. The quickstart, which learns, keeps a quarter."""
SOLVED_REWARD = 0.95
"""Mean of each reward function, in [0, 1], from which the task counts as solved."""
ZERO_VARIANCE_THRESHOLD = 0.95
"""Fraction of groups whose rewards are all equal. At 0.95, only a twentieth of the samples give a learning signal."""
TRUNCATION_THRESHOLD = 0.25
"""Fraction of truncated answers. Above a quarter, the policy mostly learns to be short."""
EARLY_TRUNCATION_THRESHOLD = 0.5
"""Fraction of truncated answers in each of the first steps, which are too few for a mean."""
KL_THRESHOLD = 0.5
"""KL to the initial model, in nats per token. Usual runs stay below 0.1; beyond 0.5 the text degenerates."""
RATIO_THRESHOLD = 10.0
"""Maximum probability ratio without an alert: clipping does not bound the loss of tokens with a negative advantage."""
CLIP_FRACTION_THRESHOLD = 0.3
"""Fraction of clipped tokens above which the later updates of a step have little effect."""
MISMATCH_THRESHOLD = 0.02
"""Mean |sampler - trainer logprob|, in nats. The quickstart has 1e-7 in float32, and 0.004 in bfloat16."""
CORRECTED_MISMATCH_THRESHOLD = 0.1
"""Replaces `MISMATCH_THRESHOLD` if importance weights correct the difference. SmolLM2-135M has 0.05 with
`rollout.weights: int8` and 0.03 with `rollout.kv_cache: int8`."""
ROUNDING_TOLERANCE = 1e-9
"""Largest difference between weighted sums that is due to rounding."""
WARM_UP_STEPS = 20
"""Number of initial steps in which new array shapes, and so compilations, are expected."""
COLLAPSE_STEPS = 100
"""Steps within which a collapse happens; a slower decline has other causes than too large updates."""
COLLAPSE_FRACTION = 0.5
"""Fraction of the best short-window mean reward that is lost in a collapse."""
COLLAPSE_STD = 0.25
"""Minimum loss of reward in a collapse, in standard deviations of samples: two standard errors of 64 samples."""
MAX_LEARNING_RATE = 1e-3
"""Maximum learning rate to suggest after a collapse; even the tiny model of the quickstart needs only half of it."""
ENTROPY_EXPLOSION, GRAD_NORM_EXPLOSION = 3.0, 10.0
"""Growth of entropy and of the gradient norm, as factors since the best step, that indicates too large updates."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A problem, and the step at which it was detected."""

    step: int
    title: str
    text: str
    """The likely cause, and the settings to change."""


class StepRecords(list[MetricsRecord]):
    """The lines of `metrics.jsonl` for the training steps so far."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations: list[tuple[int, MetricsRecord]] = []
        """The lines with a held-out accuracy, each with the number of training steps before it."""


class AlertMonitor:
    """Checks the steps of a run in order and raises each alert once while its condition lasts."""

    def __init__(self, history: History = ()):
        """Starts with the steps of `history`, whose alerts are not raised again."""
        self._steps = StepRecords()
        self._absent_steps = dict.fromkeys(RULES, REARM_STEPS)
        self.alerts = [alert for record in history for alert in self.observe(record)]
        """Alerts raised by `history`."""

    def observe(self, record: MetricsRecord) -> list[Alert]:
        """Takes the next line of the history and returns the alerts that it raises."""
        is_step = bool(training_steps([record]))
        if is_step:
            self._steps.append(record)
        if finite_metric(record, "eval/accuracy") is not None:
            self._steps.evaluations.append((len(self._steps), record))
        raised: list[Alert] = []
        for title, check in RULES.items() if is_step else ():
            text = check(self._steps)
            if text is not None and self._absent_steps[title] >= REARM_STEPS:
                raised.append(Alert(record["step"], title, text))
            self._absent_steps[title] = self._absent_steps[title] + 1 if text is None else 0
        return raised


def find_alerts(history: History) -> list[Alert]:
    """Returns all alerts of a run, in order."""
    return AlertMonitor(history).alerts


def _last_values(steps: Sequence[MetricsRecord], name: str, count: int) -> np.ndarray | None:
    """Returns the values of a metric in the last `count` steps, or None if a step has none."""
    values = Series.from_history(steps[-count:], name).values
    return values if len(values) == count else None


def _since_start(steps: Sequence[MetricsRecord], name: str, count: int) -> np.ndarray | None:
    """Returns a metric's values in the last `count` steps, or in all steps if there are fewer."""
    return _last_values(steps, name, min(count, len(steps)))


def _of_last(steps: np.ndarray) -> str:
    return "the first step" if len(steps) == 1 else f"the last {len(steps)} steps"


def _nonfinite_update(steps: Sequence[MetricsRecord]) -> str | None:
    def is_skipped(network: str) -> bool:
        # A later finite update of the same step resets the count, but the total has still grown.
        before = finite_metric(steps[-2], f"{network}/nonfinite_updates") if len(steps) > 1 else 0
        grown = (finite_metric(steps[-1], f"{network}/nonfinite_updates") or 0) > (before or 0)
        return grown or bool(finite_metric(steps[-1], f"{network}/nonfinite_in_a_row"))

    networks = {"policy": ("policy", "optimizer.learning_rate"), "value": ("critic", "critic.learning_rate")}
    skipped = [names for network, names in networks.items() if is_skipped(network)]
    if not skipped:
        return None
    names, rates = (" and ".join(one) for one in zip(*skipped, strict=True))
    return (
        f"The loss of the {names} or its gradient was NaN or infinite, so the update was skipped and the weights did "
        f"not change. Usual causes are a too high learning rate or bfloat16. Lower {rates}, or set "
        "model.dtype: float32. The run ends after 3 such updates in a row."
    )


def _entropy_collapse(steps: Sequence[MetricsRecord]) -> str | None:
    if len(steps) < 2 * SHORT_WINDOW_STEPS or _is_solved(steps) or _imitates(steps):
        return None
    start = Series.from_history(steps[:SHORT_WINDOW_STEPS], "policy/entropy").values
    now = _last_values(steps, "policy/entropy", SHORT_WINDOW_STEPS)
    if not len(start) or now is None or not start.mean() > 0 or now.mean() >= ENTROPY_COLLAPSE_FRACTION * start.mean():
        return None
    return (
        f"Entropy is {now.mean():.3g} nats per token, {format_percent(now.mean() / start.mean())} of its initial "
        "value: the samples of a prompt are nearly identical, so their rewards hardly differ. Lower "
        "optimizer.learning_rate, raise algorithm.clip_high, or add a KL penalty with algorithm.beta."
    )


def _constant_reward(steps: Sequence[MetricsRecord]) -> str | None:
    means, deviations = (_since_start(steps, f"reward/{name}", LONG_WINDOW_STEPS) for name in ("mean", "std"))
    if means is None or deviations is None or max(deviations.max(), np.ptp(means)) > ROUNDING_TOLERANCE:
        return None
    if _imitates(steps):
        return None
    cause = "Either every prompt is solved, or the reward function ignores the answer"
    if means[0] == 0:
        cause = "Either no answer is correct (prompts too hard, answers truncated, wrong chat template), or the "
        cause += "reward function does not recognize correct answers"
    return (
        f"Every sample of {_of_last(means)} had reward {means[0]:g}, so the reward gives no learning "
        f"signal; only a KL penalty or an entropy bonus can change the policy. {cause}. Read some samples in "
        "rollouts.html, and run `grpo score --role reward` on them."
    )


def _equal_rewards(steps: Sequence[MetricsRecord]) -> str | None:
    name, count = "reward/zero_variance_fraction", LONG_WINDOW_STEPS
    shares = _since_start(steps, name, count)
    if shares is None or shares.mean() < (ZERO_VARIANCE_THRESHOLD if len(shares) == count else 1):
        return None
    # With advantages per token, samples of a group are not compared.
    if _constant_reward(steps) or _imitates(steps) or finite_metric(steps[-1], "returns/mean") is not None:
        return None
    remedy = "Nearly every prompt is solved: use harder prompts, or stop here."
    if not _is_solved(steps):
        remedy = "Use prompts that are sometimes solved (easier or harder ones), or raise rollout.group_size."
    return (
        f"In {format_percent(shares.mean())} of the groups of {_of_last(shares)} all samples had the "
        f"same reward, and such groups give no learning signal. {remedy}"
    )


def _truncation(steps: Sequence[MetricsRecord]) -> str | None:
    shares = _since_start(steps, "completions/truncated_fraction", SHORT_WINDOW_STEPS)
    if shares is None:
        return None
    is_early = len(shares) < SHORT_WINDOW_STEPS
    if shares.min() <= EARLY_TRUNCATION_THRESHOLD if is_early else shares.mean() < TRUNCATION_THRESHOLD:
        return None
    return (
        f"{format_percent(shares.mean())} of the completions of {_of_last(shares)} were truncated at "
        "rollout.max_new_tokens. Raise it, ask for short answers in data.system_prompt, or reward short answers. If "
        "all are truncated, the model may never generate its end-of-sequence token: check that it is an "
        "instruct model with its own chat template."
    )


def _high_kl(steps: Sequence[MetricsRecord]) -> str | None:
    kl = _last_values(steps, "policy/kl", SHORT_WINDOW_STEPS)
    if kl is None or kl.mean() < KL_THRESHOLD:
        return None
    return (
        f"KL to the initial model is {kl.mean():.2g} nats per token over the last {SHORT_WINDOW_STEPS} steps: the "
        "policy is very far from it. Raise algorithm.beta or lower optimizer.learning_rate, and continue from a "
        "checkpoint before the rise."
    )


def _ratio_blow_up(steps: Sequence[MetricsRecord]) -> str | None:
    # The three parts are disjoint: they differ in the side of the ratio or the sign of the advantage.
    parts = [
        _last_values(steps, f"policy/clip_fraction_{side}", SHORT_WINDOW_STEPS) for side in ("low", "high", "dual")
    ]
    ratios = _last_values(steps, "policy/ratio_max", SHORT_WINDOW_STEPS)
    clipped = float(sum(part.mean() for part in parts if part is not None))
    largest = 0.0 if ratios is None else float(ratios.min())
    if clipped < CLIP_FRACTION_THRESHOLD and largest < RATIO_THRESHOLD:
        return None
    what = f"{format_percent(clipped)} of the tokens were clipped"
    if largest >= RATIO_THRESHOLD:
        what = f"every step made some token at least {largest:.3g} times as likely, and {what}"
    return (
        f"Over the last {SHORT_WINDOW_STEPS} steps {what}: the updates are larger than the samples justify. Lower "
        "optimizer.learning_rate or algorithm.epochs, or raise algorithm.mini_batch_prompts."
    )


def _reward_collapse(steps: Sequence[MetricsRecord]) -> str | None:
    recent = steps[-COLLAPSE_STEPS:]
    means = Series.from_history(recent, "reward/mean").trailing_mean(SHORT_WINDOW_STEPS)
    if not SHORT_WINDOW_STEPS < len(means) == len(recent):
        return None
    # A trailing mean has fewer steps only at the start of the run, where the first update may be the cause.
    first = SHORT_WINDOW_STEPS - 1 if len(recent) < len(steps) else 0
    best, now = first + int(means[first:-SHORT_WINDOW_STEPS].argmax()), means[-1]
    lost, spread = means[best] - now, finite_metric(recent[best], "reward/std") or 0.0
    if lost <= max(COLLAPSE_FRACTION * abs(means[best]), COLLAPSE_STD * spread, ROUNDING_TOLERANCE):
        return None

    def values(part: Sequence[MetricsRecord], name: str) -> np.ndarray:
        found = Series.from_history(part, name).values
        return found if len(found) else np.full(1, np.nan)

    entropy, kl, grad_norm = "policy/entropy", "policy/kl", "policy/grad_norm"
    before, last = recent[max(best + 1 - SHORT_WINDOW_STEPS, 0) : best + 1], recent[-SHORT_WINDOW_STEPS:]
    old, new = values(before, entropy).mean(), values(last, entropy).mean()
    usual, peak = np.median(values(recent[: best + 1], grad_norm)), values(recent[best:], grad_norm).max()
    distance = values(last, kl).mean()
    # A comparison with NaN, for a metric that was not recorded, is false.
    signs = (
        (f"the entropy rose from {old:.3g} to {new:.3g}", new >= ENTROPY_EXPLOSION * old > 0),
        (f"the entropy fell from {old:.3g} to {new:.3g}", new <= ENTROPY_COLLAPSE_FRACTION * old),
        (f"the KL to the initial model rose to {distance:.3g}", distance >= KL_THRESHOLD),
        (f"the gradient norm rose from {usual:.3g} to {peak:.3g}", peak >= GRAD_NORM_EXPLOSION * usual > 0),
    )
    if not any(is_seen for _, is_seen in signs):
        return None
    rate = Series.from_history(recent, "policy/learning_rate").values.max(initial=0.0)
    highest = min(rate / 3, MAX_LEARNING_RATE)
    return (
        f"The mean reward of {SHORT_WINDOW_STEPS} steps fell from {means[best]:.3g} (up to step "
        f"{recent[best]['step']}) to {now:.3g}, and {' and '.join(text for text, is_seen in signs if is_seen)}: the "
        f"updates were too large. The usual cause is optimizer.learning_rate, which reached {rate:.3g}: lower it to "
        f"between {0.3 * highest:.2g} and {highest:.2g}, and start again, or from a checkpoint before the fall."
    )


def _over_optimization(steps: StepRecords) -> str | None:
    if len(steps.evaluations) < 3:
        return None
    accuracies = [record["eval/accuracy"] for _, record in steps.evaluations]
    best = int(np.argmax(accuracies[:-2]))
    highest, least = accuracies[best], max(accuracies[-2:])
    variance = highest * (1 - highest) + least * (1 - least)
    num_prompts = finite_metric(steps.evaluations[-1][1], EVAL_PROMPTS) or 0.0
    # A plug-in's values may be outside [0, 1], and then their noise is unknown.
    if variance < 0 or num_prompts <= 0 or highest - least <= 2 * (variance / num_prompts) ** 0.5:
        return None
    ends = max(steps.evaluations[best][0], LONG_WINDOW_STEPS), steps.evaluations[-1][0]
    then, now = (
        Series.from_history(steps[max(end - LONG_WINDOW_STEPS, 0) : end], "reward/mean").values for end in ends
    )
    if not len(then) or not len(now):
        return None
    noise = (then.var() / len(then) + now.var() / len(now)) ** 0.5
    if now.mean() - then.mean() <= max(2 * noise, ROUNDING_TOLERANCE):
        return None
    first, last = (f"{format_percent(accuracies[i])} (step {steps.evaluations[i][1]['step']})" for i in (best, -1))
    return (
        f"Held-out accuracy fell from {first} to {last}, while the mean reward rose from {then.mean():.3g} to "
        f"{now.mean():.3g}: the policy exploits the reward function (reward hacking), or memorizes the training "
        "prompts. Read samples with a high reward in rollouts.html and correct the reward, add a KL penalty with "
        "algorithm.beta, or use more data. Until then, use the weights of the best evaluation."
    )


def _sampler_mismatch(steps: Sequence[MetricsRecord]) -> str | None:
    if any(finite_metric(step, "perf/rollout/staleness_max") for step in steps[-SHORT_WINDOW_STEPS:]):
        # Older policies generated some samples, as rollout.max_staleness allows.
        return None
    differences = _last_values(steps, "rollout/sampler_scorer_logprob_diff_mean", SHORT_WINDOW_STEPS)
    corrects = finite_metric(steps[-1], "policy/correction_mean") is not None
    threshold = CORRECTED_MISMATCH_THRESHOLD if corrects else MISMATCH_THRESHOLD
    if differences is None or differences.mean() < threshold:
        return None
    return (
        f"Sampler and trainer disagree by {differences.mean():.2g} nats on the average token, so updates are "
        "off-policy. Set model.dtype: float32, and null for rollout.weights and "
        "rollout.kv_cache. If that does not help, please report a bug."
    )


def _reward_errors(steps: Sequence[MetricsRecord]) -> str | None:
    names = [name for name in steps[-1] if name.startswith("reward/") and name.endswith("error_count")]
    count = max((finite_metric(steps[-1], name) or 0 for name in names), default=0)
    if not count:
        return None
    return (
        f"Reward functions failed on {count:.0f} samples of this step; reward.on_error determines how they "
        "count. Run the function on saved samples with `grpo score --role reward`."
    )


def _recompilation(steps: Sequence[MetricsRecord]) -> str | None:
    compilations = _last_values(steps, "perf/compilations", LONG_WINDOW_STEPS)
    if len(steps) < WARM_UP_STEPS + LONG_WINDOW_STEPS or compilations is None or not compilations.all():
        return None
    return (
        f"Each of the last {LONG_WINDOW_STEPS} steps compiled a program, which takes longer than running it. "
        "Shapes should repeat after the first steps, so this may be a bug: please report it with settings.yaml and "
        "metrics.jsonl."
    )


def _imitates(steps: Sequence[MetricsRecord]) -> bool:
    """Returns whether completions are given, or the KL to a teacher is in the rewards or advantages.

    The entropy then follows the completions or the teacher.
    """
    names = ("policy/teacher_kl", "policy/kl_coef")
    return "reward/mean" not in steps[-1] or all(finite_metric(steps[-1], name) is not None for name in names)


def _is_solved(steps: Sequence[MetricsRecord]) -> bool:
    recent = steps[-SHORT_WINDOW_STEPS:]
    means = [Series.from_history(recent, name).values for name in matching_metric_names(recent, "reward/", "/mean")]
    return bool(means) and all(len(values) and values.mean() >= SOLVED_REWARD for values in means)


RULES: Mapping[str, Callable[[StepRecords], str | None]] = {
    "An update was skipped: NaN or infinity": _nonfinite_update,
    "Entropy has collapsed": _entropy_collapse,
    "All rewards are the same": _constant_reward,
    "Rewards are equal within almost every group": _equal_rewards,
    "Many answers are truncated": _truncation,
    "The policy is far from the initial model": _high_kl,
    "The policy moves too far within a step": _ratio_blow_up,
    "The reward has collapsed": _reward_collapse,
    "Held-out accuracy falls while the reward rises": _over_optimization,
    "Sampler and trainer disagree": _sampler_mismatch,
    "A reward function fails": _reward_errors,
    "Every step compiles": _recompilation,
}
"""Maps the title of an alert to its rule, which returns the text of an alert about the last step, or None."""
