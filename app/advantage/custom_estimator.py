"""Advantages from the user's function, `algorithm.estimator: file.py:function`, run in processes that can be killed.

    f(rewards, lengths, ..., <columns>)            called with the samples of one prompt
    f(rewards, group_ids, lengths, ..., <columns>) called with all of this host's samples

Arguments and result are lists with one item per sample. In addition to a reward function's arguments, the function may
take `rewards` (minus a KL penalty, if any), `lengths` in completion tokens, `group_ids`, and `policy_versions`, the
versions of the policy that sampled. An item of the result is a number or a list with one number per completion token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from app.plugins.pool import WorkersLostError
from app.plugins.values import Failure
from app.records.sample import Sample
from app.reward.aggregate import OnError, RewardOutcome
from app.reward.plugin import PlugIn, StepInfo
from settings.errors import InputError

log = logging.getLogger(__name__)

SETTING = "algorithm.estimator"


class CustomEstimator:
    """Computes advantages with the user's function.

    Args:
        on_error: what happens to the samples of a failed call: `zero`, `drop` or `raise`; see `reward.on_error`.
    """

    def __init__(self, plug_in: PlugIn, *, on_error: OnError) -> None:
        self.plug_in, self._on_error = plug_in, on_error

    def __call__(self, samples: Sequence[Sample], rewards: Float[np.ndarray, "N"]) -> tuple[list[Sample], str | None]:
        """Returns the samples with the function's advantages on the tokens that the policy wrote, and an error message.

        The message is None unless a call failed and `on_error` is `raise`. Samples of a failed call have advantages of
        0 and, with `drop`, no token in the loss.
        """
        outcomes = self.compute_outcomes(samples, rewards)
        failed = [(sample.uid, one.failure) for sample, one in zip(samples, outcomes, strict=True) if one.failure]
        fatal_error, source = None, self.plug_in.source
        if failed:
            uid, failure = failed[0]
            first = f"{uid}: {failure.kind}: {failure.text}"
            fate = {"zero": "with advantages of 0", "drop": "left out"}.get(self._on_error)
            if fate is not None:
                log.warning(
                    "%s failed on %s of %s samples, %s; first %s", source, len(failed), len(samples), fate, first
                )
            else:
                way_out = "set reward.on_error to zero (advantages of 0) or drop (the samples are left out)"
                fatal_error = f"{source}: {first}. Fix the function, or {way_out}"
        return [self._with_advantages(*one) for one in zip(samples, outcomes, strict=True)], fatal_error

    def try_on(self, samples: Sequence[Sample]) -> None:
        """Calls the function on the samples of one prompt: the first has reward 1, all others 0.

        Raises:
            InputError: the call fails.
        """
        if (failure := self.compute_outcomes(samples, np.eye(1, len(samples))[0])[0].failure) is not None:
            trial = "the trial call before training failed"
            raise InputError(f"{self.plug_in.source}: {trial}: {failure.kind}: {failure.text}; fix the function")

    def compute_outcomes(self, samples: Sequence[Sample], rewards: Float[np.ndarray, "N"]) -> list[RewardOutcome]:
        """Returns, for each sample, its advantages or the failure of the call that included it."""
        rewarded = [replace(sample, reward=reward) for sample, reward in zip(samples, rewards.tolist(), strict=True)]
        try:
            return self.plug_in.compute_outcomes(rewarded, StepInfo())
        except WorkersLostError as error:
            return [RewardOutcome(failure=Failure("exit", str(error)))] * len(samples)

    def _with_advantages(self, sample: Sample, outcome: RewardOutcome) -> Sample:
        if outcome.failure is not None:
            mask = np.zeros_like(sample.mask) if self._on_error == "drop" else sample.loss_mask
            return replace(sample, advantages=np.zeros(len(sample.completion_ids), np.float32), loss_mask=mask)
        values = np.asarray(outcome.value if outcome.token_values is None else outcome.token_values, np.float32)
        return replace(sample, advantages=np.where(sample.mask, values, np.float32(0)))
