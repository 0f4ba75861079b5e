"""Counts and moments of the output of `grpo gae`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32

from app.records.moments import EMPTY_MOMENTS, Moments, compute_moments, merge_moments
from settings.errors import InputError

AdvantageTransform = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Maps (advantages, mask) to the advantages to write."""


@dataclass
class GaeSummary:
    """Counts and moments of the rows written so far."""

    row_name: str
    """Name of the rows in messages: `rows` or `samples`."""
    num_rows: int = 0
    num_tokens: int = 0
    num_trainable: int = 0
    advantages: Moments = EMPTY_MOMENTS
    returns: Moments = EMPTY_MOMENTS

    def add(
        self,
        advantages: Float32[np.ndarray, "*any"],
        returns: Float32[np.ndarray, "*any"],
        mask: Bool[np.ndarray, "*any"],
        *,
        num_rows: int,
    ) -> None:
        self.num_rows += num_rows
        self.num_tokens += mask.size
        self.num_trainable += int(mask.sum())
        self.advantages = merge_moments([self.advantages, compute_moments(advantages, mask)])
        self.returns = merge_moments([self.returns, compute_moments(returns, mask)])

    def check_trainable(self, path: object, *, num_rows: int, num_tokens: int, num_trainable: int) -> None:
        """Raises InputError if the mask excludes every token."""
        if num_tokens and not num_trainable:
            raise InputError(
                f"{path}: the mask of all {num_rows:,} {self.row_name} is False throughout; no token gets an advantage"
            )
