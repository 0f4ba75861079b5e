"""Checks that stop a run: rewards that fail in a trial or later, and divergence."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from app.distributed.collectives import max_over_hosts, sum_over_hosts
from app.prompts.tokenizer import Tokenizer
from app.records.sample import Prompt, Sample
from app.reward.aggregate import RewardedSamples
from app.reward.reward_functions import RewardFunctions
from app.rollout.sampling.token_sampling import FINISH_NON_FINITE
from settings.errors import InputError

log = logging.getLogger(__name__)
MAX_NONFINITE_STEPS = 3
"""Consecutive optimizer steps with a NaN or infinite gradient after which a run ends: one or two may be an outlier."""
NUM_WRONG_ANSWERS = 3
"""Maximum number of wrong answers; several are used because one may be right by chance."""
NO_ANSWER = "I do not know."


class RewardError(RuntimeError):
    """The reward functions have failed for good; raised on every host."""


def check_rewards(scored: RewardedSamples) -> None:
    """Checks that training can go on with the rewards of all hosts.

    Raises:
        RewardError: a reward function ends the run, or no sample has a reward.
        RuntimeError: the policy's weights generate no sample; raised on every host, too.
    """
    if max_over_hosts(np.asarray(scored.fatal_error is not None)):
        raise RewardError(scored.fatal_error or "a reward function failed on another host; see its log")
    num_kept = sum_over_hosts(np.asarray(sum(s.reward is not None for s in scored.samples)))
    if num_kept == 0 and scored.samples and all(s.finish_reason == FINISH_NON_FINITE for s in scored.samples):
        raise RuntimeError(
            f"no sample of this step could be generated: {scored.notices[-1]}. The policy's weights contain NaN or "
            "infinity, or overflow: lower optimizer.learning_rate, train in float32, or choose another model.path"
        )
    if num_kept == 0:
        raise RewardError(
            "no sample of this step has a reward, because all were dropped (reward.on_error, or a failed environment); "
            f"first: {next(iter(scored.notices), 'on another host')}. Fix the functions or the environment first"
        )


def stop_if_diverged(metrics: Mapping[str, float | None]) -> None:
    """Raises RuntimeError if too many updates in a row were not finite."""
    for network, section in (("policy", "optimizer"), ("value", "critic")):
        in_a_row = metrics.get(f"{network}/nonfinite_in_a_row") or 0
        if in_a_row >= MAX_NONFINITE_STEPS:
            raise RuntimeError(
                f"{int(in_a_row)} optimizer steps in a row had a NaN or infinite loss or gradient; they did not "
                f"change the weights. Lower {section}.learning_rate, or train in float32"
            )


def make_trial_samples(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> tuple[Sample, ...]:
    """Returns samples of the first prompt with a reference answer: that answer, then answers to other prompts."""
    prompt = next((one for one in prompts if one.answer is not None), prompts[0])
    known = dict.fromkeys(one.answer for one in prompts if one.answer is not None)
    others = [answer for answer in known if answer != prompt.answer][:NUM_WRONG_ANSWERS] or [NO_ANSWER]
    samples = []
    for index, answer in enumerate(others if prompt.answer is None else [prompt.answer, *others]):
        ids = np.asarray([*tokenizer.encode(answer), tokenizer.eos_ids[0]], np.int32)
        samples.append(
            Sample(
                prompt=prompt,
                sample_index=index,
                group_id=0,
                completion_ids=ids,
                completion=answer,
                behavior_logprobs=np.zeros(len(ids), np.float32),
                finish_reason="stop",
                policy_version=0,
            )
        )
    return tuple(samples)


def try_reward_functions(rewards: RewardFunctions, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> None:
    """Calls every reward function on a real prompt with its reference answer, and on one that has none, if any.

    Raises:
        InputError: a function fails such that a run would stop, too; other failures are only logged.
    """
    samples = [make_trial_samples(tokenizer, prompts)[0]]
    unanswered = [prompt for prompt in prompts if prompt.answer is None]
    if unanswered and samples[0].prompt.answer is not None:
        samples.append(make_trial_samples(tokenizer, unanswered)[0])
    for sample in samples:
        tried = rewards.try_functions(sample)
        place = f"for the answer {sample.completion!r:.60} to {sample.prompt.uid}"
        if sample.prompt.answer is None:
            place += f", one of {len(unanswered):,} rows of {len(prompts):,} without a reference answer"
        if tried.fatal_error is not None:
            raise InputError(f"reward.functions: tried before the run, {place}: {tried.fatal_error}")
        for notice in tried.notices:
            log.warning("a reward function fails in a trial %s: %s", place, notice)
