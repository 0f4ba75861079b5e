"""Plug-ins: user-supplied reward functions and advantage estimators, whose failures affect only their own samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.plugins.loading import LoadError
from app.plugins.values import Failure
from app.records.sample import Sample, group_indices
from app.reward.aggregate import RewardOutcome
from app.reward.function_pool import FunctionPool, InProcessPool
from app.reward.plugin_signature import (
    DataColumns,
    Parameter,
    build_arguments,
    read_signature,
)
from settings.errors import InputError


class UnassignableRewardsError(Exception):
    """A plug-in returned values that cannot be assigned to samples."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The progress of training, passed to plug-ins as `trainer_state`."""

    step: int = 0
    num_steps: int = 0


class PlugIn:
    """A user-supplied function and its pool of workers. The creator of the pool must close it.

    Args:
        columns: columns of the data that the function may take as parameters.
        batch_size: maximum number of samples per batch-style call; a group is never split.
        is_estimator: whether the function computes advantages, from `Sample.reward` and other fields.

    Raises:
        InputError: the function cannot be imported, or has a required parameter that the data cannot fill.
    """

    def __init__(
        self,
        name: str,
        pool: FunctionPool | InProcessPool,
        columns: DataColumns,
        *,
        batch_size: int,
        is_estimator: bool = False,
    ) -> None:
        self.name = name
        self.source = f"{pool.setting}: {pool.function}"
        """The setting that names the function, and its value."""
        self._pool = pool
        self._columns = columns
        self._batch_size = batch_size
        try:
            answer = pool.load()
            self._unlimited = answer["unlimited"]
            """Names of the resources that this system cannot limit."""
            self._parameters = [Parameter(*parameter) for parameter in answer["parameters"]]
            self._signature = read_signature(self._parameters, columns, is_estimator=is_estimator)
        except LoadError as problem:
            raise InputError(f"{self.source}: {problem}") from problem

    @property
    def summary(self) -> str:
        """One-line description of how the function is called."""
        unlimited = f"; this system cannot limit {', '.join(self._unlimited)}" if self._unlimited else ""
        return f"{self.name}: {self._pool.function}, {self._signature.to_text()}{unlimited}"

    @property
    def gets_answer(self) -> bool:
        """Whether the function has a parameter for the reference answer."""
        return any(parameter.name in self._columns.answers for parameter in self._parameters)

    def for_held_out(self, columns: DataColumns) -> PlugIn:
        """Returns a copy of this plug-in that grades evaluation data with these columns; both share the workers.

        Raises:
            InputError: a column required by the function is missing.
        """
        held_out = copy.copy(self)
        held_out._columns = columns
        try:
            held_out._signature = read_signature(self._parameters, columns)
        except LoadError as problem:
            raise InputError(
                f"data.eval_source: {self._pool.function} also grades held-out samples, but it {problem}"
            ) from None
        return held_out

    def compute_outcomes(self, samples: Sequence[Sample], step_info: StepInfo) -> list[RewardOutcome]:
        """Returns one outcome per sample, in order.

        A batch of rewards that fails is retried group by group, and then sample by sample.

        Raises:
            WorkersLostError: a worker died, and two attempts to start a new one failed.
            UnassignableRewardsError: the function returned a list of the wrong length.
        """
        outcomes: list[RewardOutcome | None] = [None] * len(samples)
        batches = list(self._batches(samples))
        while batches:
            batches = self._call(batches, samples, step_info, outcomes)
        return [outcome for outcome in outcomes if outcome is not None]

    def _batches(self, samples: Sequence[Sample]) -> Iterator[tuple[int, ...]]:
        """Yields the sample indices of each call: whole groups in batch style, else a single sample."""
        if not self._signature.is_batch:
            yield from ((index,) for index in range(len(samples)))
            return
        batch: tuple[int, ...] = ()
        for group in group_indices(samples):
            if batch and len(batch) + len(group) > self._batch_size and not self._signature.takes_all:
                yield batch
                batch = ()
            batch += group
        if batch:
            yield batch

    def _call(
        self,
        batches: Sequence[tuple[int, ...]],
        samples: Sequence[Sample],
        step_info: StepInfo,
        outcomes: list[RewardOutcome | None],
    ) -> list[tuple[int, ...]]:
        """Calls the function on each batch and stores the outcomes; returns the parts of failed batches to retry."""
        requests = [self._request([samples[i] for i in batch], step_info) for batch in batches]
        answers = self._pool.run(requests)
        parts: list[tuple[int, ...]] = []
        for batch, answer in zip(batches, answers, strict=True):
            # A part of a batch would get other advantages than the whole.
            to_retry = answer if isinstance(answer, Failure) and self._signature.style != "estimator" else None
            if to_retry is not None and to_retry.kind == "length":
                # An error in the function that smaller batches would not fix.
                raise UnassignableRewardsError(f"{self.source} {to_retry.text}; fix the function")
            if to_retry is not None and len(batch) > 1:
                groups = group_indices([samples[i] for i in batch])
                groups = groups if len(groups) > 1 else [(place,) for place in range(len(batch))]
                parts += [tuple(batch[place] for place in group) for group in groups]
                continue
            results = [RewardOutcome(failure=answer)] * len(batch) if isinstance(answer, Failure) else answer
            for index, outcome in zip(batch, results, strict=True):
                outcomes[index] = outcome
        return parts

    def _request(self, samples: Sequence[Sample], step_info: StepInfo) -> dict[str, Any]:
        signature = self._signature
        arguments = build_arguments(signature, samples, self._columns)
        is_estimator = signature.style == "estimator"
        return {
            "arguments": arguments,
            "is_batch": signature.is_batch,
            "num_samples": len(samples),
            "token_counts": [len(sample.completion_ids) for sample in samples] if is_estimator else None,
            "trainer_arguments": [name for name in signature.arguments if name not in arguments],
            "trainer_state": {"global_step": step_info.step, "max_steps": step_info.num_steps},
        }
