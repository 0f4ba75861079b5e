"""Advantages from the user's function, `algorithm.estimator: file.py:function`, run in processes that can be killed.

    f(rewards, lengths, ..., <columns>)            called with the samples of one prompt
    f(rewards, group_ids, lengths, ..., <columns>) called with all of this host's samples

Arguments and result are lists with one item per sample. An item of the result is a number or a list with one number
per completion token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from app.plugins.loading import LoadError
from app.plugins.pool import WorkersLostError
from app.plugins.values import Failure
from app.records.sample import Sample
from app.reward.aggregate import RewardOutcome
from app.reward.function_pool import FunctionPool, InProcessPool
from app.reward.plugin import group_indices
from app.reward.plugin_signature import DataColumns, Parameter, PlugInSignature, build_arguments, read_signature
from settings.errors import InputError

SETTING = "algorithm.estimator"
ARGUMENTS = ("rewards", "lengths", "group_ids", "policy_versions")
"""Arguments that only this function gets, besides those of reward functions: rewards (minus a KL penalty, if any),
lengths in completion tokens, group ids, and versions of the policy that sampled."""


class CustomEstimator:
    """The user's function and its pool of workers, which the pool's creator must close.

    Args:
        columns: columns of the data that the function may take as parameters.
        drops_failures: whether the samples of a failed call are left out of the loss.

    Raises:
        InputError: the function cannot be imported, or has a required parameter that cannot be filled.
    """

    def __init__(self, pool: FunctionPool | InProcessPool, columns: DataColumns, *, drops_failures: bool) -> None:
        self.function, self._pool, self._columns, self._drops_failures = pool.function, pool, columns, drops_failures
        try:
            parameters = [Parameter(*parameter) for parameter in pool.load()["parameters"]]
            signature = read_signature(parameters, columns, estimator_arguments=ARGUMENTS)
        except LoadError as problem:
            raise InputError(f"{SETTING}: {pool.function}: {problem}") from problem
        self._takes_batch = "group_ids" in signature.arguments
        self._given = [name for name in signature.arguments if name in ARGUMENTS]
        others = tuple(name for name in signature.arguments if name not in ARGUMENTS)
        self._signature = PlugInSignature("batch", others)

    def __call__(
        self, samples: Sequence[Sample], rewards: Float[np.ndarray, "N"]
    ) -> tuple[list[Sample], list[tuple[str, Failure]]]:
        """Returns the samples with the function's advantages on the tokens that the policy wrote, and failures by uid.

        Samples of a failed call have advantages of 0 and, with `drops_failures`, no token in the loss.
        """
        outcomes = list(zip(samples, self._outcomes(samples, rewards), strict=True))
        failures = [(sample.uid, outcome.failure) for sample, outcome in outcomes if outcome.failure]
        return [self._with_advantages(*one) for one in outcomes], failures

    @property
    def summary(self) -> str:
        """A clause that says for which samples and with which arguments the function is called."""
        unit = "all samples of this host" if self._takes_batch else "the samples of a prompt"
        return f"called with {unit}: {', '.join((*self._given, *self._signature.arguments))}"

    def try_on(self, samples: Sequence[Sample]) -> None:
        """Calls the function on the samples of one prompt: the first has reward 1, all others 0.

        Raises:
            InputError: the call fails.
        """
        rewards = np.eye(1, len(samples))[0]
        failure = self._outcomes(samples, rewards)[0].failure
        if failure is not None:
            raise InputError(
                f"{SETTING}: {self.function}: the trial call before the run failed: {failure.kind}: {failure.text}"
            )

    def _outcomes(self, samples: Sequence[Sample], rewards: Float[np.ndarray, "N"]) -> list[RewardOutcome]:
        if not samples:
            return []
        every = range(len(samples))
        calls = [tuple(every)] if self._takes_batch else list(group_indices(every, samples))
        requests = [self._request([samples[i] for i in call], rewards[list(call)]) for call in calls]
        try:
            results = self._pool.run(requests)
        except WorkersLostError as error:
            results = [Failure("exit", str(error))] * len(calls)
        outcomes: dict[int, RewardOutcome] = {}
        for call, result in zip(calls, results, strict=True):
            of_call = [RewardOutcome(failure=result)] * len(call) if isinstance(result, Failure) else result
            outcomes |= zip(call, of_call, strict=True)
        return [outcomes[i] for i in every]

    def _request(self, samples: Sequence[Sample], rewards: Float[np.ndarray, "N"]) -> dict[str, object]:
        lengths = [len(sample.completion_ids) for sample in samples]
        values = {
            "rewards": rewards.tolist(),
            "lengths": lengths,
            "group_ids": [sample.group_id for sample in samples],
            "policy_versions": [sample.policy_version for sample in samples],
        }
        arguments = build_arguments(self._signature, samples, self._columns)
        return {
            "arguments": arguments | {name: values[name] for name in self._given},
            "is_batch": True,
            "num_samples": len(samples),
            "token_counts": lengths,
            "trainer_arguments": [],
            "trainer_state": {},
        }

    def _with_advantages(self, sample: Sample, outcome: RewardOutcome) -> Sample:
        advantages = np.zeros(len(sample.completion_ids), np.float32)
        if outcome.failure is not None:
            mask = np.zeros(len(advantages), bool) if self._drops_failures else sample.loss_mask
            return replace(sample, advantages=advantages, loss_mask=mask)
        advantages[:] = outcome.value if outcome.token_values is None else outcome.token_values
        return replace(sample, advantages=np.where(sample.mask, advantages, np.float32(0)))
