"""Held-out accuracy, always on the same prompts: before training, during it and after."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from app.flow import Prompt, Sample
from app.policy.kv_cache import DecodeWeights
from app.reward.weighing import FORMAT_SUFFIX, is_formatted, score_rewards
from app.rollout.sampling import SamplingRules
from app.training.metrics import over_hosts
from app.training.session import Session
from settings import Settings
from settings.errors import InputError
from settings.fields import did_you_mean, nearest_of


def host_share(prompts: Sequence[Prompt]) -> list[Prompt]:
    """This host's part of the evaluation prompts; every host gets equally many, at least one."""
    per_host = max(len(prompts) // jax.process_count(), 1)
    first = per_host * jax.process_index() % len(prompts)
    return list(prompts[first : first + per_host])


def evaluated_task(settings: Settings) -> str:
    """What `eval/accuracy` counts: the correctness function of the first reward's task."""
    return settings.reward.functions[0].name.removesuffix(FORMAT_SUFFIX)


def evaluation_batch(settings: Settings, prompts: Sequence[Prompt]) -> int:
    """How many of this host's prompts are generated from at once: no more rows than in a rollout."""
    return min(len(prompts), settings.rollout.prompts_per_step * settings.rollout.group_size)


def evaluate(
    session: Session, weights: DecodeWeights, prompts: Sequence[Prompt]
) -> tuple[dict[str, float], list[Sample]]:
    """One sample per prompt at `eval.temperature`. Returns metrics under `eval/` and the graded samples."""
    settings = session.settings
    task = evaluated_task(settings)
    batch = evaluation_batch(settings, prompts)
    samples: list[Sample] = []
    for first in range(0, len(prompts), batch):
        # The last batch is filled up with repeats, so that every batch has the shape of the first.
        part = [prompts[i % len(prompts)] for i in range(first, first + batch)]
        samples += session.engine.generate(
            weights,
            part,
            group_size=1,
            max_new_tokens=settings.rollout.max_new_tokens,
            rules=SamplingRules(settings.eval.temperature),
            seed=settings.run.seed,
            policy_version=0,
            first_group_id=first,
        )
    samples = score_rewards(samples[: len(prompts)], [(task, 1.0)])
    return evaluation_metrics(samples, task), samples


MEASURED = ("eval/accuracy", "eval/format_rate", "eval/truncated_fraction", "eval/mean_length")
"""What every evaluation measures."""


def accuracy_at(difficulty: float) -> str:
    """The name of the accuracy on problems of one difficulty."""
    return f"eval/accuracy/difficulty_{difficulty:g}"


def check_best_metric(name: str, prompts: Sequence[Prompt]) -> None:
    """Raises InputError where evaluations on these prompts do not measure what is to choose the best checkpoint."""
    difficulties = {prompt.extra["difficulty"] for prompt in prompts if "difficulty" in prompt.extra}
    measured = [*MEASURED, *map(accuracy_at, sorted(difficulties))]
    if name not in measured:
        suggestion = did_you_mean(nearest_of(name, measured))
        raise InputError(
            f"checkpoint.best_metric: evaluations do not measure {name!r}{suggestion} (they measure "
            f"{', '.join(measured)}; null keeps no best checkpoint)"
        )


def evaluation_metrics(samples: Sequence[Sample], task: str) -> dict[str, float]:
    """Accuracy, format and truncation rates and mean length; accuracy by difficulty where the data names one."""
    correct = over_hosts([s.reward or 0.0 for s in samples])
    metrics = {
        "eval/accuracy": correct.mean(),
        "eval/format_rate": over_hosts([is_formatted(task, s.completion) for s in samples]).mean(),
        "eval/truncated_fraction": over_hosts([s.finish_reason == "length" for s in samples]).mean(),
        "eval/mean_length": over_hosts([len(s.completion_ids) for s in samples]).mean(),
    }
    difficulties = over_hosts([s.prompt.extra.get("difficulty", np.nan) for s in samples])
    for level in np.unique(difficulties[~np.isnan(difficulties)]):
        metrics[accuracy_at(level)] = correct[difficulties == level].mean()
    return {name: float(value) for name, value in metrics.items()}
