"""Makes packed rows with given segments, and computes their attention mask in numpy."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from app.model.attention.dense import DEFAULT_SCORE_MOD, ScoreMod
from app.model.segment_layout import SegmentLayout

Lengths = tuple[int, tuple[int, ...]]
"""Numbers of tokens in the prompt of a segment and in each of its completions."""


def layout_of(rows: Sequence[Sequence[Lengths]], *, num_tokens: int) -> SegmentLayout:
    segment_ids, branch_ids, positions = (np.zeros((len(rows), num_tokens), np.int32) for _ in range(3))
    for row, segments in enumerate(rows):
        first = 0
        for segment_id, (prompt, completions) in enumerate(segments, start=1):
            branch = [0] * prompt
            position = list(range(prompt))
            for branch_id, length in enumerate(completions, start=1):
                branch += [branch_id if len(completions) > 1 else 0] * length
                position += range(prompt, prompt + length)
            at = np.s_[row, first : first + len(branch)]
            segment_ids[at], branch_ids[at], positions[at] = segment_id, branch, position
            first += len(branch)
    return SegmentLayout(*map(jnp.asarray, (segment_ids, branch_ids, positions)))


@st.composite
def segments_of_rows(draw: st.DrawFn, *, num_rows: int, num_tokens: int, longest: int) -> list[list[Lengths]]:
    """Returns rows of random segments, some with a shared prompt; full, nearly full, or with padding."""

    def row() -> list[Lengths]:
        segments, left = [], draw(st.integers(0, num_tokens))
        while left > 0:
            prompt = draw(st.integers(1, min(longest, left)))
            left -= prompt
            completions = []
            for _ in range(draw(st.integers(1, 3))):
                if left > 0:
                    completions.append(draw(st.integers(1, min(longest, left))))
                    left -= completions[-1]
            segments.append((prompt, tuple(completions)))
        return segments

    return [row() for _ in range(num_rows)]


def seen(layout: SegmentLayout, window: int | None = None) -> np.ndarray:
    """Returns the attention mask [R, T, T], computed for one pair of tokens at a time."""
    segment_ids, branch_ids, positions = map(np.asarray, layout)
    visible = np.zeros((*segment_ids.shape, segment_ids.shape[1]), bool)
    for row, query in np.argwhere(segment_ids > 0):
        for key in range(query + 1):
            of_prompt_or_own_branch = branch_ids[row, key] in (0, branch_ids[row, query])
            near = window is None or positions[row, query] - positions[row, key] < window
            same = segment_ids[row, query] == segment_ids[row, key]
            visible[row, query, key] = same and of_prompt_or_own_branch and near
    return visible


RULES = [DEFAULT_SCORE_MOD, ScoreMod(0.4, 0.6)]
