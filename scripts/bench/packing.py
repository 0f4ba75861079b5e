"""Measures how full packed micro-batches are and how long planning takes.

    python scripts/bench/packing.py [--cases 10000] [--lengths FILE.json] [--out FILE.json]

Every ratio compares the computed tokens, including padding, of the same samples. The baselines are first fit in arrival
order into rows of the quota (slime and OpenRLHF), and padded rows with one sample each, as many as fit into the quota.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from app.batching import micro_batch_shapes
from app.batching.micro_batch_plan import (
    MicroBatchPlan,
    SequenceLengths,
    TokenBudget,
    bucketed_row_shape,
    choose_row_length,
    plan_fixed_rows,
    plan_token_budget,
)
from app.batching.micro_batch_shapes import candidate_shapes
from app.batching.packing_stats import packing_stats

QUOTA = 4096
DEFAULT_QUOTA = 16384
"""The default of `algorithm.max_tokens_per_device`."""
MEAN_LENGTH = 800
GSM8K_QUANTILES = (
    *(65, 97, 109, 118, 126, 133, 141, 148, 156, 163, 172),
    *(181, 190, 200, 211, 223, 237, 254, 280, 318, 538),
)
"""Quantiles (0, 5 %, ...) of the tokens per question and answer in GSM8K's train.jsonl, with SmolLM2's tokenizer."""
GSM8K_MEAN = 184.8


LENGTHS = Path(__file__).parent / "results" / "lengths_of_smollm2_on_gsm8k.json"
DrawGroups = Callable[[np.random.Generator, int, int], SequenceLengths]
"""(random generator, number of samples, samples per prompt) -> lengths of prompts and completions."""


def gsm8k_like(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws lengths distributed like GSM8K's, scaled to the mean `MEAN_LENGTH`."""
    lengths = np.interp(rng.random(count), np.linspace(0, 1, len(GSM8K_QUANTILES)), GSM8K_QUANTILES)
    return np.minimum(lengths * MEAN_LENGTH / GSM8K_MEAN, QUOTA).astype(np.int64)


def log_normal(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws log-normal lengths with sigma 1 and median 510, limited to the quota, which gives a mean of 800."""
    return np.clip(rng.lognormal(math.log(510), 1, count), 2, QUOTA).astype(np.int64)


def uniform(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(2, 2 * MEAN_LENGTH - 1, count)


DISTRIBUTIONS = {"GSM8K-like": gsm8k_like, "log-normal": log_normal, "uniform": uniform}


def flops(lengths: np.ndarray) -> np.ndarray:
    """Returns Qwen2.5-0.5B's FLOPs: 2 x 357.8 M per token, and 4 x 24 layers x 14 heads x 64 dims per token pair."""
    return 715_653_120 * lengths + 4 * 24 * 14 * 64 * (lengths * (lengths + 1) // 2)


def lone(totals: np.ndarray) -> SequenceLengths:
    prompts = np.minimum(100, totals - 1)
    return SequenceLengths(prompts, totals - prompts, np.arange(len(totals)))


def groups(rng: np.random.Generator, count: int, size: int) -> SequenceLengths:
    """Draws prompts with 150 tokens on average, each with `size` completions with 650 tokens on average."""
    numbers = np.repeat(np.arange(count // size), size)
    prompts = np.clip(rng.normal(150, 50, count // size), 16, 400).astype(np.int64)[numbers]
    completions = np.clip(rng.lognormal(math.log(500), 0.8, count), 1, 1600).astype(np.int64)
    return SequenceLengths(prompts, completions, numbers)


def recorded_groups(path: Path) -> DrawGroups:
    """Returns a function that draws groups with replacement from a file of groups of [prompt, completion] lengths."""
    recorded = json.loads(path.read_text(encoding="utf-8"))["groups"]

    def draw(rng: np.random.Generator, count: int, size: int) -> SequenceLengths:
        drawn = np.array([recorded[i][:size] for i in rng.integers(0, len(recorded), count // size)])
        numbers = np.repeat(np.arange(count // size), size)
        prompts, completions = drawn.reshape(-1, 2).T
        return SequenceLengths(prompts, completions, numbers)

    return draw


def make_budget(quota: int, longest: int, *, max_group_tokens: int = 0, **changes: Any) -> TokenBudget:
    fields = {"share_prompts": False, "balance": True} | changes
    return TokenBudget(quota, choose_row_length(quota, longest, max_group_tokens=max_group_tokens), **fields)


def first_fit(host: SequenceLengths, num_devices: int) -> int:
    """Packs each sample, in order, into the first row with enough space; returns the number of micro-batches used."""
    room: list[int] = []
    for length in host.totals.tolist():
        row = next((i for i, left in enumerate(room) if left >= length), len(room))
        room[row:] = [*room[row:], QUOTA] if row == len(room) else room[row:]
        room[row] -= length
    return -(-len(room) // num_devices)


def padded(host: SequenceLengths, num_devices: int) -> int:
    """Returns the computed tokens if each sample has a padded row and micro-batches have at most `QUOTA` tokens."""
    rows = max(1, QUOTA // bucketed_row_shape(int(host.totals.max()), int(host.completions.max())).num_tokens)
    plan = plan_fixed_rows(host, rows_per_device=rows, num_devices=num_devices, trim_tail=True)
    return computed_tokens(plan)


def computed_tokens(plan: MicroBatchPlan) -> int:
    return sum(len(m.rows) * m.shape.num_tokens for m in plan.micro_batches)


def most_that_shapes_allow(tokens: int, num_devices: int) -> float:
    """Returns the fill if samples could be split anywhere: below 1, as the last micro-batch has a fixed shape."""
    full, left = divmod(-(-tokens // num_devices), QUOTA)
    tail = next((s.tokens_per_device for s in candidate_shapes(QUOTA, QUOTA) if s.tokens_per_device >= left), QUOTA)
    return tokens / (num_devices * (full * QUOTA + (tail if left else 0)))


def fill_of_cell(draw: Callable, count: int, num_devices: int, num_seeds: int) -> dict[str, float]:
    """Returns the figures of one cell of the table: means over seeds, and the minimum fill."""
    found: dict[str, list[float]] = {}
    for seed in range(num_seeds):
        host = lone(draw(np.random.default_rng(seed), count))
        plan = plan_token_budget(host, make_budget(QUOTA, QUOTA), flops, num_devices=num_devices)
        ours = packing_stats(plan, host, flops, num_devices=num_devices)
        tokens, computed = int(host.totals.sum()), ours["computed_tokens"]
        in_arrival_order = first_fit(host, num_devices)
        row = {
            "fill": ours["fill"],
            "ladder_allows": most_that_shapes_allow(tokens, num_devices),
            "flops_imbalance": ours["flops_imbalance"],
            "micro_batches": ours["num_micro_batches"],
            "bound": -(-tokens // (QUOTA * num_devices)),
            "first_fit_micro_batches": in_arrival_order,
            "first_fit_ratio": in_arrival_order * num_devices * QUOTA / computed,
            "padded_ratio": padded(host, num_devices) / computed,
        }
        for name, value in row.items():
            found.setdefault(name, []).append(float(value))
    means = {name: float(np.mean(values)) for name, values in found.items()}
    return means | {"fill_min": min(found["fill"]), "count_ratio": means["micro_batches"] / means["bound"]}


def fill_table(num_seeds: dict[int, int]) -> dict[str, dict[str, float]]:
    print(f"Quota {QUOTA}, mean length {MEAN_LENGTH}; means over {num_seeds} seeds by number of samples")
    print(
        f"{'lengths':<12}{'samples':>8}{'dp':>4}{'fill':>8}{'least':>8}{'ladder':>8}{'m.-b.':>8}{'bound':>8}{'ratio':>8}"
        f"{'FF m.-b.':>10}{'FF tok.':>9}{'padded':>8}{'imbal.':>8}"
    )
    cells = {}
    for name, draw in DISTRIBUTIONS.items():
        for count, seeds in num_seeds.items():
            for num_devices in (1, 4):
                c = fill_of_cell(draw, count, num_devices, seeds)
                cells[f"{name}, {count} samples, dp {num_devices}"] = c
                print(
                    f"{name:<12}{count:>8}{num_devices:>4}{c['fill']:>8.4f}{c['fill_min']:>8.4f}"
                    f"{c['ladder_allows']:>8.4f}{c['micro_batches']:>8.2f}{c['bound']:>8.2f}{c['count_ratio']:>8.4f}"
                    f"{c['first_fit_micro_batches']:>10.2f}"
                    f"{c['first_fit_ratio']:>9.3f}{c['padded_ratio']:>8.2f}"
                    f"{c['flops_imbalance']:>8.3f}"
                )
    return cells


def sharing_table() -> dict[str, dict[str, float]]:
    print("\nShared prompts: tokens computed, and of those that are no repeated prompt; 8 samples a prompt")
    print(f"{'samples':<10}{'quota':>8}{'row':>8}{'dp':>4}{'alone':>12}{'shared':>12}{'ratio':>8}{'of use':>8}")
    cells = {}
    for count, quota, longest, num_devices in ((64, 16384, 2000, 1), (512, 16384, 2000, 4), (512, 16384, 16384, 4)):
        host = groups(np.random.default_rng(0), count, 8)
        computed = {}
        for share in (False, True):
            budget = make_budget(quota, longest, share_prompts=share)
            plan = plan_token_budget(host, budget, flops, num_devices=num_devices)
            computed[share] = computed_tokens(plan)
        once = int(host.completions.sum() + host.prompts[::8].sum())
        row = choose_row_length(quota, longest)
        cells[f"{count} samples, quota {quota}, rows of {row}, dp {num_devices}"] = {
            "alone": computed[False],
            "shared": computed[True],
            "ratio": computed[True] / computed[False],
            "of_use": once / computed[True],
        }
        print(
            f"{count:<10}{quota:>8}{row:>8}{num_devices:>4}{computed[False]:>12}{computed[True]:>12}"
            f"{computed[True] / computed[False]:>8.3f}{once / computed[True]:>8.3f}"
        )
    return cells


def joined(hosts: Sequence[SequenceLengths]) -> SequenceLengths:
    """Concatenates the samples of several hosts; equal prompt indices of different hosts become distinct."""
    first_prompts = np.cumsum([0, *(host.prompt_keys.max(initial=-1) + 1 for host in hosts)])
    return SequenceLengths(
        np.concatenate([host.prompts for host in hosts]),
        np.concatenate([host.completions for host in hosts]),
        np.concatenate([host.prompt_keys + first for host, first in zip(hosts, first_prompts, strict=False)]),
    )


def hosts_table(name: str, draw: DrawGroups, num_seeds: int) -> dict[str, dict[str, float]]:
    """Compares one plan for all hosts with one plan per host, where all hosts compute as much as the fullest host."""
    print(
        f"\n{name}: hosts of 8 devices, quota {DEFAULT_QUOTA}, shared prompts, 8 samples a prompt; "
        f"means over {num_seeds} seeds"
    )
    print(f"{'samples':<10}{'hosts':>6}{'fill':>8}{'least':>8}{'imbal.':>8}{'most':>8}{'positions of own plans':>24}")
    cells = {}
    longest = 2000
    budget = make_budget(DEFAULT_QUOTA, longest, share_prompts=True, max_group_tokens=8 * longest)
    for of_host in (64, 256):
        for num_hosts in (1, 2, 4, 8):
            found = []
            for seed in range(num_seeds):
                hosts = [draw(np.random.default_rng((seed, host)), of_host, 8) for host in range(num_hosts)]
                plan = plan_token_budget(joined(hosts), budget, flops, num_devices=8 * num_hosts)
                own = [computed_tokens(plan_token_budget(host, budget, flops, num_devices=8)) for host in hosts]
                stats = packing_stats(plan, joined(hosts), flops, num_devices=8 * num_hosts)
                positions = num_hosts * max(own) / stats["computed_tokens"]
                found.append((stats["fill"], stats["flops_imbalance"], positions))
            fills, imbalances, positions = zip(*found, strict=True)
            cells[f"{name}, {of_host} samples a host, {num_hosts} hosts"] = c = {
                "fill": float(np.mean(fills)),
                "fill_min": min(fills),
                "flops_imbalance": float(np.mean(imbalances)),
                "flops_imbalance_max": max(imbalances),
                "positions_of_own_plans": float(np.mean(positions)),
            }
            print(
                f"{of_host:<10}{num_hosts:>6}{c['fill']:>8.3f}{c['fill_min']:>8.3f}{c['flops_imbalance']:>8.3f}"
                f"{c['flops_imbalance_max']:>8.3f}{c['positions_of_own_plans']:>24.3f}"
            )
    return cells


def tail_table(draw: DrawGroups, num_steps: int = 60) -> dict[str, dict[str, float]]:
    """Compares values of `TAIL_GROWTH` by fill and by the number of shapes that a run must compile."""
    print(f"\nSizes of the last micro-batch: {num_steps} steps of 64 samples, 8 devices, quota {DEFAULT_QUOTA}")
    print(f"{'ratio':<8}{'fill':>8}{'least':>8}{'shapes compiled':>17}")
    cells, shipped = {}, micro_batch_shapes.TAIL_GROWTH
    budget = make_budget(DEFAULT_QUOTA, 2000, share_prompts=True, max_group_tokens=16_000)
    for growth in (1.05, 1.1, 1.2, 1.5, 2.0):
        micro_batch_shapes.TAIL_GROWTH = growth
        fills, shapes = [], set()
        for seed in range(num_steps):
            host = draw(np.random.default_rng(seed), 64, 8)
            plan = plan_token_budget(host, budget, flops, num_devices=8)
            stats = packing_stats(plan, host, flops, num_devices=8)
            fills.append(stats["fill"])
            shapes |= {(len(m.rows), m.shape) for m in plan.micro_batches}
        cells[str(growth)] = {"fill": float(np.mean(fills)), "fill_min": min(fills), "shapes": len(shapes)}
        print(f"{growth:<8}{np.mean(fills):>8.3f}{min(fills):>8.3f}{len(shapes):>17}")
    micro_batch_shapes.TAIL_GROWTH = shipped
    return cells


def random_case(rng: np.random.Generator) -> tuple[SequenceLengths, TokenBudget, int]:
    """Returns (lengths, budget, number of devices) of a random case with up to 64 devices and 2,000 samples."""
    num_devices = math.prod(int(n) for n in rng.integers(1, 9, 2))
    quota = int(rng.choice([64, 500, 1024, 4096, 16384]))
    longest = int(rng.integers(2, quota + 1))
    count = int(rng.choice([2, 20, 200, 2001]) * rng.random())
    numbers = np.arange(count) // int(rng.integers(1, 9))
    prompts = rng.integers(1, longest, count + 1)[numbers]
    totals = np.clip(rng.lognormal(math.log(longest) - 1.5, 1, count).astype(np.int64), prompts + 1, longest)
    budget = make_budget(
        quota,
        longest,
        share_prompts=bool(rng.random() < 0.5),
        balance=bool(rng.random() < 0.5),
    )
    return SequenceLengths(prompts, totals - prompts, numbers), budget, num_devices


def random_cases(num_cases: int) -> dict[str, int]:
    """Plans random cases, and counts plans that exceed the quota or miss samples."""
    over = incomplete = 0
    for seed in range(num_cases):
        lengths, budget, num_devices = random_case(np.random.default_rng(seed))
        plan = plan_token_budget(lengths, budget, flops, num_devices=num_devices)
        over += any(
            len(m.rows) // num_devices * m.shape.num_tokens > budget.max_tokens_per_device for m in plan.micro_batches
        )
        held = sorted(i for m in plan.micro_batches for row in m.rows for segment in row for i in segment)
        incomplete += held != list(range(len(lengths.prompts)))
    print(f"\n{num_cases} random cases: {over} over the quota, {incomplete} incomplete")
    return {"cases": num_cases, "over_quota": over, "incomplete": incomplete}


def median_ms(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


def times() -> dict[str, float]:
    """Returns the median ms for planning 8,192 samples, for the statistics of a plan, and for packing 2,048 samples."""
    found = {}
    for name, draw in DISTRIBUTIONS.items():
        host = lone(draw(np.random.default_rng(0), 8192))
        for num_devices in (1, 8):
            plan = functools.partial(plan_token_budget, host, make_budget(QUOTA, QUOTA), flops, num_devices=num_devices)
            found[f"plan 8192, {name}, dp {num_devices}"] = median_ms(plan)
    host = groups(np.random.default_rng(0), 8192, 8)
    for quota, longest in ((QUOTA, QUOTA), (16384, 2000)):
        budget = make_budget(quota, longest, share_prompts=True)
        plan = functools.partial(plan_token_budget, host, budget, flops, num_devices=1)
        found[f"plan 8192, shared prompts, quota {quota}, rows of {budget.row_length}"] = median_ms(plan)
    planned = plan_token_budget(host, budget, flops, num_devices=1)
    found["figures of 8192"] = median_ms(lambda: packing_stats(planned, host, flops, num_devices=1))
    return found | assembly_times()


def assembly_times() -> dict[str, float]:
    from app.batching.micro_batcher import sequence_lengths
    from app.batching.token_batch import pack_per_token, pack_tokens, unpack_per_token
    from app.records.sample import Prompt, Sample

    lengths = groups(np.random.default_rng(0), 2048, 8)
    samples = []
    for prompt, completion, number in zip(lengths.prompts, lengths.completions, lengths.prompt_keys, strict=True):
        asked = Prompt(str(number), np.full(prompt, number, np.int32), "", None)
        ids, logprobs = np.ones(completion, np.int32), np.ones(completion, np.float32)
        samples.append(Sample(asked, 0, int(number), ids, "", logprobs, "length", 0))
    plan = plan_token_budget(
        sequence_lengths(samples), make_budget(16384, 2000, share_prompts=True), flops, num_devices=1
    )

    def assemble() -> list[np.ndarray]:
        """Packs the inputs of an update: tokens, and five arrays with a value per target token."""
        quantities = []
        for micro_batch in plan.micro_batches:
            pack_tokens(samples, micro_batch)
            quantities.append([pack_per_token(samples, micro_batch, lambda s: s.behavior_logprobs) for _ in range(5)])
        return [first for first, *_ in quantities]

    packed = assemble()
    return {
        "lengths of 2048": median_ms(lambda: sequence_lengths(samples)),
        f"assemble 2048, {lengths.totals.sum()} tokens": median_ms(assemble),
        "unpack 2048": median_ms(lambda: unpack_per_token(packed, samples, plan)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="random cases")
    parser.add_argument("--seeds", type=int, default=100, help="batches of 64 samples; a quarter as many of 512")
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="recorded groups of a real policy")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {"measured_at": datetime.now(UTC).isoformat(timespec="seconds")}
    record["fill"] = fill_table({64: options.seeds, 512: max(1, options.seeds // 4)})
    record["shared_prompts"] = sharing_table()
    seeds = max(1, options.seeds // 2)
    record["hosts"] = hosts_table("log-normal", groups, seeds)
    record["hosts"] |= hosts_table(options.lengths.stem, recorded_groups(options.lengths), seeds)
    record["tails"] = tail_table(groups)
    record["times_ms"] = times()
    print("\nMilliseconds, medians of 9")
    for name, milliseconds in record["times_ms"].items():
        print(f"{name:<60}{milliseconds:>8.1f}")
    record["random_cases"] = random_cases(options.cases)
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
