"""A curriculum: prompts that the policy solves sometimes are sampled more often than always or never solved ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from app.prompts.prompt_order import Indices

FLOOR = 0.02
"""Weight of a prompt with pass rate 0 or 1, so that none is dropped forever; at pass rate 1/2 it is 1/4 + `FLOOR`."""
NEWEST_SHARE = 0.5
"""Weight of the newest observation in a running pass rate; earlier ones come from older policies."""
LOW_RATE, HIGH_RATE = 0.1, 0.9
"""Bounds for "never" and "always" in the metrics, since a running pass rate only approaches 0 and 1."""


class PassRateOrder:
    """Samples the prompts of each round without replacement, with weights p (1 - p) + `FLOOR`, p = running pass rate.

    p (1 - p) is the variance of a reward of 0 or 1, which drives group-relative learning. An unseen prompt counts as p
    = 1/2. In a mixture, the weights of each source's prompts sum to its share.

    Draws depend only on seed, position and observations so far, on any number of hosts that draw the same rounds and
    make the same observations. A prompt is not drawn again before it is observed, so no step has it twice.

    Source: Rutherford et al. 2024 (SFL) and Foster et al. 2025, for the weights; Efraimidis and Spirakis 2006, for
    drawing by one sort.

    Args:
        uids: uids of all prompts.
        rows: the rows of each source.
        shares: the weight of each source.
    """

    def __init__(self, seed: int, uids: Sequence[str], rows: Sequence[Indices], shares: Sequence[float]) -> None:
        self._seed = seed
        self._row_of = {uid: row for row, uid in enumerate(uids)}
        self._sources = list(zip(rows, shares, strict=True))
        self._pass_rates = np.full(len(uids), np.nan)
        """The running pass rate of each prompt; NaN if it is unseen."""
        self._is_pending = np.zeros(len(uids), bool)
        """Whether each prompt has been drawn and not yet observed."""

    def row_indices(self, position: int, count: int) -> Indices:
        """Draws the next round; see `PromptOrder.row_indices`."""
        rates = np.nan_to_num(self._pass_rates, nan=0.5)
        weights = rates * (1 - rates) + FLOOR
        for rows, share in self._sources:
            weights[rows] *= share / weights[rows].sum()
        # Among exponential times with these rates, a prompt's comes first with probability proportional to its weight.
        times = np.random.default_rng([self._seed, position]).standard_exponential(len(weights)) / weights
        drawn = np.lexsort((times, self._is_pending))[:count]
        self._is_pending[drawn] = True
        return drawn

    def observe(self, pass_rates: Iterable[tuple[str, float | None]]) -> None:
        """Updates running pass rates with the latest samples' pass rates; None if nothing graded them.

        The first observation of a prompt sets its rate, so that observing saved `pass_rates` restores them.
        """
        for uid, rate in pass_rates:
            # The data of a resumed run may have changed.
            if (row := self._row_of.get(uid)) is None:
                continue
            self._is_pending[row] = False
            if rate is not None:
                before = self._pass_rates[row]
                self._pass_rates[row] = rate if np.isnan(before) else before + NEWEST_SHARE * (rate - before)

    @property
    def pass_rates(self) -> dict[str, float]:
        """Uid -> running pass rate of each seen prompt."""
        rates, is_seen = self._pass_rates.tolist(), (~np.isnan(self._pass_rates)).tolist()
        return {uid: rates[row] for uid, row in self._row_of.items() if is_seen[row]}

    def metrics(self) -> dict[str, float]:
        """Returns the fraction of prompts seen, and the distribution of their pass rates (NaN if none was seen)."""
        seen = self._pass_rates[~np.isnan(self._pass_rates)]
        shares = {"low": seen < LOW_RATE, "middle": (seen >= LOW_RATE) & (seen <= HIGH_RATE), "high": seen > HIGH_RATE}
        return {
            "data/seen_fraction": len(seen) / len(self._pass_rates),
            "data/pass_rate_mean": float(seen.mean()) if len(seen) else np.nan,
            **{f"data/pass_rate_{name}_fraction": is_in.sum() / max(len(seen), 1) for name, is_in in shares.items()},
        }
