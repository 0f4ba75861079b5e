"""What `grpo gae` says of a file when it is done, and on the way."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32

from app.advantage.gae.backend_choice import BackendChoice, choose_backend
from app.records.moments import EMPTY_MOMENTS, Moments, compute_moments, merge_moments
from settings import Resolved, Settings
from settings.errors import InputError
from settings.schema.settings import AlgorithmSettings

CHUNKED_BACKENDS = frozenset({"chunked"})
"""Backends that have a chunk size."""
NON_GAE_ESTIMATORS = frozenset({"vtrace", "reinforce_plus_plus"})
"""Estimators that credit each token otherwise than GAE."""
PROGRESS_INTERVAL_S = 2.0
AdvantageTransform = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(advantages, mask) -> the advantages that are written."""


def choose_gae_backend(algorithm: AlgorithmSettings, shape: tuple[int, ...], *, is_masked: bool) -> BackendChoice:
    """The backend that solves rows of this shape, and why. `is_masked`: by a mask or by ends of sequences."""
    return choose_backend(
        algorithm.gae_backend,
        shape,
        constant_decay=not is_masked and algorithm.length_adaptive_lam is None,
        chunk_size=algorithm.gae_chunk_size,
    )


@dataclass
class GaeSummary:
    """What has gone by."""

    row_name: str
    """What the rows are called."""
    num_rows: int = 0
    num_tokens: int = 0
    num_trainable: int = 0
    num_windows: int = 0
    num_unused_bootstraps: int = 0
    """Samples that were cut and have a value behind their last token, which the settings leave out."""
    advantages: Moments = EMPTY_MOMENTS
    """As they are written."""
    returns: Moments = EMPTY_MOMENTS
    choice: BackendChoice | None = None
    """Of the first window: the last may be smaller."""

    def add(
        self,
        advantages: Float32[np.ndarray, "*any"],
        returns: Float32[np.ndarray, "*any"],
        mask: Bool[np.ndarray, "*any"],
        *,
        num_rows: int,
    ) -> None:
        self.num_windows += 1
        self.num_rows += num_rows
        self.num_tokens += mask.size
        self.num_trainable += int(mask.sum())
        self.advantages = merge_moments([self.advantages, compute_moments(advantages, mask)])
        self.returns = merge_moments([self.returns, compute_moments(returns, mask)])

    def metrics(self, settings: Settings) -> dict[str, Any]:
        algorithm = settings.algorithm
        alpha = algorithm.length_adaptive_lam
        figures: dict[str, Any] = {
            self.row_name: self.num_rows,
            "tokens": self.num_tokens,
            "trainable tokens": self.num_trainable,
            "gamma": algorithm.gamma,
            "lambda": algorithm.lam if alpha is None else f"1 - 1 / ({alpha} x tokens)",
        }
        if settings.critic.lam is not None:
            figures["lambda of returns"] = settings.critic.lam
        figures["mask mode"] = algorithm.mask_mode
        if self.choice is not None:
            figures["backend"] = describe_choice(self.choice)
        return figures | {
            "windows": self.num_windows,
            "mean advantage": round(self.advantages.mean, 6),
            "std of advantages": round(self.advantages.population_std, 6),
            "mean return": round(self.returns.mean, 6),
            "std of returns": round(self.returns.population_std, 6),
        }


def describe_choice(choice: BackendChoice) -> str:
    """`chunked in chunks of 64 (why)`."""
    size = choice.chunk_size
    return f"{choice.backend}{'' if size is None else f' in chunks of {size}'} ({choice.reason})"


def check_trainable(path: Path, row_name: str, *, num_rows: int, num_tokens: int, num_trainable: int) -> None:
    """Raises InputError where no token counts."""
    if num_tokens and not num_trainable:
        raise InputError(f"{path}: the mask of all {num_rows:,} {row_name} is False throughout; nothing to credit")


def unapplied_settings(resolved: Resolved, summary: GaeSummary, *, has_logprobs: bool) -> list[str]:
    """Settings by which training would credit otherwise, and what became of them here."""
    algorithm = resolved.settings.algorithm

    def named(field: str) -> str:
        return f"algorithm.{field} = {getattr(algorithm, field)!r} (from {resolved.origin(f'algorithm.{field}')})"

    notes = []
    if algorithm.estimator in NON_GAE_ESTIMATORS:
        notes.append(f"{named('estimator')}: this is GAE")
    if algorithm.kl_in_reward and not has_logprobs:
        notes.append(f"{named('beta')}: matrices hold no logprobs for a KL penalty")
    if algorithm.kl_in_reward and has_logprobs and algorithm.kl_target is not None:
        notes.append(f"{named('kl_target')}: the penalty's weight stays algorithm.beta, as in a run's first step")
    if summary.num_unused_bootstraps:
        notes.append(
            f"the value behind the last token of {summary.num_unused_bootstraps:,} samples of finish_reason length, by "
            f"{named('bootstrap_truncated')}"
        )
    if algorithm.gae_chunk_size is not None and summary.choice and summary.choice.chunk_size is None:
        notes.append(f"{named('gae_chunk_size')}: {summary.choice.backend} has no chunks")
    return notes


@dataclass
class ProgressPrinter:
    """Lines on stderr, while something takes long."""

    last_printed_s: float = field(default_factory=time.monotonic)

    def print_line(self, line: str) -> None:
        now = time.monotonic()
        if now - self.last_printed_s >= PROGRESS_INTERVAL_S:
            self.last_printed_s = now
            print(line, file=sys.stderr, flush=True)
