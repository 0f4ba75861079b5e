"""Held-out accuracy, always on the same prompts: before training, during it and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.flow import Prompt, Sample
from app.policy.kv_cache import DecodeWeights
from app.reward.plugin import Moment
from app.reward.rewards import Rewards
from app.reward.tasks import is_formatted, is_task_reward
from app.reward.weighing import Scored
from app.rollout.sampling import SamplingRules
from app.training.all_hosts import host_run, longest_run
from app.training.interrupts import stopped_together
from app.training.metrics import mean_where_known, over_hosts
from app.training.session import Session
from settings import Settings
from settings.errors import InputError
from settings.fields import did_you_mean, nearest_of


def evaluation_batch(settings: Settings, num_prompts: int) -> int:
    """How many of a host's prompts are generated from at once: no more rows than in a rollout."""
    return min(num_prompts, settings.rollout.prompts_per_step * settings.rollout.group_size)


def evaluate(
    session: Session, weights: DecodeWeights, prompts: Sequence[Prompt], rewards: Rewards, moment: Moment
) -> Scored:
    """One sample at `eval.temperature` of each prompt of this host's run of them, judged.

    Raises:
        StoppedError: generation was stopped, on this host or another.
    """
    settings = session.settings
    own, longest = host_run(len(prompts)), longest_run(len(prompts))
    batch = evaluation_batch(settings, longest) if session.evaluates_in_batches else longest
    samples: list[Sample] = []
    with stopped_together():
        for first in range(own.start, own.start + longest, batch):
            # Filled up with other prompts, which do not count, so that all batches of all hosts have one shape.
            part = [prompts[i % len(prompts)] for i in range(first, first + batch)]
            samples += session.generate(
                weights,
                part,
                group_size=1,
                rules=SamplingRules(settings.eval.temperature),
                policy_version=0,
                first_group_id=first,
            )
    return rewards.judge(samples[: len(own)], moment)


FORMAT_RATE = "eval/format_rate"
MEASURED = (
    "eval/accuracy",
    FORMAT_RATE,
    "eval/truncated_fraction",
    "eval/mean_length",
    "eval/error_count",
)
"""What every evaluation measures; the format only where a built-in task judges."""


def accuracy_at(difficulty: float) -> str:
    """The name of the accuracy on problems of one difficulty."""
    return f"eval/accuracy/difficulty_{difficulty:g}"


def check_best_metric(name: str, prompts: Sequence[Prompt], *, judge: str) -> None:
    """Raises InputError where evaluations on these prompts do not measure what is to choose the best checkpoint."""
    difficulties = {prompt.extra["difficulty"] for prompt in prompts if "difficulty" in prompt.extra}
    measured = [*MEASURED, *map(accuracy_at, sorted(difficulties))]
    if not is_task_reward(judge):
        measured.remove(FORMAT_RATE)
    if name not in measured:
        reason = f" where {judge} judges" if name == FORMAT_RATE else did_you_mean(nearest_of(name, measured))
        raise InputError(
            f"checkpoint.best_metric: evaluations do not measure {name!r}{reason} (they measure "
            f"{', '.join(measured)}; null keeps no best checkpoint)"
        )


def evaluation_metrics(scored: Scored) -> dict[str, Any]:
    """Accuracy, format and truncation rates and mean length; accuracy by difficulty where the data names one.

    Accuracy is over the samples that the judge gave a value, None where there is no such sample. The format rate is
    None where a plug-in judges: only built-in tasks know what an answer should look like.
    """
    samples, (judge,) = scored.samples, scored.tallies
    correct = over_hosts([(s.rewards or {}).get(judge, np.nan) for s in samples])
    metrics: dict[str, Any] = {
        "eval/accuracy": mean_where_known(correct),
        FORMAT_RATE: (
            over_hosts([is_formatted(judge, s.completion) for s in samples]).mean() if is_task_reward(judge) else None
        ),
        "eval/truncated_fraction": over_hosts([s.finish_reason == "length" for s in samples]).mean(),
        "eval/mean_length": over_hosts([len(s.completion_ids) for s in samples]).mean(),
        "eval/error_count": over_hosts([scored.num_errors]).sum(),
    }
    difficulties = over_hosts([s.prompt.extra.get("difficulty", np.nan) for s in samples])
    for level in np.unique(difficulties[~np.isnan(difficulties)]):
        metrics[accuracy_at(level)] = mean_where_known(correct[difficulties == level])
    return {name: None if value is None or np.isnan(value) else float(value) for name, value in metrics.items()}
