"""Tests that completions end at stop strings, at the same token with every generator."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.records.sample import Sample
from app.rollout.engine.engine import SlotEngine
from app.rollout.sequence import stop_length
from app.rollout.workers.async_generation import AsyncRollout
from app.rollout.workers.worker import RolloutWorker
from tests.rollout.test_scheduled_workers import EAGER, bits, mesh_of, scheduled
from tests.rollout.test_slot_engine import (
    GROUP_SIZE,
    LONGEST,
    PROMPTS,
    REQUEST,
    batching,
    new_slots,
    unlimited_slots,
    weights_on,
)
from tests.tiny import spell

STOP = ("1 4", "22")
UNSTOPPED = replace(REQUEST, max_new_tokens=LONGEST)
STOPPED = replace(UNSTOPPED, stop=STOP)


def of_bytes(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", "replace")


def first_stop(token_ids: Sequence[int], stop: Sequence[str], decode_text) -> int | None:
    """The slow oracle: tries every length in turn."""
    lengths = range(1, len(token_ids) + 1)
    return next((n for n in lengths if any(s in decode_text(token_ids[:n]) for s in stop)), None)


@given(
    st.lists(st.sampled_from(list("aé€🙂".encode())), max_size=40), st.lists(st.text("aé€🙂", min_size=1), max_size=3)
)
def test_the_first_token_that_completes_a_stop_string_is_found(token_ids: list[int], stop: list[str]) -> None:
    assert stop_length(token_ids, stop, of_bytes) == first_stop(token_ids, stop, of_bytes)


def of_fallback_bytes(token_ids: Sequence[int]) -> str:
    """As the decoder of SentencePiece's byte tokens: a run of them that is no UTF-8 is decoded to no character."""
    try:
        return bytes(token_ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(token_ids)


@given(
    st.text("a\n€🙂", max_size=20), st.integers(0, 60), st.lists(st.text("a\n€🙂", min_size=1), min_size=1, max_size=3)
)
def test_a_stop_string_is_found_before_a_character_of_several_byte_tokens(text: str, cut: int, stop: list[str]) -> None:
    token_ids = list(text.encode())[:cut]
    assert stop_length(token_ids, stop, of_fallback_bytes) == first_stop(token_ids, stop, of_fallback_bytes)


@pytest.mark.parametrize(
    ("text", "length"),
    [("no", None), ("1 + 1\n\nQ", 7), ("\n\n", 2), ("Question\n\n", 9), ("Question:", 9), ("Ques", None)],
)
def test_a_completion_ends_with_whichever_stop_string_is_complete_first(text: str, length: int | None) -> None:
    assert stop_length(list(text.encode()), ("Question:", "\n\n", "n\n"), of_bytes) == length


@functools.cache
def cut_by_hand() -> list[Sample]:
    """Samples without stop strings, cut afterwards."""
    samples = unlimited_slots().generate(weights_on(), PROMPTS, UNSTOPPED)
    cut = []
    for sample in samples:
        length = first_stop(sample.completion_ids.tolist(), STOP, spell)
        reason = sample.finish_reason if length is None else "stop"
        ids, logprobs = sample.completion_ids[:length], sample.behavior_logprobs[:length]
        cut.append(replace(sample, finish_reason=reason, completion_ids=ids, behavior_logprobs=logprobs))
    return cut


def slots(number: int = 0, *, exact: bool = False) -> SlotEngine:
    engine = new_slots(4, exact=exact, decode_text=spell)
    return (
        engine
        if number == 0
        else SlotEngine(
            *(engine.programs.definition, mesh_of(number), engine.shapes),
            eos_ids=(),
            dtype=np.dtype("float32"),
            exact=exact,
            decode_text=spell,
        )
    )


def tokens_of(samples: Sequence[Sample]) -> list[tuple[str, str, list[int]]]:
    return [(s.uid, s.finish_reason, s.completion_ids.tolist()) for s in samples]


def test_a_slot_for_each_sample_ends_it_at_its_stop_string_and_changes_nothing_before() -> None:
    samples = unlimited_slots().generate(weights_on(), PROMPTS, STOPPED)
    assert bits(samples) == bits(cut_by_hand())
    num_stopped = sum(sample.finish_reason == "stop" for sample in samples)
    assert 3 <= num_stopped < len(samples)
    for sample in samples:
        assert sample.completion == spell(sample.completion_ids.tolist())


@pytest.mark.parametrize("exact", [True, False])
def test_slots_end_samples_alike_and_are_free_earlier(exact: bool) -> None:
    made = batching(slots(exact=exact), max=2)
    assert tokens_of(made.generate(weights_on(), PROMPTS, UNSTOPPED)) == tokens_of(
        unlimited_slots().generate(weights_on(), PROMPTS, UNSTOPPED)
    )
    num_unstopped = made.take_counters().generated_tokens
    assert tokens_of(made.generate(weights_on(), PROMPTS, STOPPED)) == tokens_of(cut_by_hand())
    num_kept = sum(len(sample.completion_ids) for sample in cut_by_hand())
    # A row is found after its segment, of at most two tokens, and leaves after the next one.
    assert num_kept < made.take_counters().generated_tokens <= num_kept + 4 * len(cut_by_hand()) < num_unstopped


def test_scheduled_workers_end_samples_alike() -> None:
    made = scheduled(
        [RolloutWorker("fast-0", "fast", slots()), RolloutWorker("heavy-0", "heavy", slots(1))],
        "pdsr_v2",
        in_turn=True,
        pdsr=EAGER,
    )
    samples = made.generate(weights_on(), PROMPTS, STOPPED)
    assert tokens_of(samples) == tokens_of(cut_by_hand())
    assert made.take_counters().generated_tokens < len(samples) * LONGEST


def test_generation_during_training_ends_samples_alike() -> None:
    made = scheduled([RolloutWorker("fast-0", "fast", slots())], in_turn=True)
    with closing(AsyncRollout(made, weights_on(), STOPPED)) as rollout:
        rollout.submit(PROMPTS, noise_step=STOPPED.policy_version)
        samples = rollout.collect_round()
    assert tokens_of(samples) == tokens_of(cut_by_hand())
    assert [sample.group_id for sample in samples] == [i // GROUP_SIZE for i in range(len(samples))]
