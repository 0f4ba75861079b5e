"""95 % confidence intervals of means over prompts, and a test of paired differences.

Prompts are drawn at random; the samples of one prompt form a cluster and are not independent trials.
Source: Miller 2024, Adding error bars to evals.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

Interval = tuple[float, float]
"""Lower and upper bound."""

CONFIDENCE = 0.95
NORMAL_QUANTILE = 1.959964
"""The 97.5 % quantile of the normal distribution."""


class MetricEstimate(NamedTuple):
    """The value of a metric and its confidence interval."""

    value: float | None
    """The value; None if no sample has one."""
    interval: Interval | None
    """The 95 % interval; None if the data do not determine one."""


def wilson_interval(share: float, count: float) -> Interval:
    """Returns Wilson's 95 % interval of a proportion in `count` trials; `count` may be fractional.

    The interval is (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) with z = 1.96.

    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference.
    """
    # scipy's binomtest has this interval only for integer counts.
    denominator = 1 + NORMAL_QUANTILE**2 / count
    centre = (share + NORMAL_QUANTILE**2 / (2 * count)) / denominator
    half = NORMAL_QUANTILE * math.sqrt(share * (1 - share) / count + NORMAL_QUANTILE**2 / (4 * count**2)) / denominator
    return max(centre - half, 0.0), min(centre + half, 1.0)


def clustered_share_interval(shares: Float64[np.ndarray, "P"], *, num_samples: int) -> Interval | None:
    """Returns the interval of the mean pass rate over prompts with `num_samples` samples each; None for one prompt.

    This is Wilson's interval for n = p (1 - p) / (s^2 / P) trials, with p the mean of the pass rates and s^2 their
    variance (ddof = 0). n is the number of independent trials that would determine the mean equally well: P for rates
    of 0 and 1, fewer than the number of samples if a prompt's samples are alike, and never more.

    Source: Korn and Graubard 1998, Confidence intervals for proportions with small expected number of positive counts.
    """
    num_prompts = len(shares)
    if num_prompts < 2:
        return None
    mean, variance = float(shares.mean()), float(shares.var())
    spread = mean * (1 - mean)
    # If all are right or all wrong, the data do not show how much information further samples of a prompt add.
    count = num_prompts if spread == 0 else num_prompts * min(spread / variance if variance else math.inf, num_samples)
    # Only rounding can make the variance exceed the spread.
    return wilson_interval(mean, max(count, num_prompts))


def mean_interval(values: Float64[np.ndarray, "P"]) -> Interval | None:
    """Returns Student's t interval of the mean over prompts with one value each; None for one prompt or equal values.

    The interval is m +- t s / sqrt(P), with s^2 the variance (ddof = 1) and t Student's 97.5 % quantile for P - 1
    degrees of freedom.
    """
    num_prompts = len(values)
    if num_prompts < 2 or (values == values[0]).all():
        return None
    from scipy import stats  # imported here, because it takes most of a second

    error = values.std(ddof=1) / math.sqrt(num_prompts)
    low, high = stats.t.interval(CONFIDENCE, num_prompts - 1, loc=values.mean(), scale=error)
    return float(low), float(high)


def sign_test(num_better: int, num_worse: int) -> float:
    """Returns the two-sided p-value of the exact sign test; null hypothesis: better and worse are equally likely.

    For answers that are right or wrong, this is the exact binomial form of McNemar's test.

    Source: McNemar 1947, Note on the sampling error of the difference between correlated proportions.
    """
    from scipy import stats

    num_changed = num_better + num_worse
    return float(stats.binomtest(num_better, num_changed).pvalue) if num_changed else 1.0
