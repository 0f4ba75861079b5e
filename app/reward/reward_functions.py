"""The reward functions of a run: opened once, asked at every step, closed at the end."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Protocol

from app.records.sample import Sample
from app.reward.aggregate import NO_REWARD, OnError, Scored, is_unusable, weigh, with_unusable
from app.reward.overlong import OverlongPenalty
from app.reward.plugin import Moment, PlugIn, PlugInLostError
from app.reward.plugin_signature import Columns
from app.reward.process_pool import Limits, WorkerPool
from app.reward.reward_outcome import Failure, Outcome
from app.reward.tasks import FORMAT_SUFFIX, MATH_VERIFY, grade, is_task_reward
from settings.errors import InputError
from settings.schema.reward import MODEL_REWARD, OVERLONG, Reward, RewardFunction

FUNCTION_OF = {MATH_VERIFY: "app.reward.math_answers:math_verify"}
"""Built-in rewards that run as plug-ins do."""


class Rewarding(Protocol):
    """How samples come to their rewards: see `Rewards.score`."""

    def __call__(
        self, samples: Sequence[Sample], moment: Moment, *, of_model: Sequence[Outcome] | None = None
    ) -> Scored: ...


class Function(Protocol):
    """A reward function, built-in or not."""

    @property
    def name(self) -> str: ...
    def outcomes(self, samples: Sequence[Sample], moment: Moment) -> list[Outcome]: ...


class TaskReward:
    """A built-in function of `app.reward.tasks`. It cannot fail: `check_answers` has seen the reference answers."""

    def __init__(self, name: str) -> None:
        self.name = name

    def outcomes(self, samples: Sequence[Sample], moment: Moment) -> list[Outcome]:
        return [Outcome(grade(self.name, sample.completion, sample.prompt)) for sample in samples]


class Rewards:
    """A context that holds the functions of `reward.functions`, and their worker processes.

    Args:
        columns: what the data can give to plug-ins.
        held_out: the same of the evaluation's data, for the function that decides its accuracy; None: none is judged.
        overlong: what long completions lose in training; None: nothing.

    Raises:
        InputError: on entering, for a function that cannot be used; nothing is left running then.
    """

    def __init__(
        self,
        settings: Reward,
        columns: Columns,
        held_out: Columns | None = None,
        overlong: OverlongPenalty | None = None,
    ) -> None:
        self._settings = settings
        self._overlong = overlong
        self._columns = columns
        self._held_out = held_out
        self._functions: list[Function] = []
        self._judge: Function | None = None
        self._open = ExitStack()
        self.reports: tuple[str, ...] = ()
        """How each plug-in is called, for people."""

    def __enter__(self) -> Rewards:
        for name in self._settings.environment:
            if name not in os.environ:
                raise InputError(f"reward.environment names {name}, which is not set")
        with self._open:
            self._functions = [self._function(item) for item in self._settings.functions]
            if self._held_out is not None:
                self._judge = self._judging(self._functions[0], self._held_out)
            self._open = self._open.pop_all()
        self.reports = tuple(f.report for f in self._functions if isinstance(f, PlugIn))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that a sample's reward is made of."""
        return (*self.asked, *((OVERLONG,) if self._overlong else ()))

    @property
    def asked(self) -> tuple[str, ...]:
        """Of the functions and the reward model, which may fail or abstain."""
        model = (MODEL_REWARD,) if self._settings.model else ()
        return (*(function.name for function in self._functions), *model)

    def score(self, samples: Sequence[Sample], moment: Moment, *, of_model: Sequence[Outcome] | None = None) -> Scored:
        """The samples with `rewards` (unweighted, by name) and `reward` = sum of weight * value + overlong penalty.

        Args:
            of_model: what the reward model said of each; None where there is none.
        """
        assert (of_model is None) == (self._settings.model is None)
        weights = {function.name: function.weight for function in self._settings.functions}
        given: dict[str, Sequence[Outcome]] = {}
        if of_model is not None:
            weights[MODEL_REWARD], given[MODEL_REWARD] = self._settings.model_weight, of_model
        scored = _scored(samples, moment, self._functions, weights, self._settings.on_error, given=given)
        if self._overlong is None:
            return scored
        return replace(scored, samples=[self._overlong.added(sample) for sample in scored.samples])

    def judge(self, samples: Sequence[Sample], moment: Moment) -> Scored:
        """The samples with the one value that held-out accuracy counts, none where the function abstained.

        That is the correctness of the first function's task, or the first function itself where it is a plug-in. A
        failure counts 0 unless it is to raise, and so does a sample that could not be generated; an abstention is none,
        even where other functions would have a value.
        """
        assert self._judge is not None
        on_error = "raise" if self._settings.on_error == "raise" else "zero"
        weights = {self._judge.name: 1.0}
        judged = _scored(
            samples, moment, [self._judge], weights, on_error, when_all_abstain=None, of_unusable="counted as 0"
        )
        # A policy that breaks on hard problems is not the better for it.
        wrong = {self._judge.name: 0.0}
        return replace(judged, samples=[replace(s, rewards=wrong) if is_unusable(s) else s for s in judged.samples])

    def _judging(self, first: Function, columns: Columns) -> Function:
        return first.for_held_out(columns) if isinstance(first, PlugIn) else TaskReward(judge_of(self._settings))

    def _function(self, item: RewardFunction) -> Function:
        if is_task_reward(item.name):
            return TaskReward(item.name)
        if item.name == MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
            raise InputError(f"reward.functions: {item.name} needs an optional package; pip install 'grpo[math]'")
        settings = self._settings
        pool = WorkerPool(
            item.function or FUNCTION_OF[item.name],
            num_workers=settings.workers,
            limits=Limits(settings.timeout_s, settings.cpu_s, settings.memory_mib, settings.load_timeout_s),
            environment=settings.environment,
        )
        self._open.callback(pool.close)
        return PlugIn.load(
            item.name, pool, self._columns, batch_size=settings.batch_size, max_characters=settings.max_characters
        )


def _scored(
    samples: Sequence[Sample],
    moment: Moment,
    functions: Sequence[Function],
    weights: Mapping[str, float],
    on_error: OnError,
    *,
    given: Mapping[str, Sequence[Outcome]] = MappingProxyType({}),
    when_all_abstain: Failure | None = NO_REWARD,
    of_unusable: str = "left out",
) -> Scored:
    usable = [sample for sample in samples if not is_unusable(sample)]
    try:
        outcomes: dict[str, Sequence[Outcome]] = {
            function.name: function.outcomes(usable, moment) for function in functions
        }
    except PlugInLostError as error:
        return Scored(list(samples), {}, 0, (), str(error))
    for name, of_all in given.items():
        outcomes[name] = [one for one, sample in zip(of_all, samples, strict=True) if not is_unusable(sample)]
    weighed = weigh(usable, outcomes, weights, on_error, when_all_abstain=when_all_abstain)
    return with_unusable(weighed, samples, fate=of_unusable)


def judge_of(settings: Reward) -> str:
    """The function that decides held-out accuracy: a format reward leaves it to its task's correctness."""
    name = settings.functions[0].name
    return name.removesuffix(FORMAT_SUFFIX) if is_task_reward(name) else name
