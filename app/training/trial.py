"""A run in small: one prompt through its template, through the model, and its answers through the reward functions."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from app.flow import Messages, Prompt, Sample
from app.mesh.topology import platform_of
from app.prompts.encode import to_messages
from app.prompts.tokenizer import Tokenizer
from app.reward.plugin import Moment
from app.reward.rewards import Rewards
from app.reward.tasks import FORMAT_SUFFIX, MATH_VERIFY, is_task_reward
from app.rollout.sampling import NON_FINITE, SamplingRules
from app.training.all_hosts import together
from app.training.findings import RUN_TIME, Findings
from app.training.metrics import device_memory_bytes
from app.training.reward_role import RewardModel, RewardModelInput
from app.training.session import Session, compute_type
from app.training.training_input import rewards_over
from settings import Settings
from settings.errors import InputError

SHOWN = 240
"""Characters of a text."""
NUM_TOKENS = 16
"""That are drawn, at most."""
MOST_PARAMETERS = {"cpu": 10**9, "gpu": 3 * 10**9, "tpu": 3 * 10**9}
"""Of a model that is loaded in half a minute."""
USABLE = 0.9
"""Of a device's memory."""
NO_ANSWER = "I do not know."


class EndOfTurn(NamedTuple):
    """What a chat template writes behind an answer."""

    text: str
    """Control tokens spelled out; empty where it writes nothing."""
    ends: bool
    """One of its tokens ends a completion."""


def shortened(text: str) -> str:
    """Its end, which tells more of a prompt."""
    return text if len(text) <= SHOWN else f"...{text[-SHOWN:]}"


def look_at_template(look: Findings, settings: Settings, tokenizer: Tokenizer, prompt: Prompt) -> None:
    """How the first prompt reads, and whether the template opens the assistant's turn."""
    messages = to_messages(prompt.source, settings.data.system_prompt)
    shown = f"{prompt.uid}, {len(prompt.token_ids)} tokens: {shortened(tokenizer.spelled(prompt.token_ids))!r}"
    if tokenizer.chat_ids(messages) == tokenizer.conversation_ids(messages):
        advice = "mend the template's add_generation_prompt: without it the model goes on with the question"
        look.warn("template", f"it does not open the assistant's turn; {shown}", advice)
    else:
        look.ok("template", shown)


def end_of_turn(tokenizer: Tokenizer, messages: Messages, answer: str) -> EndOfTurn:
    """What the template writes behind this answer.

    Raises:
        InputError: it cannot render an assistant's turn.
    """
    whole = tokenizer.conversation_ids([*messages, {"role": "assistant", "content": answer}])
    # The answer's last token, or the last of the chat without it: white space around it may have gone.
    last = tokenizer.encode(answer.strip())[-1:]
    place = max((i for i, token in enumerate(whole) if [token] == last), default=len(whole) - 1)
    behind = whole[place + 1 :]
    return EndOfTurn(tokenizer.spelled(behind), any(token in tokenizer.eos_ids for token in behind))


def look_at_end_of_turn(
    look: Findings, settings: Settings, tokenizer: Tokenizer, prompt: Prompt, drawn: Sample | None
) -> None:
    """Whether the template ends an answer with a token that ends a completion; if not, whether the model does.

    Args:
        drawn: what the model has said, where it was asked.
    """
    ends = ", ".join(f"{tokenizer.spelled([token])!r} ({token})" for token in tokenizer.eos_ids)
    messages = to_messages(prompt.source, settings.data.system_prompt)
    try:
        end = end_of_turn(tokenizer, messages, prompt.answer or NO_ANSWER)
    except InputError as error:
        look.warn("end of turn", str(error), "nothing, if the model was trained on other chats: see what it says")
        return
    written = f"behind an answer the template writes {end.text!r}" if end.text else "the template ends no answer"
    found = f"{written}; a completion ends at {ends}"
    if end.ends:
        look.ok("end of turn", found)
    elif drawn is not None and drawn.finish_reason == "stop":
        look.ok(
            "end of turn", f"{found}; the model ends its answer all the same, after {len(drawn.completion_ids)} tokens"
        )
    else:
        advice = (
            "see whether completions end before rollout.max_new_tokens (completions/truncated_fraction); the model's "
            "own end of turn belongs in eos_token_id of generation_config.json"
        )
        look.warn("end of turn", f"{found}: a model that learnt from this template may never stop", advice)


def too_large(session: Session) -> str | None:
    """Why the model is not loaded, or None."""
    definition, mesh = session.input.definition, session.mesh
    count, available = definition.num_parameters, device_memory_bytes()
    most = MOST_PARAMETERS[platform_of(mesh.devices.flat[0])]
    if count > most:
        return f"{count:,} parameters, more than {most:,}, are not loaded within half a minute"
    # float32 over all devices, and a copy for decoding, which may be whole on each.
    needed = 4 * count / mesh.size + compute_type(session.settings).itemsize * count
    if available is not None and needed > USABLE * available:
        return (
            f"{needed / 2**30:.1f} GiB of weights do not fit beside their decoding copy in {available / 2**30:.1f} GiB"
        )
    return None


def look_at_forward(look: Findings, session: Session, prompt: Prompt) -> Sample | None:
    """The likeliest words behind a prompt, by the real weights. All hosts call it together."""
    start = time.perf_counter()
    with together():
        params = session.load_params()
    weights = session.engine.weights(params)
    loaded = time.perf_counter()
    (sample,) = session.engine.generate(
        weights,
        [prompt],
        group_size=1,
        max_new_tokens=min(NUM_TOKENS, session.settings.rollout.max_new_tokens),
        rules=SamplingRules(0.0),
        seed=session.settings.run.seed,
        policy_version=0,
    )
    done = time.perf_counter()
    if sample.finish_reason == NON_FINITE:
        advice = "the weights hold NaN or infinities, or overflow in model.dtype: try model.dtype: float32"
        look.fail("forward", "logits are not finite", advice, exit_code=RUN_TIME)
        return None
    text, first = session.input.tokenizer.spelled(sample.completion_ids), math.exp(sample.behavior_logprobs[0])
    look.ok(
        "forward",
        f"logits are finite; the likeliest answer begins {shortened(text)!r}, its first token with probability "
        f"{first:.2g}; loaded in {loaded - start:.1f} s, compiled and drawn in {done - loaded:.1f} s",
    )
    return sample


def trial_samples(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> tuple[Sample, ...]:
    """The first prompt with a reference answer, answered with that and then with another prompt's."""
    prompt = next((one for one in prompts if one.answer is not None), prompts[0])
    other = next((one.answer for one in prompts if one.answer not in (None, prompt.answer)), None) or NO_ANSWER
    answers = (other,) if prompt.answer is None else (prompt.answer, other)
    return tuple(_sample(tokenizer, prompt, index, answer) for index, answer in enumerate(answers))


def _sample(tokenizer: Tokenizer, prompt: Prompt, index: int, completion: str) -> Sample:
    ids = np.asarray([*tokenizer.encode(completion), tokenizer.eos_ids[0]], np.int32)
    return Sample(
        prompt=prompt,
        sample_index=index,
        group_id=0,
        completion_ids=ids,
        completion=completion,
        behavior_logprobs=np.zeros(len(ids), np.float32),
        finish_reason="stop",
        policy_version=0,
    )


def look_at_rewards(
    look: Findings, settings: Settings, samples: Sequence[Sample], prompts: Sequence[Prompt], held_out: Sequence[Prompt]
) -> None:
    """What each reward function says of a right answer and of a wrong one, in its workers, under its limits."""
    # The model's score needs its weights; see `look_at_reward_model`.
    functions = settings.model_copy(update={"reward": settings.reward.model_copy(update={"model": None})})
    with rewards_over(functions, prompts, held_out) as rewards:
        _look_at_values(look, settings, samples, rewards)


def _look_at_values(look: Findings, settings: Settings, samples: Sequence[Sample], rewards: Rewards) -> None:
    scored = rewards.score(samples, Moment(0, settings.run.steps))
    told = "".join(f"\n{report}" for report in rewards.reports)
    if scored.problem is not None or scored.notices:
        look.fail("reward", f"{scored.problem or '; '.join(scored.notices)}{told}", exit_code=RUN_TIME)
        return
    right, wrong = scored.samples[0].rewards or {}, scored.samples[-1].rewards or {}
    has_answer = len(scored.samples) > 1

    def said(name: str) -> str:
        values = [("the reference answer", right)] * has_answer + [("another answer", wrong)]
        return f"{name}: {', '.join(f'{_value(of.get(name))} for {what}' for what, of in values)}"

    found = f"{'; '.join(map(said, rewards.names))}{told}"
    tasks = [name for name in rewards.names if _judges_correctness(name)]
    blind = [name for name in tasks if has_answer and right.get(name, 0) <= wrong.get(name, 0)]
    if blind:
        advice = (
            f"see data.answer_column, and whether {', '.join(blind)} fits the data: nothing could be learnt from it"
        )
        look.warn("reward", found, advice)
    else:
        look.ok("reward", found)


def _value(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"


def _judges_correctness(name: str) -> bool:
    return name == MATH_VERIFY or (is_task_reward(name) and not name.endswith(FORMAT_SUFFIX))


def look_at_reward_model(
    look: Findings, settings: Settings, session: Session, model: RewardModelInput, samples: Sequence[Sample]
) -> None:
    """What it scores the same answers. All hosts call it together."""
    most = MOST_PARAMETERS[jax.devices()[0].platform]
    if model.definition.num_parameters > most:
        found = (
            f"{model.definition.num_parameters:,} parameters, more than {most:,}, are not loaded within half a minute"
        )
        look.skip("reward model", found)
        return
    with together():
        loaded = RewardModel.load(settings, model, session.mesh)
    outcomes, _ = loaded.outcomes(samples)
    failed = [outcome.failure.text for outcome in outcomes if outcome.failure]
    if failed:
        look.fail("reward model", failed[0], exit_code=RUN_TIME)
        return
    values = ", ".join(_value(outcome.value) for outcome in outcomes)
    look.ok("reward model", f"{settings.reward.model}: {values} for the same answers, in their order")
