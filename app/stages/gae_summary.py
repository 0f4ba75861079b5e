"""Summary of `grpo gae`: counts and moments of the output, the backend, and the settings not applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32

from app.advantage.gae.backend_choice import BackendChoice, choose_backend
from app.records.moments import EMPTY_MOMENTS, Moments, compute_moments, merge_moments
from settings import Resolved
from settings.errors import InputError

NON_GAE_ESTIMATORS = frozenset({"vtrace", "reinforce_plus_plus"})
"""Estimators for which training does not use GAE."""
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
    num_unused_bootstraps: int = 0
    """Number of truncated samples whose value after the last token is ignored under these settings."""
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

    def metrics(self, resolved: Resolved, *, has_logprobs: bool) -> dict[str, Any]:
        """Returns the entries of the summary to print, by name."""
        settings = resolved.settings
        algorithm = settings.algorithm
        alpha = algorithm.length_adaptive_lam
        metrics: dict[str, Any] = {
            self.row_name: self.num_rows,
            "tokens": self.num_tokens,
            "trainable tokens": self.num_trainable,
            "gamma": algorithm.gamma,
            "lambda": algorithm.lam if alpha is None else f"1 - 1 / ({alpha} x tokens)",
        }
        if settings.critic.lam is not None:
            metrics["lambda of returns"] = settings.critic.lam
        metrics["mask mode"] = algorithm.mask_mode
        choice = choose_backend(algorithm.gae_backend, one_decay=alpha is None, chunk_size=algorithm.gae_chunk_size)
        chunks = "" if choice.chunk_size is None else f" in chunks of {choice.chunk_size}"
        metrics["backend"] = f"{choice.backend}{chunks} ({choice.reason})"
        metrics |= {
            "mean advantage": round(self.advantages.mean, 6),
            "std of advantages": round(self.advantages.population_std, 6),
            "mean return": round(self.returns.mean, 6),
            "std of returns": round(self.returns.population_std, 6),
        }
        if notes := self._unapplied_settings(resolved, choice, has_logprobs=has_logprobs):
            metrics["not applied"] = "; ".join(notes)
        return metrics

    def _unapplied_settings(self, resolved: Resolved, choice: BackendChoice, *, has_logprobs: bool) -> list[str]:
        """Returns the settings that change advantages in training but are not applied here, each with the reason."""
        algorithm = resolved.settings.algorithm

        def named(field: str) -> str:
            return f"algorithm.{field} = {getattr(algorithm, field)!r} (from {resolved.origin(f'algorithm.{field}')})"

        notes = []
        if algorithm.estimator in NON_GAE_ESTIMATORS:
            notes.append(f"{named('estimator')}: `grpo gae` always computes GAE")
        if algorithm.kl_in_reward and not has_logprobs:
            notes.append(f"{named('beta')}: matrices hold no logprobs for a KL penalty")
        if algorithm.kl_in_reward and has_logprobs and algorithm.kl_target is not None:
            notes.append(f"{named('kl_target')}: the penalty's weight stays algorithm.beta, as in a run's first step")
        if self.num_unused_bootstraps:
            notes.append(
                f"the value after the last token of {self.num_unused_bootstraps:,} samples with finish_reason length, "
                f"because of {named('bootstrap_truncated')}"
            )
        if algorithm.gae_chunk_size is not None and choice.chunk_size is None:
            notes.append(f"{named('gae_chunk_size')}: {choice.backend} has no chunks")
        return notes
