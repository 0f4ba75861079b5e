"""Accuracy of several samples per prompt: pass@k and majority vote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Computes pass@k = 1 - C(n - c, k) / C(n, k), with c of n samples correct.

    This is the probability that k samples, drawn without replacement, contain a correct one. It is an unbiased estimate
    for k new samples.

    Source: Chen et al. 2021, Evaluating large language models trained on code, equation 1.

    Raises:
        ValueError: there are fewer than k samples.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples")
    # Python's integers are exact, so that only the quotient is rounded.
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_vote_accuracy(answers: Sequence[Hashable | None], reference: Hashable) -> float:
    """Returns the probability that the most frequent answer is correct, with ties broken at random.

    It is 1/t if the reference is one of t most frequent answers, else 0. Samples without an answer (None) do not vote;
    without any vote the result is 0.

    Source: Wang et al. 2022, Self-consistency improves chain of thought reasoning in language models.
    """
    counts = Counter(vote for vote in answers if vote is not None)
    most = max(counts.values(), default=0)
    winners = [vote for vote, count in counts.items() if count == most]
    return 1 / len(winners) if reference in winners else 0.0
