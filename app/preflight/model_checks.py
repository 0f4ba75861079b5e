"""A run in small: one prompt through its template, through the model, and its answers through the reward functions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Float64, Int32

from app.distributed.collectives import bytes_over_hosts
from app.distributed.lockstep import together
from app.mesh.device_memory import device_memory_bytes
from app.mesh.placement import abstract, bytes_per_device, num_local_row_shards, row_sharding, to_global, to_local
from app.mesh.topology import platform_of
from app.model.decoder import DecoderDefinition, Params
from app.model.segment_layout import one_segment
from app.preflight.check_results import RUN_TIME, Findings
from app.prompts.encode import to_messages
from app.prompts.tokenizer import Tokenizer
from app.records.sample import Messages, Prompt, Sample
from app.reward.plugin import Moment
from app.reward.process_pool import LateError
from app.reward.reward_functions import Rewards
from app.reward.tasks import FORMAT_SUFFIX, MATH_VERIFY, is_task_reward
from app.runtime.inputs import DataRows, rewards_over
from app.runtime.reward_model import RewardModel, RewardModelInput
from app.runtime.session import Session, compute_type
from settings import Settings
from settings.errors import InputError

SHOWN = 240
"""Characters of a text."""
NUM_LIKELIEST = 5
"""Tokens that are shown."""
MOST_PARAMETERS = {"cpu": 10**9, "gpu": 3 * 10**9, "tpu": 3 * 10**9}
"""Of a model that is loaded in half a minute."""
USABLE = 0.9
"""Of a device's memory."""
MOST_IMPORT_S, MOST_CALL_S = 10.0, 5.0
"""Seconds that a reward function may take here: to be imported, and for a call."""
NUM_OTHERS = 3
"""Answers that should be wrong: one of them may happen to be right."""
LIKELY = 0.5
"""How probable an end is that will come."""
NO_ANSWER = "I do not know."


class Seen(NamedTuple):
    """What the real weights made of one prompt and its reference answer."""

    end_probability: float | None
    """That the model ends its turn behind the answer; None without one."""


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
    look: Findings, settings: Settings, tokenizer: Tokenizer, prompt: Prompt, seen: Seen | None
) -> None:
    """Whether the template ends an answer with a token that ends a completion; if not, whether the model does.

    Args:
        seen: None where the model was not asked.
    """
    ends = ", ".join(f"{tokenizer.spelled([token])!r} ({token})" for token in tokenizer.eos_ids)
    messages = to_messages(prompt.source, settings.data.system_prompt)
    try:
        end = end_of_turn(tokenizer, messages, prompt.answer or NO_ANSWER)
    except InputError as error:
        look.warn("end of turn", str(error), "nothing, if the model was trained on other chats")
        return
    written = f"behind an answer the template writes {end.text!r}" if end.text else "the template ends no answer"
    found = f"{written}; a completion ends at {ends}"
    probability = None if seen is None else seen.end_probability
    if probability is not None:
        found += f", with probability {probability:.2g} behind the reference answer"
    if end.ends or (probability is not None and probability >= LIKELY):
        look.ok("end of turn", found)
    else:
        advice = (
            "the model's own end of turn belongs in eos_token_id of generation_config.json; watch "
            "completions/truncated_fraction: what goes on with the text may never stop"
        )
        look.warn("end of turn", found, advice)


def too_large(session: Session, definition: DecoderDefinition) -> str | None:
    """Why a network's weights are not loaded for a trial on any host, or None. All hosts call it together."""
    of_hosts = bytes_over_hosts((_too_large_here(session, definition) or "").encode())
    return next((said.decode() for said in of_hosts if said), None)


def _too_large_here(session: Session, definition: DecoderDefinition) -> str | None:
    """Hosts may have more or less memory."""
    count, available = definition.num_parameters, device_memory_bytes()
    most = MOST_PARAMETERS[platform_of(session.mesh.devices.flat[0])]
    if count > most:
        return f"{count:,} parameters, more than {most:,}, are not loaded within half a minute"
    needed = bytes_per_device(abstract(definition.shapes, definition.shardings(session.mesh)))
    if available is not None and needed > USABLE * available:
        return f"weights of {needed / 2**30:.1f} GiB do not fit in the {available / 2**30:.1f} GiB of a device"
    return None


def look_at_forward(look: Findings, session: Session, prompt: Prompt) -> Seen | None:
    """The likeliest words behind a prompt, by the real weights. All hosts call it together."""
    start, tokenizer = time.perf_counter(), session.input.tokenizer
    with together():
        params = session.load_params()
    loaded = time.perf_counter()
    answer = [] if prompt.answer is None else tokenizer.encode(prompt.answer)
    room = session.input.architecture.max_positions - len(prompt.token_ids)
    ids = np.concatenate([prompt.token_ids, np.asarray(answer[:room], np.int32)])
    logits = next_token_logits(session, params, ids, at=(len(prompt.token_ids) - 1, len(ids) - 1))
    if not np.isfinite(logits).all():
        advice = "the weights hold NaN or infinities, or overflow in model.dtype: try model.dtype: float32"
        look.fail("forward", "logits are not finite", advice, exit_code=RUN_TIME)
        return None
    behind_prompt, behind_answer = probabilities(logits)
    likeliest = np.argsort(-behind_prompt)[:NUM_LIKELIEST]
    shown = ", ".join(f"{tokenizer.spelled([token])!r} {behind_prompt[token]:.2g}" for token in likeliest)
    done = time.perf_counter()
    look.ok(
        "forward",
        f"logits are finite; likeliest behind the prompt: {shown}; loaded in {loaded - start:.1f} s, compiled and run "
        f"in {done - loaded:.1f} s",
    )
    return Seen(float(behind_answer[list(tokenizer.eos_ids)].sum()) if answer else None)


def next_token_logits(
    session: Session, params: Params, token_ids: Int32[np.ndarray, "T"], *, at: tuple[int, ...]
) -> Float32[np.ndarray, "N V"]:
    """Behind the tokens at some places of a row. Every host gives a row of as many tokens."""
    mesh, dtype = session.mesh, compute_type(session.settings)

    def read(params: Params, rows: Int32[Array, "R T"]) -> Float32[Array, "R N V"]:
        decoder = session.input.reference.bind(params)
        hidden = decoder.hidden(rows, one_segment(jnp.ones(rows.shape, bool)), dtype=dtype)
        return decoder.head.logits(hidden[:, np.asarray(at)])

    # Each device has a row, all of them the same.
    rows = np.tile(token_ids, (num_local_row_shards(mesh), 1))
    with jax.set_mesh(mesh):
        return to_local(jax.jit(read, out_shardings=row_sharding(mesh))(params, to_global(mesh, rows)))[0]


def probabilities(logits: Float32[np.ndarray, "N V"]) -> Float64[np.ndarray, "N V"]:
    """softmax(logits) over the vocabulary."""
    shifted = np.exp(np.float64(logits) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def trial_samples(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> tuple[Sample, ...]:
    """The first prompt with a reference answer, answered with that and then with some of other prompts."""
    prompt = next((one for one in prompts if one.answer is not None), prompts[0])
    known = dict.fromkeys(one.answer for one in prompts if one.answer is not None)
    others = [answer for answer in known if answer != prompt.answer][:NUM_OTHERS] or [NO_ANSWER]
    answers = others if prompt.answer is None else [prompt.answer, *others]
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
    look: Findings, settings: Settings, samples: Sequence[Sample], asked: DataRows, held_out: DataRows
) -> None:
    """What each reward function says of a right answer and of a wrong one, in its workers, under its limits.

    A run may wait longer for a slow one than whoever only looks: that is told as such, and is no failure.
    """
    import_s, call_s = settings.reward.load_timeout_s, settings.reward.timeout_s
    hurried = {"load_timeout_s": min(import_s, MOST_IMPORT_S), "timeout_s": min(call_s, MOST_CALL_S)}
    # The model's score needs its weights; see `look_at_reward_model`.
    functions = settings.model_copy(update={"reward": settings.reward.model_copy(update={"model": None, **hurried})})
    try:
        with rewards_over(functions, asked, held_out) as rewards:
            _look_at_values(look, settings, samples, rewards)
    except InputError as error:
        if import_s <= MOST_IMPORT_S or not isinstance(error.__cause__, LateError):
            raise
        look.warn("reward", str(error), f"a run would wait reward.load_timeout_s = {import_s:g} s for it")


def _look_at_values(look: Findings, settings: Settings, samples: Sequence[Sample], rewards: Rewards) -> None:
    scored = rewards.score(samples, Moment(0, settings.run.steps))
    told = "".join(f"\n{report}" for report in rewards.reports)
    call_s, notices = settings.reward.timeout_s, "; ".join(scored.notices)
    if call_s > MOST_CALL_S and scored.kinds == {"timeout"}:
        look.warn("reward", f"{notices}{told}", f"a run would wait reward.timeout_s = {call_s:g} s for a call")
        return
    if scored.problem is not None or notices:
        look.fail("reward", f"{scored.problem or notices}{told}", exit_code=RUN_TIME)
        return
    has_answer = samples[0].prompt.answer is not None
    right = (scored.samples[0].rewards or {}) if has_answer else {}
    others = [sample.rewards or {} for sample in scored.samples[has_answer:]]

    def said(name: str) -> str:
        values = [f"{_value(right.get(name))} for the reference answer"] * has_answer
        return f"{name}: {', '.join([*values, f'{_value(_mean(name, others))} for others'])}"

    found = f"{'; '.join(map(said, rewards.names))}{told}"
    tasks = [name for name in rewards.names if has_answer and _judges_correctness(name)]
    blind = [name for name in tasks if right.get(name, 0.0) <= (_mean(name, others) or 0.0)]
    if blind:
        advice = f"see data.answer_column, and whether {', '.join(blind)} fits the data: it could teach nothing"
        look.warn("reward", found, advice)
    else:
        look.ok("reward", found)


def _mean(name: str, of_samples: Sequence[Mapping[str, float]]) -> float | None:
    """Over those that the function gave a value; None where it gave none."""
    values = [rewards[name] for rewards in of_samples if name in rewards]
    return float(np.mean(values)) if values else None


def _value(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"


def _judges_correctness(name: str) -> bool:
    return name == MATH_VERIFY or (is_task_reward(name) and not name.endswith(FORMAT_SUFFIX))


def look_at_reward_model(look: Findings, session: Session, model: RewardModelInput, samples: Sequence[Sample]) -> None:
    """What it scores the same answers. All hosts call it together."""
    settings = session.settings
    if (why := too_large(session, model.definition)) is not None:
        look.skip("reward model", why=why)
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
