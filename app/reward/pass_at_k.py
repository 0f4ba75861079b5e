"""What several answers to one question are worth together: one of them is right, or most of them are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """How likely k of a prompt's samples, chosen without replacement, hold a right one.

    1 - C(n - c, k) / C(n, k), for c right ones of n: unbiased for k fresh samples.

    Source: Chen et al. 2021, Evaluating large language models trained on code, equation 1.

    Raises:
        ValueError: there are no k samples.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples")
    # Integers of any size: the quotient is rounded once.
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_vote_accuracy(answers: Sequence[Hashable | None], reference: Hashable) -> float:
    """How likely the most frequent answer is the right one, where ties are broken by chance.

    1/t where the right answer is among t that are the most frequent, else 0. Samples without an answer (None) do not
    vote; where none votes, nothing is right.

    Source: Wang et al. 2022, Self-consistency improves chain of thought reasoning in language models.
    """
    counts = Counter(vote for vote in answers if vote is not None)
    most = max(counts.values(), default=0)
    winners = [vote for vote, count in counts.items() if count == most]
    return 1 / len(winners) if reference in winners else 0.0
