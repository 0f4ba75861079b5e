"""A run in small: one prompt through its template, through the model, and its answers through the reward functions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Float64, Int32

from app.distributed.collectives import gather_bytes_over_hosts
from app.distributed.lockstep import error_barrier
from app.mesh.device_memory import device_memory_bytes
from app.mesh.placement import (
    abstract_arrays,
    bytes_per_device,
    num_local_row_shards,
    row_sharding,
    to_global,
    to_local,
)
from app.mesh.topology import device_platform
from app.model.decoder import DecoderDefinition, Params
from app.model.segment_layout import single_segment_layout
from app.preflight.check_results import EXIT_ENVIRONMENT, CheckRecorder
from app.prompts.encode import to_messages
from app.prompts.tokenizer import Tokenizer
from app.records.sample import Messages, Prompt, Sample
from app.reward.plugin import StepInfo
from app.reward.process_pool import LoadTimeoutError
from app.reward.reward_functions import RewardFunctions
from app.reward.tasks import FORMAT_SUFFIX, MATH_VERIFY, is_task_reward
from app.runtime.inputs import PromptsOrRows, make_rewards
from app.runtime.reward_model import RewardModel, RewardModelSpec
from app.runtime.scoring import set_compute_dtype
from app.runtime.session import Session
from settings import Settings
from settings.errors import InputError

MAX_SHOWN_CHARACTERS = 240
"""Characters of a text."""
NUM_TOP_TOKENS = 5
"""Tokens that are shown."""
MAX_PARAMETERS = {"cpu": 10**9, "gpu": 3 * 10**9, "tpu": 3 * 10**9}
"""Of a model that is loaded in half a minute."""
USABLE_MEMORY_FRACTION = 0.9
"""Of a device's memory."""
MAX_IMPORT_S, MAX_CALL_S = 10.0, 5.0
"""Seconds that a reward function may take here: to be imported, and for a call."""
NUM_WRONG_ANSWERS = 3
"""Answers that should be wrong: one of them may happen to be right."""
LIKELY_END_PROBABILITY = 0.5
"""How probable an end is that will come."""
NO_ANSWER = "I do not know."


class ForwardResult(NamedTuple):
    """What the real weights made of one prompt and its reference answer."""

    end_probability: float | None
    """That the model ends its turn behind the answer; None without one."""


class EndOfTurn(NamedTuple):
    """What a chat template writes behind an answer."""

    text: str
    """Control tokens spelled out; empty where it writes nothing."""
    ends_completion: bool
    """One of its tokens ends a completion."""


def keep_tail(text: str) -> str:
    """Its end, which tells more of a prompt."""
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"...{text[-MAX_SHOWN_CHARACTERS:]}"


def check_chat_template(recorder: CheckRecorder, settings: Settings, tokenizer: Tokenizer, prompt: Prompt) -> None:
    """How the first prompt reads, and whether the template opens the assistant's turn."""
    messages = to_messages(prompt.source, settings.data.system_prompt)
    text = keep_tail(tokenizer.decode_with_special_tokens(prompt.token_ids))
    shown = f"{prompt.uid}, {len(prompt.token_ids)} tokens: {text!r}"
    if tokenizer.chat_ids(messages) == tokenizer.conversation_ids(messages):
        advice = "mend the template's add_generation_prompt: without it the model goes on with the question"
        recorder.warn("template", f"it does not open the assistant's turn; {shown}", advice)
    else:
        recorder.ok("template", shown)


def render_end_of_turn(tokenizer: Tokenizer, messages: Messages, answer: str) -> EndOfTurn:
    """What the template writes behind this answer.

    Raises:
        InputError: it cannot render an assistant's turn.
    """
    whole = tokenizer.conversation_ids([*messages, {"role": "assistant", "content": answer}])
    # The answer's last token, or the last of the chat without it: white space around it may have gone.
    last = tokenizer.encode(answer.strip())[-1:]
    place = max((i for i, token in enumerate(whole) if [token] == last), default=len(whole) - 1)
    behind = whole[place + 1 :]
    return EndOfTurn(tokenizer.decode_with_special_tokens(behind), any(token in tokenizer.eos_ids for token in behind))


def check_end_of_turn(
    recorder: CheckRecorder,
    settings: Settings,
    tokenizer: Tokenizer,
    prompt: Prompt,
    forward_result: ForwardResult | None,
) -> None:
    """Whether the template ends an answer with a token that ends a completion; if not, whether the model does.

    Args:
        seen: None where the model was not asked.
    """
    ends = ", ".join(f"{tokenizer.decode_with_special_tokens([token])!r} ({token})" for token in tokenizer.eos_ids)
    messages = to_messages(prompt.source, settings.data.system_prompt)
    try:
        end = render_end_of_turn(tokenizer, messages, prompt.answer or NO_ANSWER)
    except InputError as error:
        recorder.warn("end of turn", str(error), "nothing, if the model was trained on other chats")
        return
    written = f"behind an answer the template writes {end.text!r}" if end.text else "the template ends no answer"
    found = f"{written}; a completion ends at {ends}"
    probability = None if forward_result is None else forward_result.end_probability
    if probability is not None:
        found += f", with probability {probability:.2g} behind the reference answer"
    if end.ends_completion or (probability is not None and probability >= LIKELY_END_PROBABILITY):
        recorder.ok("end of turn", found)
    else:
        advice = (
            "the model's own end of turn belongs in eos_token_id of generation_config.json; watch "
            "completions/truncated_fraction: what goes on with the text may never stop"
        )
        recorder.warn("end of turn", found, advice)


def too_large_reason(session: Session, definition: DecoderDefinition) -> str | None:
    """Why a network's weights are not loaded for a trial on any host, or None. All hosts call it together."""
    of_hosts = gather_bytes_over_hosts((_local_too_large_reason(session, definition) or "").encode())
    return next((said.decode() for said in of_hosts if said), None)


def _local_too_large_reason(session: Session, definition: DecoderDefinition) -> str | None:
    """Hosts may have more or less memory."""
    count, available = definition.num_parameters, device_memory_bytes()
    most = MAX_PARAMETERS[device_platform(session.mesh.devices.flat[0])]
    if count > most:
        return f"{count:,} parameters, more than {most:,}, are not loaded within half a minute"
    needed = bytes_per_device(abstract_arrays(definition.shapes, definition.shardings(session.mesh)))
    if available is not None and needed > USABLE_MEMORY_FRACTION * available:
        return f"weights of {needed / 2**30:.1f} GiB do not fit in the {available / 2**30:.1f} GiB of a device"
    return None


def check_forward_pass(recorder: CheckRecorder, session: Session, prompt: Prompt) -> ForwardResult | None:
    """The likeliest words behind a prompt, by the real weights. All hosts call it together."""
    start, tokenizer = time.perf_counter(), session.model_spec.tokenizer
    with error_barrier():
        params = session.load_params()
    loaded = time.perf_counter()
    answer = [] if prompt.answer is None else tokenizer.encode(prompt.answer)
    room = session.model_spec.architecture.max_positions - len(prompt.token_ids)
    ids = np.concatenate([prompt.token_ids, np.asarray(answer[:room], np.int32)])
    logits = next_token_logits(session, params, ids, positions=(len(prompt.token_ids) - 1, len(ids) - 1))
    if not np.isfinite(logits).all():
        advice = "the weights hold NaN or infinities, or overflow in model.dtype: try model.dtype: float32"
        recorder.fail("forward", "logits are not finite", advice, exit_code=EXIT_ENVIRONMENT)
        return None
    behind_prompt, behind_answer = softmax(logits)
    likeliest = np.argsort(-behind_prompt)[:NUM_TOP_TOKENS]
    shown = ", ".join(
        f"{tokenizer.decode_with_special_tokens([token])!r} {behind_prompt[token]:.2g}" for token in likeliest
    )
    done = time.perf_counter()
    recorder.ok(
        "forward",
        f"logits are finite; likeliest behind the prompt: {shown}; loaded in {loaded - start:.1f} s, compiled and run "
        f"in {done - loaded:.1f} s",
    )
    return ForwardResult(float(behind_answer[list(tokenizer.eos_ids)].sum()) if answer else None)


def next_token_logits(
    session: Session, params: Params, token_ids: Int32[np.ndarray, "T"], *, positions: tuple[int, ...]
) -> Float32[np.ndarray, "N V"]:
    """Behind the tokens at some places of a row. Every host gives a row of as many tokens."""
    mesh, dtype = session.mesh, set_compute_dtype(session.settings)

    def read(params: Params, rows: Int32[Array, "R T"]) -> Float32[Array, "R N V"]:
        decoder = session.model_spec.reference_definition.bind(params)
        hidden = decoder.hidden(rows, single_segment_layout(jnp.ones(rows.shape, bool)), dtype=dtype)
        return decoder.head.logits(hidden[:, np.asarray(positions)])

    # Each device has a row, all of them the same.
    rows = np.tile(token_ids, (num_local_row_shards(mesh), 1))
    with jax.set_mesh(mesh):
        return to_local(jax.jit(read, out_shardings=row_sharding(mesh))(params, to_global(mesh, rows)))[0]


def softmax(logits: Float32[np.ndarray, "N V"]) -> Float64[np.ndarray, "N V"]:
    """Returns the softmax of the logits over the vocabulary."""
    shifted = np.exp(np.float64(logits) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def make_test_samples(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> tuple[Sample, ...]:
    """The first prompt with a reference answer, answered with that and then with some of other prompts."""
    prompt = next((one for one in prompts if one.answer is not None), prompts[0])
    known = dict.fromkeys(one.answer for one in prompts if one.answer is not None)
    others = [answer for answer in known if answer != prompt.answer][:NUM_WRONG_ANSWERS] or [NO_ANSWER]
    answers = others if prompt.answer is None else [prompt.answer, *others]
    return tuple(_make_sample(tokenizer, prompt, index, answer) for index, answer in enumerate(answers))


def _make_sample(tokenizer: Tokenizer, prompt: Prompt, index: int, completion: str) -> Sample:
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


def check_reward_functions(
    recorder: CheckRecorder,
    settings: Settings,
    samples: Sequence[Sample],
    rows: PromptsOrRows,
    held_out_rows: PromptsOrRows,
) -> None:
    """What each reward function says of a right answer and of a wrong one, in its workers, under its limits.

    A run may wait longer for a slow one than whoever only looks: that is told as such, and is no failure.
    """
    import_s, call_s = settings.reward.load_timeout_s, settings.reward.timeout_s
    hurried = {"load_timeout_s": min(import_s, MAX_IMPORT_S), "timeout_s": min(call_s, MAX_CALL_S)}
    # The model's score needs its weights; see `look_at_reward_model`.
    functions = settings.model_copy(update={"reward": settings.reward.model_copy(update={"model": None, **hurried})})
    try:
        with make_rewards(functions, rows, held_out_rows) as rewards:
            _check_reward_values(recorder, settings, samples, rewards)
    except InputError as error:
        if import_s <= MAX_IMPORT_S or not isinstance(error.__cause__, LoadTimeoutError):
            raise
        recorder.warn("reward", str(error), f"a run would wait reward.load_timeout_s = {import_s:g} s for it")


def _check_reward_values(
    recorder: CheckRecorder, settings: Settings, samples: Sequence[Sample], rewards: RewardFunctions
) -> None:
    scored = rewards.compute_rewards(samples, StepInfo(0, settings.run.steps))
    told = "".join(f"\n{report}" for report in rewards.plug_in_summaries)
    call_s, notices = settings.reward.timeout_s, "; ".join(scored.notices)
    if call_s > MAX_CALL_S and scored.failure_kinds == {"timeout"}:
        recorder.warn("reward", f"{notices}{told}", f"a run would wait reward.timeout_s = {call_s:g} s for a call")
        return
    if scored.fatal_error is not None or notices:
        recorder.fail("reward", f"{scored.fatal_error or notices}{told}", exit_code=EXIT_ENVIRONMENT)
        return
    has_answer = samples[0].prompt.answer is not None
    right = (scored.samples[0].rewards or {}) if has_answer else {}
    others = [sample.rewards or {} for sample in scored.samples[has_answer:]]

    def said(name: str) -> str:
        values = [f"{_format_value(right.get(name))} for the reference answer"] * has_answer
        return f"{name}: {', '.join([*values, f'{_format_value(_mean(name, others))} for others'])}"

    found = f"{'; '.join(map(said, rewards.reward_names))}{told}"
    tasks = [name for name in rewards.reward_names if has_answer and _judges_correctness(name)]
    blind = [name for name in tasks if right.get(name, 0.0) <= (_mean(name, others) or 0.0)]
    if blind:
        advice = f"see data.answer_column, and whether {', '.join(blind)} fits the data: it could teach nothing"
        recorder.warn("reward", found, advice)
    else:
        recorder.ok("reward", found)


def _mean(name: str, sample_rewards: Sequence[Mapping[str, float]]) -> float | None:
    """Over those that the function gave a value; None where it gave none."""
    values = [rewards[name] for rewards in sample_rewards if name in rewards]
    return float(np.mean(values)) if values else None


def _format_value(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"


def _judges_correctness(name: str) -> bool:
    return name == MATH_VERIFY or (is_task_reward(name) and not name.endswith(FORMAT_SUFFIX))


def check_reward_model(
    recorder: CheckRecorder, session: Session, model: RewardModelSpec, samples: Sequence[Sample]
) -> None:
    """What it scores the same answers. All hosts call it together."""
    settings = session.settings
    if (why := too_large_reason(session, model.definition)) is not None:
        recorder.skip("reward model", reason=why)
        return
    with error_barrier():
        loaded = RewardModel.load(settings, model, session.mesh)
    outcomes, _ = loaded.score(samples)
    failed = [outcome.failure.text for outcome in outcomes if outcome.failure]
    if failed:
        recorder.fail("reward model", failed[0], exit_code=EXIT_ENVIRONMENT)
        return
    values = ", ".join(_format_value(outcome.value) for outcome in outcomes)
    recorder.ok("reward model", f"{settings.reward.model}: {values} for the same answers, in their order")
