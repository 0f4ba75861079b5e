"""GAE under the settings, on windows of host arrays: what `grpo gae` does to a file, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Float32

from app.advantage.gae.choice import Choice, choose
from app.advantage.gae.estimate import generalized_advantages
from app.advantage.token_credit import adaptive_lam
from settings import Settings

UNREAD_WHERE_MASKED = ("skip", "zero")
"""Mask modes in which nothing is made of what stands at masked tokens."""


class Window(NamedTuple):
    """Rows that are estimated together."""

    rewards: Float32[np.ndarray, "B T"]
    values: Float32[np.ndarray, "B T"] | Float32[np.ndarray, "B T+1"]
    mask: Bool[np.ndarray, "B T"] | None
    """True where the policy wrote the token; None = everywhere."""
    lengths: Float32[np.ndarray, "B T"]
    """How many tokens the policy wrote of the sequence that the token belongs to."""
    ends: Bool[np.ndarray, "B T"] | None = None
    bootstrap: Float32[np.ndarray, "B T"] | None = None


class HostCredit(NamedTuple):
    advantages: Float32[np.ndarray, "B T"]
    returns: Float32[np.ndarray, "B T"]


@dataclass(frozen=True)
class Estimator:
    """`algorithm.gamma`, `.lam`, ... as one function."""

    gamma: float
    lam: float
    critic_lam: float | None
    """Lambda of the returns; None = that of the advantages."""
    length_adaptive_lam: float | None
    """VAPO's alpha; None = `lam` for every length."""
    mask_mode: str
    backend: str
    chunk_size: int | None

    @classmethod
    def of(cls, settings: Settings) -> Self:
        algorithm = settings.algorithm
        return cls(
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            critic_lam=settings.critic.lam,
            length_adaptive_lam=algorithm.length_adaptive_lam,
            mask_mode=algorithm.mask_mode,
            backend=algorithm.gae_backend,
            chunk_size=algorithm.gae_chunk_size,
        )

    def credit(self, window: Window) -> HostCredit:
        """Advantages and returns, 0 where masked; returns = advantages + values by the critic's lambda."""
        lam = (
            self.lam
            if self.length_adaptive_lam is None
            else adaptive_lam(window.lengths, alpha=self.length_adaptive_lam)
        )
        credit = self._estimate(window, lam)
        # The same lambda for both unless one of them is set apart.
        apart = self.critic_lam if self.critic_lam is not None else self.lam
        if isinstance(lam, float) and lam == apart:
            return credit
        return credit._replace(returns=self._estimate(window, apart).returns)

    def choice(self, window: Window) -> Choice:
        """The backend that solves such windows, and why."""
        one_leak = self.length_adaptive_lam is None and window.mask is None and window.ends is None
        return choose(self.backend, window.rewards.shape, one_leak=one_leak, chunk_size=self.chunk_size)

    def reads_where_masked(self) -> bool:
        return self.mask_mode not in UNREAD_WHERE_MASKED

    def _estimate(self, window: Window, lam: float | np.ndarray) -> HostCredit:
        credit = generalized_advantages(
            window.rewards,
            window.values,
            gamma=self.gamma,
            lam=lam,
            mask=window.mask,
            ends=window.ends,
            bootstrap=window.bootstrap,
            mask_mode=self.mask_mode,
            backend=self.backend,
            chunk_size=self.chunk_size,
        )
        return HostCredit(*map(np.asarray, credit))
