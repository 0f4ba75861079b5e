"""Tests of the check of packed rows, on real sessions with eight devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import app.model.decoder as decoder
from app.model.segment_layout import single_segment_layout
from app.runtime.packed_row_check import check_packing, random_samples
from app.runtime.session import Session
from app.training.setup import prepare_run
from settings import load
from tests.tiny_directory import write_model


@pytest.fixture
def session(config: Path) -> Iterator[Session]:
    with prepare_run(load(str(config), [], {}), resume="never") as launch:
        yield launch.session


def test_three_random_samples_share_a_row_two_of_them_a_prompt(session: Session) -> None:
    samples = random_samples(session)
    prompts = [s.prompt.token_ids.tobytes() for s in samples]
    assert prompts[0] == prompts[2] != prompts[1]
    assert sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples) > 256
    assert check_packing(session, session.load_params(), samples) <= 1e-4


def test_attention_that_leaks_is_refused(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention treats every row as one sequence, like a backend that ignores segment ids."""
    attention = decoder.packed_attention

    def leaking(query: Any, keys: Any, values: Any, layout: Any, **rest: Any) -> Any:
        everything = single_segment_layout(jnp.ones(layout.segment_ids.shape, bool))
        rest["pairs"] = None
        return attention(query, keys, values, everything, **rest)

    monkeypatch.setattr(decoder, "packed_attention", leaking)
    with pytest.raises(RuntimeError, match=r"attention leaks .* score\.dynamic: false"):
        check_packing(session, session.load_params(), random_samples(session))
    # Of one prompt, or one and the same sample three times: strangers all the same.
    first, _, sibling = random_samples(session)
    for samples in ([first, sibling], [first] * 3):
        with pytest.raises(RuntimeError, match="attention leaks"):
            check_packing(session, session.load_params(), samples)


def test_a_critic_of_another_architecture_is_looked_at_too(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, other = decoder.packed_attention, write_model(config.parent / "other", num_attention_heads=2)

    def leaking(query: Any, keys: Any, values: Any, layout: Any, **rest: Any) -> Any:
        if query.shape[-2] == 4:
            return attention(query, keys, values, layout, **rest)
        everything = single_segment_layout(jnp.ones(layout.segment_ids.shape, bool))
        rest["pairs"] = None
        return attention(query, keys, values, everything, **rest)

    chosen = ["algorithm.name=ppo", f"critic.path={other}", "critic.max_tokens_per_device=32768"]

    def checked() -> float:
        with prepare_run(load(str(config), chosen, {}), resume="never") as launch:
            session = launch.session
            assert session.critic is not None
            critic = session.critic.load_params(session.mesh)
            return check_packing(session, session.load_params(), random_samples(session), critic=critic)

    assert checked() <= 1e-4
    monkeypatch.setattr(decoder, "packed_attention", leaking)
    with pytest.raises(RuntimeError, match="standard deviations: attention leaks"):
        checked()


def test_short_samples_are_looked_at_in_rows_of_several_blocks(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, lengths = decoder.packed_attention, []

    def watched(query: Any, keys: Any, values: Any, layout: Any, **rest: Any) -> Any:
        lengths.append(layout.segment_ids.shape[1])
        return attention(query, keys, values, layout, **rest)

    monkeypatch.setattr(decoder, "packed_attention", watched)
    short = [replace(s, completion_ids=s.completion_ids[:3]) for s in random_samples(session)]
    assert check_packing(session, session.load_params(), short) <= 1e-4
    assert set(lengths) == {384}


def test_weights_that_give_no_number_are_not_taken_for_a_leak(session: Session) -> None:
    broken = jax.tree.map(lambda x: x * np.nan, session.load_params())
    assert check_packing(session, broken, random_samples(session)) == 0.0
