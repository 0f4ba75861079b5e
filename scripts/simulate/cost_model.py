"""A cost model of decoding in seconds, and a lower bound on the duration of any schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class CostModel:
    """Fixed costs and rates, which `scripts/simulate/calibrate_rollout.py` fits to measured times.

    The defaults are a 7B model in bfloat16 on one H200 by its data sheet (989 TFLOP/s, 4.8 TB/s). Each step reads 15.2
    GB of weights; a token has 57,344 bytes of cache and costs 2 FLOPs per weight; prefill runs at 40 % of the peak.
    """

    step_s: float = 3.2e-3
    """Seconds per decode step for reading the weights."""
    step_row_s: float = 1.5e-5
    """Seconds per row of a step, including padding rows."""
    step_cached_token_s: float = 1.2e-8
    """Seconds per token of cache that a step reads; see `reads_to_longest`."""
    segment_s: float = 1.5e-3
    """Seconds on the host between two segments; another worker may use the device meanwhile."""
    prefill_s: float = 5e-3
    """Seconds per prefill program."""
    prefill_token_s: float = 3.8e-5
    """Seconds per prefilled token, including padding."""
    admit_s: float = 1e-4
    """Seconds to copy the ends of prompts for their samples, for all that are admitted together."""
    admit_row_s: float = 1e-5
    """Seconds per inserted row."""
    move_s: float = 1e-3
    """Seconds to take a row out of a worker and insert it into another, or back."""
    move_token_s: float = 1e-6
    """Seconds per token of a moved row."""
    reads_to_longest: bool = True
    """Whether a step reads all rows, including padding rows, up to the longest, as on a CPU, or each row as far as it
    has tokens, as the kernels of TPUs and GPUs do."""

    def step(self, *, rows: int, cache_length: float) -> float:
        return self.step_s + self.step_row_s * rows + self.step_cached_token_s * rows * cache_length

    def prefill(self, num_tokens: int) -> float:
        """Returns the seconds of one prefill program."""
        return self.prefill_s + self.prefill_token_s * num_tokens

    def admit(self, num_rows: int) -> float:
        return self.admit_s + self.admit_row_s * num_rows

    def move(self, num_tokens: int) -> float:
        return self.move_s + self.move_token_s * num_tokens

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> CostModel:
        """Returns the costs that `to_json` wrote."""
        return cls(**values)


class SampleLengths(NamedTuple):
    """Lengths of one sample, for the lower bound."""

    prompt: str
    prompt_length: int
    num_tokens: int


def lower_bound_s(samples: Sequence[SampleLengths], slots: Iterable[int], cost: CostModel) -> float:
    """Returns the larger of two lower bounds on the duration of any schedule for workers with these slots.

    The first is all work at the best rate: with step time a + b rows, a worker with s slots generates at most s / (a +
    b s) tokens per second. It adds reading the caches of unpadded rows, and one prefill per distinct prompt. The second
    is the longest sample with its prefill, alone on a worker; a single worker also spends b and the caches on all other
    samples.
    """
    slots = list(slots)
    if not samples or not slots:
        return 0.0
    a, b, c = cost.step_s, cost.step_row_s, cost.step_cached_token_s
    tokens = sum(one.num_tokens for one in samples)
    read = {one: _cache_tokens_read(one) * c for one in set(samples)}
    prompts = {one.prompt: one.prompt_length for one in samples}
    extra = sum(read[one] for one in samples) + sum(cost.prefill_token_s * length for length in prompts.values())
    rates = [s / (a + b * s) for s in slots]
    at_best_rate = (tokens + extra * min(rates)) / sum(rates)
    longest = max(one.num_tokens for one in samples)
    if len(slots) == 1:
        alone = a * longest + b * tokens + extra
    else:
        alone = max((a + b) * one.num_tokens + read[one] + cost.prefill_token_s * one.prompt_length for one in samples)
    return max(at_best_rate, alone)


def _cache_tokens_read(sample: SampleLengths) -> float:
    """Returns the tokens of cache that a sample reads over its life: prompt and completion so far, at each step."""
    return sample.num_tokens * (sample.prompt_length + (sample.num_tokens - 1) / 2)
