"""Makes lengths and budgets for tests of the planner, and checks the invariants of every plan."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.batching.micro_batch_plan import MicroBatchPlan, RowShape, SequenceLengths, TokenBudget, choose_row_length


def lone(*totals: int, prompt: int = 1) -> SequenceLengths:
    """Returns samples with these lengths, each with its own prompt."""
    sizes = np.asarray(totals, np.int64)
    prompts = np.minimum(prompt, sizes)
    return SequenceLengths(prompts, sizes - prompts, np.arange(len(sizes)))


def group(prompt: int, *completions: int) -> SequenceLengths:
    return joined(
        SequenceLengths(np.full(len(completions), prompt), np.asarray(completions), np.zeros(len(completions), int))
    )


def joined(*hosts: SequenceLengths) -> SequenceLengths:
    """Joins the samples of several hosts into one host's; their prompts remain separate."""
    numbers = [host.prompt_keys + 1000 * i for i, host in enumerate(hosts)]
    return SequenceLengths(
        np.concatenate([host.prompts for host in hosts]).astype(np.int64),
        np.concatenate([host.completions for host in hosts]).astype(np.int64),
        np.concatenate(numbers).astype(np.int64),
    )


def make_budget(quota: int, longest: int | None = None, **changes: Any) -> TokenBudget:
    """Returns a token budget whose rows have the length of the quota unless the longest sample is given."""
    fields: dict[str, Any] = {"share_prompts": False, "balance": True}
    return TokenBudget(quota, choose_row_length(quota, longest or quota), **(fields | changes))


def flops(lengths: np.ndarray) -> np.ndarray:
    """Returns the FLOPs of a small network, in which attention costs as much as the rest at 1,000 tokens."""
    return 1000 * lengths + lengths**2


def per_token(lengths: np.ndarray) -> np.ndarray:
    return np.asarray(lengths)


def members(rows: Sequence) -> list[int]:
    return [i for row in rows for segment in row for i in segment]


def tokens_of(row: tuple[tuple[int, ...], ...], host: SequenceLengths) -> int:
    """Returns the tokens of a row, with each segment's prompt counted once."""
    return int(sum(host.prompts[segment[0]] + host.completions[list(segment)].sum() for segment in row))


def computed_tokens(plan: MicroBatchPlan) -> int:
    return sum(len(m.rows) * m.shape.num_tokens for m in plan.micro_batches)


def laid_out_tokens(plan: MicroBatchPlan, host: SequenceLengths) -> int:
    return sum(tokens_of(row, host) for m in plan.micro_batches for row in m.rows)


def device_work(plan: MicroBatchPlan, host: SequenceLengths, num_devices: int) -> np.ndarray:
    """Returns the cost [M, devices] of samples that share no prompts."""
    work, parts = flops(host.totals), [plan.part(device, num_devices).micro_batches for device in range(num_devices)]
    return np.asarray([[work[members(one.rows)].sum() for one in part] for part in parts]).T


def random_case(seed: int) -> tuple[SequenceLengths, TokenBudget, int]:
    """Returns a random case of samples, up to 64 devices, groups of up to 8 samples, and any quota."""
    rng = np.random.default_rng(seed)
    quota = int(rng.choice([64, 500, 1024, 4096]))
    longest = int(rng.integers(2, quota + 1))
    budget = make_budget(quota, longest, share_prompts=bool(rng.random() < 0.5), balance=bool(rng.random() < 0.5))
    hosts = []
    for _ in range(int(rng.integers(1, 9))):
        count = int(rng.choice([0, 1, 10, 60]) * rng.random())
        numbers = np.sort(rng.integers(0, 1 + count // int(rng.integers(1, 9)), count))
        prompts = rng.integers(1, longest, count + 1)[numbers]
        totals = np.clip(rng.lognormal(np.log(longest) - 1.5, 1, count).astype(int), prompts + 1, longest)
        hosts.append(SequenceLengths(prompts, totals - prompts, numbers))
    return joined(*hosts), budget, int(rng.integers(1, 9)) * len(hosts)


def check_plan(plan: MicroBatchPlan, lengths: SequenceLengths, budget: TokenBudget, num_devices: int) -> None:
    """Asserts that every sample is in the plan once, and no row or device is above its limit."""
    rows = [(row, m.shape) for m in plan.micro_batches for row in m.rows]
    assert sorted(members([row for row, _ in rows])) == list(range(len(lengths.prompts)))
    for row, shape in rows:
        assert tokens_of(row, lengths) <= shape.num_tokens
        assert shape == RowShape(shape.num_tokens, shape.num_tokens)
        numbers = [int(lengths.prompt_keys[segment[0]]) for segment in row]
        assert all(set(lengths.prompt_keys[list(s)]) == {n} for s, n in zip(row, numbers, strict=True))
        if budget.share_prompts:
            assert len(set(numbers)) == len(numbers)
        else:
            assert all(len(segment) == 1 for segment in row)
    for m in plan.micro_batches:
        assert len(m.rows) % num_devices == 0
        assert len(m.rows) // num_devices * m.shape.num_tokens <= budget.max_tokens_per_device
