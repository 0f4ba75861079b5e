"""A curriculum: samples prompts less often if the policy always or never solves them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from app.prompts.prompt_order import Indices

FLOOR = 0.02
"""Added to the weight of every prompt, so that prompts with pass rate 0 or 1 are still sampled."""
NEWEST_SHARE = 0.5
"""Weight of the newest observation in a running pass rate; earlier ones come from older policies."""
LOW_RATE, HIGH_RATE = 0.1, 0.9
"""Bounds for "never" and "always" in the metrics, since a running pass rate only approaches 0 and 1."""


class PassRateOrder:
    """Samples the prompts of each round without replacement, with weights p (1 - p) + `FLOOR` for running pass rates p.

    p (1 - p) is the variance of a reward of 0 or 1, which drives group-relative learning. An unseen prompt counts as p
    = 1/2. In a mixture, the weights of each source's prompts sum to its share.

    Draws depend only on the seed, the position and the observations so far, so all hosts with the same observations
    draw the same prompts. A prompt is not drawn again before it is observed, so no step has it twice.

    Source: Rutherford et al. 2024 (SFL) and Foster et al. 2025, for the weights; Efraimidis and Spirakis 2006, for
    drawing by one sort.

    Args:
        uids: the uid of the prompt in each row.
        rows: the row indices of each source.
        shares: the fraction of prompts to draw from each source, up to a common factor.
    """

    def __init__(self, seed: int, uids: Sequence[str], rows: Sequence[Indices], shares: Sequence[float]) -> None:
        self._seed, self._sources = seed, list(zip(rows, shares, strict=True))
        self._places = {uid: place for place, uid in enumerate(dict.fromkeys(uids))}
        self._place_of_row = np.array([self._places[uid] for uid in uids])
        self.pass_rates: dict[str, float] = {}
        """Uid -> running pass rate of each seen prompt."""
        self._rates, self._is_pending = np.full(len(self._places), 0.5), np.zeros(len(self._places), bool)
        """For each uid: its running pass rate (1/2 if unseen), and whether it is drawn and not yet observed."""

    def row_indices(self, position: int, count: int) -> Indices:
        """Returns the row indices of the next round; see `PromptOrder.row_indices`."""
        rates = self._rates[self._place_of_row]
        weights = rates * (1 - rates) + FLOOR
        for rows, share in self._sources:
            weights[rows] *= share / weights[rows].sum()
        # Among exponential times with these rates, a prompt's comes first with probability proportional to its weight.
        times = np.random.default_rng([self._seed, position]).standard_exponential(len(weights)) / weights
        drawn = np.lexsort((times, self._is_pending[self._place_of_row]))[:count]
        self._is_pending[self._place_of_row[drawn]] = True
        return drawn

    def observe(self, pass_rates: Iterable[tuple[str, float | None]]) -> None:
        """Updates the running pass rates with (uid, pass rate) of each prompt just sampled; None if it was not graded.

        The first observation of a prompt sets its rate, so that observing saved `pass_rates` restores them.
        """
        # The data of a resumed run may have changed.
        for uid, rate in (one for one in pass_rates if one[0] in self._places):
            self._is_pending[self._places[uid]] = False
            if rate is not None:
                before = self.pass_rates.get(uid, rate)
                self.pass_rates[uid] = self._rates[self._places[uid]] = before + NEWEST_SHARE * (rate - before)

    def metrics(self) -> dict[str, float]:
        """Returns the fraction of prompts seen, and the distribution of their pass rates (NaN if none was seen)."""
        seen = np.array(list(self.pass_rates.values()))
        shares = {"low": seen < LOW_RATE, "middle": (seen >= LOW_RATE) & (seen <= HIGH_RATE), "high": seen > HIGH_RATE}
        return {
            "data/seen_fraction": len(seen) / len(self._place_of_row),
            "data/pass_rate_mean": float(seen.mean()) if len(seen) else np.nan,
            **{f"data/pass_rate_{name}_fraction": is_in.sum() / max(len(seen), 1) for name, is_in in shares.items()},
        }
