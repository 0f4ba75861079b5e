"""Checks the model with one prompt (chat template, logits, greedy answer) and the rewards with sample answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from app.distributed.collectives import error_barrier, gather_bytes_over_hosts
from app.mesh.devices import device_memory_bytes, device_platform
from app.mesh.placement import (
    abstract_arrays,
    bytes_per_device,
    num_local_row_shards,
    row_sharding,
    to_global,
    to_local,
)
from app.model.decoder import DecoderDefinition, Params
from app.model.lora import combine_params
from app.model.segment_layout import single_segment_layout
from app.preflight.check_results import CheckRecorder
from app.prompts.chat import to_messages
from app.prompts.dataset import DatasetRow
from app.prompts.encode import misread_prompts
from app.prompts.tokenizer import Tokenizer
from app.prompts.turn_end import overlooked_end, set_eos_token, unended_turn
from app.records.sample import Prompt, Sample
from app.records.text_format import format_bytes, format_count
from app.reward.plugin import StepInfo
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.runtime.generators import open_continuous_batching
from app.runtime.inputs import data_columns, eval_columns, make_rewards
from app.runtime.reward_model import RewardModel, RewardModelSpec, reward_model_notes
from app.runtime.reward_trial import indifference_warnings
from app.runtime.scoring import set_compute_dtype
from app.runtime.session import Session
from settings import Settings
from settings.schema.reward import EnvironmentSettings

MAX_SHOWN_CHARACTERS = 240
"""Number of characters shown from the end of a prompt."""
MAX_ANSWER_TOKENS, MAX_SHOWN_OF_ANSWER = 128, 120
"""Maximum length of an answer in tokens (half a minute for the largest model), and number of characters shown."""
NUM_TOP_TOKENS = 5
"""Number of most likely tokens shown."""
USABLE_MEMORY_FRACTION = 0.9
"""Fraction of a device's memory for weights; the rest is for activations and temporaries."""
MAX_PARAMETERS = {"cpu": 10**9, "gpu": 3 * 10**9, "tpu": 3 * 10**9}
"""Maps a platform to the maximum number of parameters to load; loading that many takes about half a minute."""


def check_chat_template(
    recorder: CheckRecorder,
    settings: Settings,
    tokenizer: Tokenizer,
    prompt: Prompt,
    rows: Sequence[DatasetRow],
) -> None:
    """Checks that prompts fit the chat template, that it opens the assistant's turn, and that turns can end."""
    messages = to_messages(prompt.source, settings.data.system_prompt)
    text = tokenizer.decode_with_special_tokens(prompt.token_ids)
    if len(text) > MAX_SHOWN_CHARACTERS:
        text = f"...{text[-MAX_SHOWN_CHARACTERS:]}"
    shown = f"{prompt.uid}, {format_count(len(prompt.token_ids), 'token')}: {text!r}"
    if settings.data.chat_template == "none":
        recorder.ok("template", f"none (data.chat_template); {shown}")
    elif (fault := misread_prompts(rows, tokenizer.template, settings.data)) is not None:
        recorder.warn("template", f"{fault[0]}; {shown}", fault[1])
    elif tokenizer.chat_ids(messages) == tokenizer.conversation_ids(messages):
        advice = "fix the template's add_generation_prompt: without it the model continues the question"
        recorder.warn("template", f"the template does not start the assistant's turn; {shown}", advice)
    elif (fault := unended_turn(tokenizer, settings.rollout.stop)) is not None:
        recorder.warn("template", f"{fault[0]}; {shown}", fault[1])
    else:
        recorder.ok("template", shown)


def too_large_reason(session: Session, definition: DecoderDefinition, *, num_copies: int = 1) -> str | None:
    """Returns why a host cannot load a network for these checks; None if all can. All hosts must call it together.

    Args:
        num_copies: number of copies of the weights that the devices must hold at once.
    """
    count, available = definition.num_parameters, device_memory_bytes()
    limit = MAX_PARAMETERS[device_platform(session.mesh.devices.flat[0])]
    needed = num_copies * bytes_per_device(abstract_arrays(definition.shapes, definition.shardings(session.mesh)))
    reason = ""
    if count > limit:
        reason = f"not loaded: a network of {count:,} parameters, more than {limit:,}, would take too long"
    elif available is not None and needed > USABLE_MEMORY_FRACTION * available:
        reason = f"not loaded: weights of {format_bytes(needed)} do not fit in a device's {format_bytes(available)}"
    return next((host.decode() for host in gather_bytes_over_hosts(reason.encode()) if host), None)


def check_forward_pass(recorder: CheckRecorder, session: Session, prompt: Prompt) -> Params | None:
    """Checks that the real weights give finite logits after one prompt; returns the weights, or None if not.

    All hosts must call it together.
    """
    start, tokenizer = time.perf_counter(), session.model_spec.tokenizer
    with error_barrier():
        params = session.scoring.load_params()
    loaded = time.perf_counter()
    logits = next_token_logits(session, params, prompt.token_ids)
    if not np.isfinite(logits).all():
        advice = (
            "the weights contain NaN or infinities, or overflow; set model.dtype: float32, or choose another model.path"
        )
        recorder.fail("forward", "logits are not finite", advice)
        return None
    exp_logits = np.exp(np.float64(logits) - logits.max())
    probabilities = exp_logits / exp_logits.sum()
    shown = ", ".join(
        f"{tokenizer.decode_with_special_tokens([token])!r} {probabilities[token]:.2g}"
        for token in np.argsort(-probabilities)[:NUM_TOP_TOKENS]
    )
    times = f"loaded in {loaded - start:.1f} s, compiled and run in {time.perf_counter() - loaded:.1f} s"
    recorder.ok("forward", f"logits are finite; most likely tokens after the prompt: {shown}; {times}")
    return params


def next_token_logits(session: Session, params: Params, token_ids: Int32[np.ndarray, "T"]) -> Float32[np.ndarray, "V"]:
    """Returns the logits after the last token of a prompt, which must have the same length on all hosts."""
    mesh, dtype = session.mesh, set_compute_dtype(session.settings)

    def forward(params: Params, rows: Int32[Array, "R T"]) -> Float32[Array, "R 1 V"]:
        decoder = session.model_spec.reference_definition.bind(params)
        hidden = decoder.hidden(rows, single_segment_layout(jnp.ones(rows.shape, bool)), dtype=dtype)
        return decoder.head.logits(hidden[:, -1:])

    # Every device computes the same row.
    rows = np.tile(token_ids, (num_local_row_shards(mesh), 1))
    with jax.set_mesh(mesh):
        return to_local(jax.jit(forward, out_shardings=row_sharding(mesh))(params, to_global(mesh, rows)))[0, 0]


def check_answer(recorder: CheckRecorder, session: Session, params: Params, prompt: Prompt) -> None:
    """Warns if the greedy answer continues after a token that looks like its end. All hosts must call it together.

    Args:
        params: the weights of `model.path`, as `ScoringSession.load_params` returns them.
    """
    sample, tokenizer = _greedy_answer(session, params, prompt), session.model_spec.tokenizer
    ids = sample.completion_ids.tolist()
    place = overlooked_end(ids, tokenizer)
    text = tokenizer.decode_with_special_tokens(ids if place is None else ids[: place + 1])
    shown = repr(text if len(text) <= MAX_SHOWN_OF_ANSWER else f"...{text[-MAX_SHOWN_OF_ANSWER:]}")
    if place is not None:
        name = tokenizer.decode_with_special_tokens([ids[place]])
        found = f"the most likely answer continues after the control token {name!r}, which is not an EOS token: {shown}"
        recorder.warn("answer", found, f"if {name} ends a turn, set {set_eos_token(tokenizer, ids[place])}")
    else:
        ends = "ends" if sample.finish_reason == "stop" else "has not ended"
        recorder.ok("answer", f"the most likely answer {ends} after {format_count(len(ids), 'token')}: {shown}")


def _greedy_answer(session: Session, params: Params, prompt: Prompt) -> Sample:
    """Returns one sample at temperature 0, from a separate engine. All hosts must call it together."""
    scoring, settings = session.scoring, session.settings
    if session.model_spec.policy_definition.lora is not None:
        params = combine_params(scoring.initial_trained_params(), params)
    num_tokens = min(settings.rollout.max_new_tokens, MAX_ANSWER_TOKENS)
    of_one = {"prompts_per_step": 1, "group_size": 1, "slots": "auto", "kv_blocks": None, "max_new_tokens": num_tokens}
    small = settings.model_copy(update={"rollout": settings.rollout.model_copy(update=of_one)})
    tokenizer, conversion = session.model_spec.tokenizer, session.to_decode_weights
    generator = open_continuous_batching(small, tokenizer, conversion, held_bytes=0, truncates=False)
    request = GenerationRequest(
        rules=SamplingRules(temperature=0.0),
        seed=settings.run.seed,
        policy_version=0,
        group_size=1,
        max_new_tokens=num_tokens,
        stop=settings.rollout.stop,
        first_group_id=jax.process_index(),
    )
    return generator.generate(conversion(params), [prompt], request)[0]


def check_reward_functions(
    recorder: CheckRecorder,
    settings: Settings,
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
) -> None:
    """Checks that each reward function grades answers without errors and tells the reference answer from others."""
    if not settings.reward.functions:
        giver = "environment alone gives rewards" if settings.env.source else "teacher needs no rewards"
        recorder.skip("reward", reason=f"the {giver}")
        return
    # Reward model and environment have their own checks.
    of_functions = {"reward": settings.reward.model_copy(update={"model": None}), "env": EnvironmentSettings()}
    functions = settings.model_copy(update=of_functions)
    held_out_columns = eval_columns(settings, held_out) if held_out else None
    with make_rewards(functions, data_columns(settings, prompts), held_out_columns) as rewards:
        scored = rewards.compute_rewards(samples, StepInfo(0, settings.run.steps))
        warnings = indifference_warnings(rewards, samples, scored)
        plugins = "".join(f"\n{summary}" for summary in rewards.plug_in_summaries)
    if scored.fatal_error is not None or scored.notices:
        recorder.fail("reward", f"{scored.fatal_error or '; '.join(scored.notices)}{plugins}")
        return
    has_answer = samples[0].prompt.answer is not None
    texts = []
    for name in rewards.reward_names:
        values = [(sample.rewards or {}).get(name) for sample in scored.samples]
        known = [value for value in values[has_answer:] if value is not None]
        others = float(np.mean(known)) if known else None
        right = values[0] if has_answer else None
        reference = f"{_format_reward(right)} for the reference answer, " if has_answer else ""
        texts.append(f"{name}: {reference}{_format_reward(others)} for others")
    found = f"{'; '.join(texts)}{plugins}"
    if warnings:
        recorder.warn("reward", found, "; ".join(warnings))
    else:
        recorder.ok("reward", found)


def _format_reward(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"


def check_reward_model(
    recorder: CheckRecorder, session: Session, model: RewardModelSpec, samples: Sequence[Sample]
) -> None:
    """Checks that the reward model scores sample answers, and reports the scores. All hosts must call it together."""
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
    values = ", ".join(_format_reward(outcome.value) for outcome in outcomes)
    scores = f"{session.settings.reward.model}: {values} for the same answers, in order"
    recorder.ok("reward model", "\n".join((scores, *reward_model_notes(model, session.model_spec))))
