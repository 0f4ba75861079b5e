"""What decoding costs, in seconds, and the least time in which any schedule could finish."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class CostModel:
    """Every cost is a fixed part and a rate, as `scripts/bench/calibrate_rollout.py` fits them to measured times.

    The defaults are a 7B model in bfloat16 on one H200 by its data sheet (989 TFLOP/s, 4.8 TB/s): weights of 15.2 GB
    read at each step, 57,344 bytes of cache a token, 2 FLOPs a weight and token, prefill at 40 % of the peak.
    """

    step_s: float = 3.2e-3
    """Of a decode step, whatever its rows: reading the weights."""
    step_row_s: float = 1.5e-5
    """For each row, padded ones included."""
    step_cached_token_s: float = 1.2e-8
    """For each token of cache read: rows x cache length, both padded."""
    segment_s: float = 1.5e-3
    """Of a segment's edge, on the host: another worker may have the device meanwhile."""
    prefill_s: float = 5e-3
    """Of one program that reads prompts, whatever it reads."""
    prefill_token_s: float = 3.8e-5
    """For each token that it reads, padded ones included."""
    admit_s: float = 1e-4
    """Of putting the caches of prompts into slots, all that are admitted together."""
    admit_row_s: float = 1e-5
    """For each of them."""
    copy_token_s: float = 2.4e-8
    """For each token of cache copied on its own device: to fewer or more rows, into a longer cache."""
    move_s: float = 1e-3
    """Of taking a row out of its worker and putting it into another, or back."""
    move_token_s: float = 1e-6
    """For each token that its cache has room for."""
    measured_steps: tuple[tuple[int, int, float], ...] = ()
    """(rows, cache length, seconds of a step) of programs that were measured, for which it holds instead of the first
    three: a cache that falls out of a processor's own is no straight line."""

    def step(self, *, rows: int, cache_length: int) -> float:
        for program in self.measured_steps:
            if program[:2] == (rows, cache_length):
                return program[2]
        return self.fitted_step(rows=rows, cache_length=cache_length)

    def fitted_step(self, *, rows: int, cache_length: int) -> float:
        """By the three constants."""
        return self.step_s + self.step_row_s * rows + self.step_cached_token_s * rows * cache_length

    def prefill(self, num_tokens: int) -> float:
        """Of one program."""
        return self.prefill_s + self.prefill_token_s * num_tokens

    def admit(self, num_rows: int) -> float:
        return self.admit_s + self.admit_row_s * num_rows

    def copy(self, num_tokens: int) -> float:
        return self.copy_token_s * num_tokens

    def move(self, num_tokens: int) -> float:
        return self.move_s + self.move_token_s * num_tokens

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"measured_steps": [list(program) for program in self.measured_steps]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> CostModel:
        """Returns the costs that `to_json` wrote."""
        fields: dict[str, Any] = {**values, "measured_steps": tuple(map(tuple, values.get("measured_steps", ())))}
        return cls(**fields)


class SampleLengths(NamedTuple):
    """One sample of a lower bound."""

    prompt: str
    prompt_length: int
    num_tokens: int


def lower_bound_s(samples: Sequence[SampleLengths], slots: Iterable[int], cost: CostModel) -> float:
    """The larger of two bounds on any schedule's makespan, for workers with these slots.

    All work at the best rate: with step time a + b rows, a worker of s slots makes at most s / (a + b s) tokens a
    second; to this come the cache that unpadded rows read, and one prefill of each distinct prompt. And the longest
    sample alone, with its prefill, on a worker to itself; a single worker also spends b and the cache on all others.
    """
    slots = list(slots)
    if not samples or not slots:
        return 0.0
    # The bounds are of the three constants; a program that is faster than they say lowers them.
    fastest = [taken / cost.fitted_step(rows=rows, cache_length=length) for rows, length, taken in cost.measured_steps]
    scale = min([1.0, *fastest])
    a, b, c = scale * cost.step_s, scale * cost.step_row_s, scale * cost.step_cached_token_s
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
    """Of cache, over the life of a sample: its prompt and what it has, at each step."""
    return sample.num_tokens * (sample.prompt_length + (sample.num_tokens - 1) / 2)
