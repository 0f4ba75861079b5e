"""Tries the reward functions before a run, on a prompt's reference answer and on other answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from app.prompts.tokenizer import Tokenizer
from app.records.sample import Prompt, Sample
from app.records.typed_values import from_json, is_text_or_number, to_text
from app.reward.aggregate import RewardedSamples
from app.reward.reward_functions import RewardFunctions
from settings.errors import InputError

log = logging.getLogger(__name__)
NUM_WRONG_ANSWERS = 3
"""Maximum number of wrong answers in a trial; a single one could be right by chance."""
NO_ANSWERS = ("I do not know.", "Nobody can say.")
USUAL_FORMS = (r"The answer is \boxed{{{0}}}.", "<think>\n{0}\n</think>\n<answer>{0}</answer>", "#### {0}")
"""Common answer formats; many reward functions find an answer only in one of them."""


def make_trial_samples(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> tuple[Sample, ...]:
    """Returns samples of the first prompt that has a reference answer: this answer, then answers of other prompts."""
    prompt = next((one for one in prompts if one.answer is not None), prompts[0])
    reference = None if prompt.answer is None else to_text(prompt.answer)
    known = dict.fromkeys(to_text(one.answer) for one in prompts if one.answer is not None)
    others = [answer for answer in known if answer != reference][:NUM_WRONG_ANSWERS] or [*NO_ANSWERS]
    samples = []
    for index, answer in enumerate(others if reference is None else [reference, *others]):
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
    """Calls every reward function on a prompt with a reference answer, and on a prompt without one if the data has any.

    Logs failures, and functions that do not distinguish the reference answer from other answers.

    Raises:
        InputError: a function fails in a way that would also stop a run.
    """
    trials = [make_trial_samples(tokenizer, prompts)]
    unanswered = [prompt for prompt in prompts if prompt.answer is None]
    if unanswered and trials[0][0].prompt.answer is not None:
        trials.append(make_trial_samples(tokenizer, unanswered))
    for samples in trials:
        tried, first = rewards.try_functions(samples), samples[0]
        place = f"on the answer {first.completion!r:.60} to {first.prompt.uid}"
        if first.prompt.answer is None:
            place += f", a row without a reference answer ({len(unanswered):,} of {len(prompts):,})"
        if tried.fatal_error is not None:
            raise _trial_error(tried.fatal_error, place)
        for notice in tried.notices:
            log.warning("a reward function failed in a trial call before training %s: %s", place, notice)
        for warning in indifference_warnings(rewards, samples, tried):
            log.warning("%s", warning)


def _trial_error(fatal_error: str, place: str) -> InputError:
    failure = fatal_error.removeprefix("reward.functions: ")
    return InputError(f"reward.functions: the trial call before training failed {place}: {failure}")


def indifference_warnings(rewards: RewardFunctions, samples: Sequence[Sample], tried: RewardedSamples) -> list[str]:
    """Returns a warning for each reward function that cannot tell the reference answer from other answers.

    Such a function gives all answers the same reward in each common format. If it takes no reference answer, it may
    grade the format, and gets a warning only if the reward is also the same in all formats.

    Args:
        samples: the result of `make_trial_samples`.
        tried: the rewards of `samples`.

    Raises:
        InputError: a function fails in a way that would also stop a run.
    """
    # An object, a list or a boolean is hardly a completion that a function expects.
    if not is_text_or_number(samples[0].prompt.answer) or tried.notices:
        return []
    by_form = [_values(tried)]
    suspects = [name for name, values in by_form[0].items() if len(values) == 1 and None not in values]
    for form in USUAL_FORMS:
        if not suspects:
            break
        texts = [form.format(sample.completion.rpartition("####")[2].strip()) for sample in samples]
        # Token ids remain the bare answer's: functions that grade token ids have already seen them.
        of_form = rewards.try_functions(
            [replace(sample, completion=text) for sample, text in zip(samples, texts, strict=True)]
        )
        if of_form.fatal_error is not None:
            raise _trial_error(of_form.fatal_error, f"on the answer {texts[0]!r:.60} to {samples[0].prompt.uid}")
        if of_form.notices:
            return []
        by_form.append(_values(of_form))
        suspects = [name for name in suspects if len(by_form[-1][name]) == 1]
    answer = from_json(samples[0].prompt.answer)
    return [
        f"reward.functions: {name} gives {next(iter(by_form[0][name])):g} for the reference answer {answer!r:.60} "
        f"({type(answer).__name__}) of {samples[0].prompt.uid}, and for {len(samples) - 1} other answers; check "
        f"data.answer_column, and whether {name} fits the data"
        for name in suspects
        if name in rewards.names_of_judges or len({value for form in by_form for value in form[name]}) == 1
    ]


def _values(tried: RewardedSamples) -> dict[str, set[float | None]]:
    return {name: {(one.rewards or {}).get(name) for one in tried.samples} for name in tried.function_counts}
