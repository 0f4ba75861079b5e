"""Checks that the model's own answer ends: generates one greedily and looks for an end that is no end token."""

from __future__ import annotations

import jax

from app.model.decoder import Params
from app.model.lora import combine_params
from app.preflight.check_results import CheckRecorder
from app.prompts.turn_end import overlooked_end, set_eos_token
from app.records.sample import Prompt, Sample
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.runtime.generators import open_continuous_batching
from app.runtime.session import Session

MAX_ANSWER_TOKENS = 128
"""Most tokens of the answer: the largest model that the checks load writes them in half a minute."""
MAX_SHOWN_CHARACTERS = 120
"""Maximum number of characters shown of the end of the answer."""


def check_answer(recorder: CheckRecorder, session: Session, params: Params, prompt: Prompt) -> None:
    """Checks that the greedy answer to a prompt has no end that the sampler overlooks. All hosts must call it together.

    Args:
        params: the weights of `model.path`, as `ScoringSession.load_params` returns them.
    """
    sample, tokenizer = _greedy_answer(session, params, prompt), session.model_spec.tokenizer
    ids = sample.completion_ids.tolist()
    place = overlooked_end(ids, tokenizer)
    text = tokenizer.decode_with_special_tokens(ids if place is None else ids[: place + 1])
    shown = repr(text if len(text) <= MAX_SHOWN_CHARACTERS else f"...{text[-MAX_SHOWN_CHARACTERS:]}")
    if place is not None:
        name = tokenizer.decode_with_special_tokens([ids[place]])
        found = f"the likeliest answer goes on behind the control token {name!r}, which is no end token: {shown}"
        recorder.warn("answer", found, f"if {name} ends a turn, set {set_eos_token(tokenizer, ids[place])}")
    else:
        ends = "ends" if sample.finish_reason == "stop" else "has not ended"
        recorder.ok("answer", f"the likeliest one {ends} after {len(ids)} tokens: {shown}")


def _greedy_answer(session: Session, params: Params, prompt: Prompt) -> Sample:
    """Returns one sample at temperature 0, from an engine of its own. All hosts must call it together."""
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
