"""Makes samples and opens reward functions for tests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from app.records.sample import Messages, Prompt, Sample
from app.reward.aggregate import RewardedSamples
from app.reward.function_pool import register_callables
from app.reward.plugin import StepInfo
from app.reward.plugin_signature import DataColumns
from app.reward.reward_functions import RewardFunctions
from settings.schema.reward import PluginSettings, RewardSettings
from tests import tiny


def make_prompt(answer: Any = "18", uid: str = "q/0", source: str | Messages = "?", **extra: Any) -> Prompt:
    return Prompt(uid=uid, token_ids=np.array([1], np.int32), source=source, answer=answer, extra=extra)


def make_sample(completion: str, prompt: Prompt | None = None, *, index: int = 0, group: int = 0) -> Sample:
    ids = np.arange(max(len(completion), 1))
    sample = tiny.make_sample(ids, group_id=group, sample_index=index)
    return replace(sample, prompt=prompt or make_prompt(uid=f"q/{group}"), completion=completion, finish_reason="stop")


def make_group(*completions: str, group: int = 0) -> list[Sample]:
    return [make_sample(text, index=index, group=group) for index, text in enumerate(completions)]


def columns_of(samples: Sequence[Sample]) -> DataColumns:
    return DataColumns.from_rows([sample.prompt for sample in samples], source="test.jsonl")


@contextmanager
def opened(
    functions: Sequence[str | Mapping[str, Any]], samples: Sequence[Sample], **settings: Any
) -> Iterator[RewardFunctions]:
    """Opens reward functions with `on_error: zero`, two workers and a time-out of 1 s, unless `settings` differ."""
    given = {"on_error": "zero", "timeout_s": 1.0, "workers": 2, "functions": functions, **settings}
    plugins = {name: given.pop(name) for name in PluginSettings.model_fields if name in given}
    with RewardFunctions(
        RewardSettings.model_validate(given), PluginSettings.model_validate(plugins), columns_of(samples)
    ) as rewards:
        yield rewards


def score(functions: Sequence[str | Mapping[str, Any]], samples: Sequence[Sample], **settings: Any) -> RewardedSamples:
    with opened(functions, samples, **settings) as rewards:
        return rewards.compute_rewards(samples, StepInfo(step=3, num_steps=10))


def score_by(function: Callable[..., Any], samples: Sequence[Sample], **settings: Any) -> RewardedSamples:
    """Scores by a function of this process, without workers."""
    with register_callables({"f": function}):
        return score([{"name": "f", "function": "callable:f"}], samples, **settings)


def values_of(scored: RewardedSamples) -> list[float | None]:
    return [sample.reward for sample in scored.samples]


def kinds_of(scored: RewardedSamples) -> list[str | None]:
    errors = [sample.extra.get("reward_errors") for sample in scored.samples]
    return [found[0].split(": ")[1] if found else None for found in errors]


def write_plug_in(folder: Path, text: str, name: str = "plug.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)
