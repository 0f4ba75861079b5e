"""Trial of reward functions on answers that are known, before anything is compiled."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from app.prompts.tokenizer import Tokenizer
from app.records.sample import Prompt, Sample
from app.reward.reward_functions import RewardFunctions
from settings.errors import InputError

log = logging.getLogger(__name__)

NUM_WRONG_ANSWERS = 3
"""Maximum number of wrong answers; several are used because one may be right by chance."""
NO_ANSWER = "I do not know."


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
