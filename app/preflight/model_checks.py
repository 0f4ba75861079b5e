"""A run on a small scale: one prompt through the chat template and the model, its answers through the rewards."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

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
from app.preflight.check_results import CheckRecorder
from app.preflight.tables import format_size
from app.prompts.encode import to_messages
from app.prompts.tokenizer import Tokenizer
from app.records.sample import Messages, Prompt, Sample
from app.reward.plugin import StepInfo
from app.reward.process_pool import LoadTimeoutError
from app.reward.reward_functions import RewardFunctions
from app.reward.tasks import FORMAT_SUFFIX, MATH_VERIFY, is_task_reward
from app.runtime.inputs import make_rewards
from app.runtime.reward_model import RewardModel, RewardModelSpec
from app.runtime.scoring import set_compute_dtype
from app.runtime.session import Session
from settings import Settings
from settings.errors import InputError

MAX_SHOWN_CHARACTERS = 240
"""Longest text of a prompt that is shown."""
NUM_TOP_TOKENS = 5
"""Number of likely tokens that are shown."""
MAX_PARAMETERS = {"cpu": 10**9, "gpu": 3 * 10**9, "tpu": 3 * 10**9}
"""Largest model that is loaded, by platform: it takes about half a minute."""
USABLE_MEMORY_FRACTION = 0.9
"""Part of a device's memory that the weights may fill."""
MAX_IMPORT_S, MAX_CALL_S = 10.0, 5.0
"""Longest wait here for the import of a reward function and for a call."""
NUM_WRONG_ANSWERS = 3
"""Number of wrong answers; one of them may be right by chance."""
NO_ANSWER = "I do not know."


def check_chat_template(recorder: CheckRecorder, settings: Settings, tokenizer: Tokenizer, prompt: Prompt) -> None:
    """Checks that the chat template opens the assistant's turn, and that what ends the turn ends a completion."""
    messages = to_messages(prompt.source, settings.data.system_prompt)
    text = tokenizer.decode_with_special_tokens(prompt.token_ids)
    if len(text) > MAX_SHOWN_CHARACTERS:
        text = f"...{text[-MAX_SHOWN_CHARACTERS:]}"
    shown = f"{prompt.uid}, {len(prompt.token_ids)} tokens: {text!r}"
    if tokenizer.chat_ids(messages) == tokenizer.conversation_ids(messages):
        advice = "fix the template's add_generation_prompt: without it the model continues the question"
        recorder.warn("template", f"it does not open the assistant's turn; {shown}", advice)
        return
    ending = render_end_of_turn(tokenizer, messages, prompt.answer or NO_ANSWER)
    if not ending:
        recorder.ok("template", f"{shown}\nit does not mark the end of an answer")
        return
    found = f"{shown}\nit ends an answer with {tokenizer.decode_with_special_tokens(ending)!r}"
    if any(token in tokenizer.eos_ids for token in ending):
        recorder.ok("template", found)
    else:
        ends = ", ".join(f"{tokenizer.decode_with_special_tokens([token])!r} ({token})" for token in tokenizer.eos_ids)
        advice = (
            "add the model's end of turn to eos_token_id in generation_config.json, and watch "
            "completions/truncated_fraction: completions may never stop"
        )
        recorder.warn("template", f"{found}, but a completion ends at {ends}", advice)


def render_end_of_turn(tokenizer: Tokenizer, messages: Messages, answer: str) -> list[int]:
    """Returns the tokens that the template writes after an answer; none if it refuses an assistant's turn."""
    try:
        conversation = tokenizer.conversation_ids([*messages, {"role": "assistant", "content": answer}])
    except InputError:
        return []
    # The position of the answer's last token; the template may strip white space around the answer.
    last = tokenizer.encode(answer.strip())[-1:]
    position = max((i for i, token in enumerate(conversation) if [token] == last), default=len(conversation) - 1)
    return list(conversation[position + 1 :])


def too_large_reason(session: Session, definition: DecoderDefinition) -> str | None:
    """Returns why any host cannot load a network for these checks, or None. All hosts call it together."""
    count, available = definition.num_parameters, device_memory_bytes()
    limit = MAX_PARAMETERS[device_platform(session.mesh.devices.flat[0])]
    needed = bytes_per_device(abstract_arrays(definition.shapes, definition.shardings(session.mesh)))
    reason = ""
    if count > limit:
        reason = f"{count:,} parameters, more than {limit:,}, do not load within half a minute"
    elif available is not None and needed > USABLE_MEMORY_FRACTION * available:
        reason = f"weights of {format_size(needed)} do not fit in the {format_size(available)} of a device"
    return next((host.decode() for host in gather_bytes_over_hosts(reason.encode()) if host), None)


def check_forward_pass(recorder: CheckRecorder, session: Session, prompt: Prompt) -> None:
    """Checks the logits of the real weights after one prompt. All hosts call it together."""
    start, tokenizer = time.perf_counter(), session.model_spec.tokenizer
    with error_barrier():
        params = session.load_params()
    loaded = time.perf_counter()
    answer = [] if prompt.answer is None else tokenizer.encode(prompt.answer)
    space = session.model_spec.architecture.max_positions - len(prompt.token_ids)
    ids = np.concatenate([prompt.token_ids, np.asarray(answer[:space], np.int32)])
    logits = next_token_logits(session, params, ids, positions=(len(prompt.token_ids) - 1, len(ids) - 1))
    if not np.isfinite(logits).all():
        advice = "the weights hold NaN or infinities, or overflow in model.dtype: try model.dtype: float32"
        recorder.fail("forward", "logits are not finite", advice)
        return
    exp_logits = np.exp(np.float64(logits) - logits.max(axis=-1, keepdims=True))
    after_prompt, after_answer = exp_logits / exp_logits.sum(axis=-1, keepdims=True)
    likeliest = np.argsort(-after_prompt)[:NUM_TOP_TOKENS]
    shown = ", ".join(
        f"{tokenizer.decode_with_special_tokens([token])!r} {after_prompt[token]:.2g}" for token in likeliest
    )
    found = f"logits are finite; likeliest tokens after the prompt: {shown}"
    if answer:
        end = float(after_answer[list(tokenizer.eos_ids)].sum())
        found += f"; end of turn after the reference answer: {end:.2g}"
    times = f"loaded in {loaded - start:.1f} s, compiled and run in {time.perf_counter() - loaded:.1f} s"
    recorder.ok("forward", f"{found}; {times}")


def next_token_logits(
    session: Session, params: Params, token_ids: Int32[np.ndarray, "T"], *, positions: tuple[int, ...]
) -> Float32[np.ndarray, "N V"]:
    """Returns the logits after the tokens at some positions of a row. The rows of all hosts have the same length."""
    mesh, dtype = session.mesh, set_compute_dtype(session.settings)

    def forward(params: Params, rows: Int32[Array, "R T"]) -> Float32[Array, "R N V"]:
        decoder = session.model_spec.reference_definition.bind(params)
        hidden = decoder.hidden(rows, single_segment_layout(jnp.ones(rows.shape, bool)), dtype=dtype)
        return decoder.head.logits(hidden[:, np.asarray(positions)])

    # Every device computes the same row.
    rows = np.tile(token_ids, (num_local_row_shards(mesh), 1))
    with jax.set_mesh(mesh):
        return to_local(jax.jit(forward, out_shardings=row_sharding(mesh))(params, to_global(mesh, rows)))[0]


def make_test_samples(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> tuple[Sample, ...]:
    """Returns the first prompt that has a reference answer, with that answer and then with those of other prompts."""
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


def check_reward_functions(
    recorder: CheckRecorder,
    settings: Settings,
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
) -> None:
    """Checks what each reward function gives a right answer and wrong ones, in its worker processes.

    The time limits are shorter than those of a run. Exceeding only the shorter ones is a warning.
    """
    import_s, call_s = settings.reward.load_timeout_s, settings.reward.timeout_s
    limits = {"load_timeout_s": min(import_s, MAX_IMPORT_S), "timeout_s": min(call_s, MAX_CALL_S)}
    # The reward model has a check of its own, which loads its weights.
    functions = settings.model_copy(update={"reward": settings.reward.model_copy(update={"model": None, **limits})})
    try:
        with make_rewards(functions, prompts, held_out) as rewards:
            _check_reward_values(recorder, settings, samples, rewards)
    except InputError as error:
        if import_s <= MAX_IMPORT_S or not isinstance(error.__cause__, LoadTimeoutError):
            raise
        recorder.warn("reward", str(error), f"a run would wait reward.load_timeout_s = {import_s:g} s for it")


def _check_reward_values(
    recorder: CheckRecorder, settings: Settings, samples: Sequence[Sample], rewards: RewardFunctions
) -> None:
    scored = rewards.compute_rewards(samples, StepInfo(0, settings.run.steps))
    plugins = "".join(f"\n{summary}" for summary in rewards.plug_in_summaries)
    call_s, notices = settings.reward.timeout_s, "; ".join(scored.notices)
    if call_s > MAX_CALL_S and scored.failure_kinds == {"timeout"}:
        recorder.warn("reward", f"{notices}{plugins}", f"a run would wait reward.timeout_s = {call_s:g} s for a call")
        return
    if scored.fatal_error is not None or notices:
        recorder.fail("reward", f"{scored.fatal_error or notices}{plugins}")
        return
    has_answer = samples[0].prompt.answer is not None
    texts, blind = [], []
    for name in rewards.reward_names:
        values = [(sample.rewards or {}).get(name) for sample in scored.samples]
        known = [value for value in values[has_answer:] if value is not None]
        others = float(np.mean(known)) if known else None
        right = values[0] if has_answer else None
        judges_correctness = name == MATH_VERIFY or (is_task_reward(name) and not name.endswith(FORMAT_SUFFIX))
        if has_answer and judges_correctness and (right or 0.0) <= (others or 0.0):
            blind.append(name)
        reference = f"{_format_value(right)} for the reference answer, " if has_answer else ""
        texts.append(f"{name}: {reference}{_format_value(others)} for others")
    found = f"{'; '.join(texts)}{plugins}"
    if blind:
        advice = f"check data.answer_column, and whether {', '.join(blind)} fits the data: it teaches nothing"
        recorder.warn("reward", found, advice)
    else:
        recorder.ok("reward", found)


def _format_value(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"


def check_reward_model(
    recorder: CheckRecorder, session: Session, model: RewardModelSpec, samples: Sequence[Sample]
) -> None:
    """Checks the scores that the reward model gives the same answers. All hosts call it together."""
    if (reason := too_large_reason(session, model.definition)) is not None:
        recorder.skip("reward model", reason=reason)
        return
    with error_barrier():
        loaded = RewardModel.load(session.settings, model, session.mesh)
    outcomes, _ = loaded.score(samples)
    failed = [outcome.failure.text for outcome in outcomes if outcome.failure]
    if failed:
        recorder.fail("reward model", failed[0])
        return
    values = ", ".join(_format_value(outcome.value) for outcome in outcomes)
    recorder.ok("reward model", f"{session.settings.reward.model}: {values} for the same answers, in their order")
