"""The reward functions of a run, with their worker processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from app.plugins.pool import WorkersLostError
from app.plugins.values import Failure
from app.plugins.worker_process import allow_variables
from app.records.sample import Episode, Sample
from app.reward.aggregate import (
    ALL_ABSTAINED,
    ERRORS_FIELD,
    NO_REWARD_FINISH_REASON,
    OnError,
    RewardedSamples,
    RewardFunctionCounts,
    RewardOutcome,
    aggregate_rewards,
    restore_dropped,
    was_dropped_in_rollout,
)
from app.reward.builtin_tasks import FORMAT_SUFFIX, MATH_VERIFY, grade, is_task_reward
from app.reward.function_pool import open_pool
from app.reward.plugin import PlugIn, StepInfo, UnassignableRewardsError
from app.reward.plugin_signature import DataColumns
from settings.errors import InputError
from settings.schema.reward import (
    ENVIRONMENT_REWARD,
    MODEL_REWARD,
    OVERLONG_REWARD,
    PluginSettings,
    RewardFunctionSettings,
    RewardSettings,
)

BUILT_IN_PLUG_INS = {MATH_VERIFY: "app.reward.math_answers:math_verify"}
"""Maps each built-in reward that runs as a plug-in to its function."""


ComputeRewards = Callable[..., RewardedSamples]
"""The type of `RewardFunctions.compute_rewards`, and of `reuse_saved_rewards` after binding `names`."""


class TaskReward:
    """A function of `app.reward.builtin_tasks`. It cannot fail, because `check_answers` has verified the answers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gets_answer = not name.endswith(FORMAT_SUFFIX)

    def compute_outcomes(self, samples: Sequence[Sample], step_info: StepInfo) -> list[RewardOutcome]:
        return [RewardOutcome(grade(self.name, sample.completion, sample.prompt)) for sample in samples]


class EnvironmentReward:
    """The environment's rewards for all turns of a sample, and its scores; see `Episode.reward`.

    Args:
        rewards_turns: whether each reward counts at the end of its turn, rather than all at the end of the sample.
    """

    name = ENVIRONMENT_REWARD

    def __init__(self, *, weight: float, rewards_turns: bool) -> None:
        self.weight = weight
        self.rewards_turns = rewards_turns

    def compute_outcomes(self, samples: Sequence[Sample], step_info: StepInfo) -> list[RewardOutcome]:
        return [RewardOutcome(_episode(sample).reward) for sample in samples]

    def set_token_rewards(self, sample: Sample) -> Sample:
        """Returns the sample with `token_rewards`; unchanged if it has no reward or no token in the loss.

        The reward of a turn is on the policy's last token in the turn; the rest of `Sample.reward` is on the policy's
        last token in the sample.
        """
        places = sample.turn_places
        if sample.reward is None or not len(places):
            return sample
        of_turns = [self.weight * turn.reward for turn in _episode(sample).turns]
        token_rewards = np.zeros(len(sample.completion_ids))
        np.add.at(token_rewards, places, of_turns)
        token_rewards[places[-1]] += sample.reward - sum(of_turns)
        return replace(sample, token_rewards=token_rewards.astype(np.float32))


RewardFunc = TaskReward | EnvironmentReward | PlugIn


def _episode(sample: Sample) -> Episode:
    assert sample.episode is not None, f"{sample.uid} has no episode"
    return sample.episode


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """A reward that is 0 up to `max_length - buffer` tokens, and falls linearly to `-max_penalty` at `max_length`.

    Source: Yu et al. 2025 (DAPO), eq. 13, with max_penalty = 1.
    """

    max_length: int
    """Value of `rollout.max_new_tokens`."""
    buffer: int
    """Number of tokens over which the reward falls."""
    max_penalty: float

    def penalty_for(self, num_tokens: int) -> float:
        beyond = min(max(num_tokens - (self.max_length - self.buffer), 0), self.buffer)
        return 0.0 - self.max_penalty * beyond / self.buffer

    def apply(self, sample: Sample) -> Sample:
        """Returns the sample with the penalty added to its rewards; unchanged if it has no reward."""
        if sample.reward is None:
            return sample
        penalty = self.penalty_for(len(sample.completion_ids))
        return replace(
            sample, rewards={**(sample.rewards or {}), OVERLONG_REWARD: penalty}, reward=sample.reward + penalty
        )


class RewardFunctions:
    """Context manager that runs the worker processes of `reward.functions`, and computes all rewards of samples.

    Args:
        columns: columns of the training data available to plug-ins.
        held_out_columns: columns of the evaluation data; None if no held-out samples are graded.
        overlong: length penalty in training; None for no penalty.
        environment: the reward of the environment; None without `env.source`.

    Raises:
        InputError: on entry, if a function cannot be used; no worker process is left running.
    """

    def __init__(
        self,
        settings: RewardSettings,
        plugins: PluginSettings,
        columns: DataColumns,
        held_out_columns: DataColumns | None = None,
        overlong: OverlongPenalty | None = None,
        environment: EnvironmentReward | None = None,
    ) -> None:
        self._settings = settings
        self._plugins = plugins
        self._overlong = overlong
        self._environment = environment
        self._columns = columns
        self._held_out_columns = held_out_columns
        self._functions: list[TaskReward | PlugIn] = []
        self._held_out_function: RewardFunc | None = None
        self._exit_stack = ExitStack()
        self.plug_in_summaries: tuple[str, ...] = ()
        """One line per plug-in that describes how it is called."""

    def __enter__(self) -> RewardFunctions:
        allow_variables(self._plugins.env_vars)
        with self._exit_stack:
            self._functions = [self._make_function(item) for item in self._settings.functions]
            if self._held_out_columns is not None:
                judge = self._functions[0] if self._functions else self._environment
                if isinstance(judge, PlugIn):
                    judge = judge.for_held_out(self._held_out_columns)
                elif isinstance(judge, TaskReward):
                    judge = TaskReward(accuracy_function_name(self._settings))
                self._held_out_function = judge
            self._exit_stack = self._exit_stack.pop_all()
        self.plug_in_summaries = tuple(f"reward {f.summary}" for f in self._functions if isinstance(f, PlugIn))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of all parts of a sample's reward."""
        return (*self.fallible_names, *((OVERLONG_REWARD,) if self._overlong else ()))

    @property
    def fallible_names(self) -> tuple[str, ...]:
        """Names of all parts except the length penalty; most of them can fail or abstain."""
        model = (MODEL_REWARD,) if self._settings.model else ()
        environment = (ENVIRONMENT_REWARD,) if self._environment else ()
        return (*(function.name for function in self._functions), *environment, *model)

    def compute_rewards(
        self, samples: Sequence[Sample], step_info: StepInfo, *, model_outcomes: Sequence[RewardOutcome] | None = None
    ) -> RewardedSamples:
        """Returns samples with unweighted `rewards`, and with `reward` = sum of weight * value + length penalty.

        If turns are rewarded, they also have `token_rewards`.

        Args:
            model_outcomes: the reward model's outcome of each sample; None without a reward model.
        """
        assert (model_outcomes is None) == (self._settings.model is None)
        weights = {function.name: function.weight for function in self._settings.functions}
        functions, outcomes = self._functions, dict[str, Sequence[RewardOutcome]]()
        if self._environment is not None:
            functions, weights[ENVIRONMENT_REWARD] = [*functions, self._environment], self._environment.weight
        if model_outcomes is not None:
            weights[MODEL_REWARD], outcomes[MODEL_REWARD] = self._settings.model_weight, model_outcomes
        # A teacher needs no reward.
        when_all_abstain = ALL_ABSTAINED if weights else None
        given = {"extra_outcomes": outcomes, "when_all_abstain": when_all_abstain}
        scored = _compute_rewards(samples, step_info, functions, weights, self._settings.on_error, **given)
        if self._overlong is not None:
            scored = replace(scored, samples=[self._overlong.apply(sample) for sample in scored.samples])
        if self._environment is not None and self._environment.rewards_turns:
            scored = replace(scored, samples=[self._environment.set_token_rewards(s) for s in scored.samples])
        return scored

    @property
    def names_of_judges(self) -> tuple[str, ...]:
        """Names of the functions that take the reference answer."""
        return tuple(function.name for function in self._functions if function.gets_answer)

    def try_functions(self, samples: Sequence[Sample]) -> RewardedSamples:
        """Calls every function on several samples of a prompt, to check that it returns one value per sample.

        The reward model and the environment are left out.
        """
        weights = {function.name: function.weight for function in self._settings.functions}
        on_error = self._settings.on_error
        return _compute_rewards(samples, StepInfo(), self._functions, weights, on_error, when_all_abstain=None)

    def grade_held_out(self, samples: Sequence[Sample], step_info: StepInfo) -> RewardedSamples:
        """Returns held-out samples with accuracy as their only reward; without reward if the function abstained.

        Accuracy is the value of the first function or, if that is a format reward, of the correctness function of its
        task; without functions it is the environment's reward. A failure counts as 0 unless `reward.on_error` is
        `raise`; a sample that could not be generated also counts as 0.
        """
        assert self._held_out_function is not None
        on_error = "raise" if self._settings.on_error == "raise" else "zero"
        weights = {self._held_out_function.name: 1.0}
        judges = [self._held_out_function]
        judged = _compute_rewards(
            samples, step_info, judges, weights, on_error, when_all_abstain=None, unusable_fate="counted as 0"
        )
        # Otherwise, a policy would gain accuracy by failing on hard problems.
        wrong = {self._held_out_function.name: 0.0}
        return replace(
            judged, samples=[replace(s, rewards=wrong) if was_dropped_in_rollout(s) else s for s in judged.samples]
        )

    def _make_function(self, item: RewardFunctionSettings) -> TaskReward | PlugIn:
        if is_task_reward(item.name):
            return TaskReward(item.name)
        if item.name == MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
            raise InputError(
                f"reward.functions: {item.name} needs the package math-verify; run pip install -e '.[math]'"
            )
        function = item.function or BUILT_IN_PLUG_INS[item.name]
        pool = open_pool(function, self._plugins, self._exit_stack, name=item.name)
        return PlugIn(item.name, pool, self._columns, batch_size=self._settings.batch_size)


def _compute_rewards(
    samples: Sequence[Sample],
    step_info: StepInfo,
    functions: Sequence[RewardFunc],
    weights: Mapping[str, float],
    on_error: OnError,
    *,
    extra_outcomes: Mapping[str, Sequence[RewardOutcome]] = MappingProxyType({}),
    when_all_abstain: Failure | None = ALL_ABSTAINED,
    unusable_fate: str = "left out",
) -> RewardedSamples:
    usable = [sample for sample in samples if not was_dropped_in_rollout(sample)]
    try:
        outcomes: dict[str, Sequence[RewardOutcome]] = {
            function.name: function.compute_outcomes(usable, step_info) for function in functions
        }
    except (WorkersLostError, UnassignableRewardsError) as error:
        return RewardedSamples(list(samples), {}, 0, (), str(error))
    for name, all_outcomes in extra_outcomes.items():
        outcomes[name] = [
            one for one, sample in zip(all_outcomes, samples, strict=True) if not was_dropped_in_rollout(sample)
        ]
    weighed = aggregate_rewards(usable, outcomes, weights, on_error, when_all_abstain=when_all_abstain)
    return restore_dropped(weighed, samples, fate=unusable_fate)


def accuracy_function_name(settings: RewardSettings) -> str:
    """Returns the name of the function that determines held-out accuracy.

    This is the first function or, if that is a format reward, the correctness function of its task. Without functions,
    it is the environment's reward.
    """
    if not settings.functions:
        return ENVIRONMENT_REWARD
    name = settings.functions[0].name
    return name.removesuffix(FORMAT_SUFFIX) if is_task_reward(name) else name


def has_saved_reward(sample: Sample) -> bool:
    """Returns whether a sample has a saved reward, or was dropped and therefore has none."""
    return (
        sample.reward is not None or was_dropped_in_rollout(sample) or sample.finish_reason == NO_REWARD_FINISH_REASON
    )


def reuse_saved_rewards(
    samples: Sequence[Sample],
    step_info: StepInfo,
    *,
    model_outcomes: Sequence[RewardOutcome] | None = None,
    names: Sequence[str],
) -> RewardedSamples:
    """Returns the samples unchanged, with counts of errors and abstentions restored from their records.

    Additional metrics of plug-ins are not restored, because samples do not store them.

    Args:
        names: names of the reward functions and of the reward model.
    """
    del step_info, model_outcomes
    usable = [sample for sample in samples if not was_dropped_in_rollout(sample)]
    recorded = [sample.extra.get(ERRORS_FIELD) for sample in usable]
    errors = [[x for x in lines if isinstance(x, str)] if isinstance(lines, list) else [] for lines in recorded]
    nothing = f"{ALL_ABSTAINED.kind}: {ALL_ABSTAINED.text}"
    counts = {}
    for name in names:
        failed = [any(line.startswith(f"{name}: ") for line in lines) for lines in errors]
        num_abstained = sum(name not in (s.rewards or {}) and not f for s, f in zip(usable, failed, strict=True))
        counts[name] = RewardFunctionCounts(num_errors=sum(failed), num_abstained=num_abstained, extras={})
    num_without = sum(nothing in lines for lines in errors)
    return RewardedSamples(list(samples), counts, num_without, notices=(), fatal_error=None)
