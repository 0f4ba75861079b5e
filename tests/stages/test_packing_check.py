"""Tests of the check of packed rows, on real sessions with eight devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import app.model.decoder as decoder
from app.model.segment_layout import single_segment_layout
from app.records.sample import Sample
from app.runtime.scoring import ScoringSession
from app.stages.score import check_packing
from app.training.setup import prepare_run
from settings import load
from tests.tiny import random_samples


@pytest.fixture
def session(config: Path) -> Iterator[ScoringSession]:
    with prepare_run(load(str(config), [], {}), resume="never") as launch:
        yield launch.session.scoring


@pytest.fixture
def samples(session: ScoringSession) -> list[Sample]:
    """Returns three samples, of which the first and the last have the same prompt."""
    first, sibling, second = random_samples(2, 2, vocab_size=session.model_spec.architecture.vocab_size)[:3]
    return [first, second, sibling]


def test_samples_in_a_shared_row_score_as_they_do_alone(session: ScoringSession, samples: list[Sample]) -> None:
    assert check_packing(session, session.load_params(), samples) <= 1e-4


def test_attention_that_leaks_is_refused(
    session: ScoringSession, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention treats every row as one sequence, like a backend that ignores segment ids."""
    attention = decoder.packed_attention

    def leaking(query: Any, keys: Any, values: Any, layout: Any, **rest: Any) -> Any:
        everything = single_segment_layout(jnp.ones(layout.segment_ids.shape, bool))
        rest["pairs"] = None
        return attention(query, keys, values, everything, **rest)

    monkeypatch.setattr(decoder, "packed_attention", leaking)
    with pytest.raises(RuntimeError, match=r"attention leaks .* score\.dynamic: false"):
        check_packing(session, session.load_params(), samples)
    # Of one prompt, or one and the same sample three times: strangers all the same.
    first, _, sibling = samples
    for related in ([first, sibling], [first] * 3):
        with pytest.raises(RuntimeError, match="attention leaks"):
            check_packing(session, session.load_params(), related)


def test_weights_that_give_no_number_are_not_taken_for_a_leak(session: ScoringSession, samples: list[Sample]) -> None:
    broken = jax.tree.map(lambda x: x * np.nan, session.load_params())
    assert check_packing(session, broken, samples) == 0.0
