"""How far a figure over prompts may be from what it would be over all prompts there are: 95 % intervals and a test.

What is drawn at random is the prompt: several samples of one prompt are one cluster, and no independent trials.
Source: Miller 2024, Adding error bars to evals.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

Interval = tuple[float, float]
"""Low and high end."""


class MetricEstimate(NamedTuple):
    """A figure."""

    value: float | None
    """None where nothing measures it."""
    interval: Interval | None
    """95 %; None where nothing tells it."""


NORMAL_QUANTILE = 1.959964
"""The normal distribution's 97.5 % point."""

STUDENT_T_SMALL_DF = {1: 12.7062, 2: 4.3027}
"""Student's 97.5 % point for degrees of freedom at which its expansion is not good enough yet."""


def wilson_interval(share: float, count: float) -> Interval:
    """The 95 % confidence interval of a share that was observed in `count` trials.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), z = 1.96.

    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference.
    """
    denominator = 1 + NORMAL_QUANTILE**2 / count
    centre = (share + NORMAL_QUANTILE**2 / (2 * count)) / denominator
    half = NORMAL_QUANTILE * math.sqrt(share * (1 - share) / count + NORMAL_QUANTILE**2 / (4 * count**2)) / denominator
    return max(centre - half, 0.0), min(centre + half, 1.0)


def clustered_share_interval(shares: Float64[np.ndarray, "P"], *, num_samples: int) -> Interval | None:
    """Of the mean of shares, one of each prompt, that were each seen in `num_samples` samples. None for one prompt.

    Wilson's for n = p (1 - p) / (s^2 / P) trials, p the mean of the shares and s^2 their variance (ddof = 0): as many
    independent trials as would know the mean as well. That is P for shares of 0 and 1, fewer than there are samples
    where a prompt's samples are alike, and never more than there are samples.

    Source: Korn and Graubard 1998, Confidence intervals for proportions with small expected number of positive counts.
    """
    num_prompts = len(shares)
    if num_prompts < 2:
        return None
    mean, variance = float(shares.mean()), float(shares.var())
    spread = mean * (1 - mean)
    # All right or all wrong: nothing says how much a prompt's samples know beyond the first.
    count = num_prompts if spread == 0 else num_prompts * min(spread / variance if variance else math.inf, num_samples)
    # A variance is no larger than the spread of shares of 0 and 1, but for rounding.
    return wilson_interval(mean, max(count, num_prompts))


def mean_interval(values: Float64[np.ndarray, "P"]) -> Interval | None:
    """Of the mean of numbers, one of each prompt. None for one prompt, and where all are equal: nothing tells then.

    m +- t s / sqrt(P), with s^2 the variance (ddof = 1) and t Student's 97.5 % point for P - 1 degrees of freedom.

    Source: Student 1908, The probable error of a mean.
    """
    num_prompts = len(values)
    if num_prompts < 2 or (values == values[0]).all():
        return None
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(num_prompts)
    reach = student_t_quantile(num_prompts - 1) * error
    return mean - reach, mean + reach


def student_t_quantile(degrees_of_freedom: int) -> float:
    """Student's 97.5 % point, within 0.2 %.

    z + (z^3 + z)/4d + (5z^5 + 16z^3 + 3z)/96d^2 + (3z^7 + 19z^5 + 17z^3 - 15z)/384d^3
    + (79z^9 + 776z^7 + 1482z^5 - 1920z^3 - 945z)/92160d^4, from d = 3 on.

    Source: Abramowitz and Stegun 1964, 26.7.5.
    """
    if degrees_of_freedom in STUDENT_T_SMALL_DF:
        return STUDENT_T_SMALL_DF[degrees_of_freedom]
    first = (NORMAL_QUANTILE**3 + NORMAL_QUANTILE) / 4
    second = (5 * NORMAL_QUANTILE**5 + 16 * NORMAL_QUANTILE**3 + 3 * NORMAL_QUANTILE) / 96
    third = (3 * NORMAL_QUANTILE**7 + 19 * NORMAL_QUANTILE**5 + 17 * NORMAL_QUANTILE**3 - 15 * NORMAL_QUANTILE) / 384
    fourth = (
        79 * NORMAL_QUANTILE**9
        + 776 * NORMAL_QUANTILE**7
        + 1482 * NORMAL_QUANTILE**5
        - 1920 * NORMAL_QUANTILE**3
        - 945 * NORMAL_QUANTILE
    ) / 92160
    return (
        NORMAL_QUANTILE
        + first / degrees_of_freedom
        + second / degrees_of_freedom**2
        + third / degrees_of_freedom**3
        + fourth / degrees_of_freedom**4
    )


def sign_test(num_better: int, num_worse: int) -> float:
    """How likely so uneven a split of the prompts that have changed is, where better and worse are equally likely.

    p = min(1, 2 sum_{i <= min(b, w)} C(b + w, i) / 2^(b + w)), exact. With answers that are right or wrong this is the
    exact binomial form of McNemar's test.

    Source: McNemar 1947, Note on the sampling error of the difference between correlated proportions.
    """
    changed = num_better + num_worse
    as_uneven = sum(math.comb(changed, i) for i in range(min(num_better, num_worse) + 1))
    # Integers of any size, so that thousands of prompts neither overflow nor round to nothing on the way.
    return min(1.0, 2 * as_uneven / 2**changed)
