"""Supervised fine-tuning on given completions (`algorithm.name: sft`): take -> update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.checkpoint.train_progress import RunState
from app.model.decoder import Params
from app.records.sample import Sample
from app.tracking.timer import StepTimer
from app.training.rollout_source import RolloutSource, RoundPrompts
from app.training.trainer import Metrics, Trainer
from settings import Settings


class GivenCompletions(RolloutSource):
    """Takes each step's samples from the data, in the usual order of prompts, without generating."""

    def __init__(self, settings: Settings, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self._prompts = RoundPrompts(settings, [sample.prompt for sample in samples])
        self.num_prompts = len(samples)

    def take(self, params: Params, *, step: int, position: int, number: int) -> list[Sample]:
        first = self._prompts.first_group_id(number)
        rows = self._prompts.rows_at(position)
        # A row that occurs twice in a step makes two groups.
        return [replace(self._samples[row], group_id=first + i) for i, row in enumerate(rows.tolist())]


class SupervisedTrainer(Trainer):
    """The stages of a supervised step, without rewards and advantages."""

    def step(
        self, state: RunState, *, step: int, position: int, timer: StepTimer
    ) -> tuple[RunState, list[Sample], Metrics]:
        samples = self.source.take(state.policy.params, step=step, position=position, number=0)
        mini_batches = self.learners.mini_batch_sampler(samples, step)
        with timer.phase("update"):
            state, updated = self.learners.update(state, samples, mini_batches, step=step, kl_coef=state.kl_coef)
        return state, samples, {**updated, **self.work_metrics(samples, samples, (), step=step)}
