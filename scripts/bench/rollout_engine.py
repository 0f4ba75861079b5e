"""Tokens a second through slots, against one batch to the end, where lengths differ as they do in training.

    python scripts/bench/rollout_engine.py --model builtin:tiny --repeats 3
    python scripts/bench/rollout_engine.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --median-length 24

Samples get the lengths that a log-normal distribution says and nothing else ends them. Three ways to generate the very
same samples take turns: through slots; as many rows at once as there are slots, batch after batch, each to its end
(`sync`: the same memory); and all rows at once (`all`: as much memory as it takes). All are
compiled beforehand, and none knows how long a sample becomes, but for the most that it may be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from app.flow import Prompt, Sample
from app.mesh.topology import make_mesh
from app.policy.decoder import DecoderDefinition
from app.policy.families import architecture_from_config
from app.policy.kv_cache import DecodeWeights
from app.policy.weight_files import open_model
from app.policy.weights import load_weights
from app.rollout.continuous import ContinuousBatching
from app.rollout.engine import BatchShape, Engine
from app.rollout.sampling import SamplingRules
from app.rollout.slot_shapes import slot_shapes
from app.rollout.slots import SlotEngine
from settings.rollout_section import Segment
from settings.schema import Mesh as MeshSettings

RESULTS = Path(__file__).parent / "results" / "rollout_engine.json"
NUM_PROMPTS, GROUP_SIZE = 16, 8
PROMPT_LENGTHS = (48, 96)
RULES = SamplingRules(1.0)
DTYPE = jnp.dtype("float32")


class UnforeseeingEngine(Engine):
    """Makes room for the longest sample that may come, as in training: nobody knows the lengths there."""

    longest: int

    def batch_shape(self, *, max_new_tokens: int, **sizes: int) -> BatchShape:
        assert max_new_tokens <= self.longest
        return super().batch_shape(max_new_tokens=self.longest, **sizes)


Way = Callable[[list[int]], list[Sample]]
"""Forced lengths -> samples."""


def forced_lengths(count: int, *, median: float, sigma: float, longest: int, seed: int) -> list[int]:
    """Log-normal, cut at `longest`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return np.clip(np.rint(drawn), 1, longest).astype(int).tolist()


def random_prompts(vocab_size: int) -> list[Prompt]:
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, vocab_size, rng.integers(*PROMPT_LENGTHS)).astype(np.int32) for _ in range(NUM_PROMPTS)]
    return [Prompt(f"prompt-{i}", token_ids, "", None) for i, token_ids in enumerate(ids)]


def spelled(token_ids: Sequence[int]) -> str:
    return ""


def in_batches(engine: Engine, weights: DecodeWeights, prompts: list[Prompt], rows: int) -> Way:
    """`rows` rows at a time, each batch until its longest sample is done; all with the longest one's shapes."""
    per_batch = rows // GROUP_SIZE

    def run(lengths: list[int]) -> list[Sample]:
        samples: list[Sample] = []
        for first in range(0, len(prompts), per_batch):
            samples += engine.generate(
                weights,
                prompts[first : first + per_batch],
                group_size=GROUP_SIZE,
                max_new_tokens=lengths[first * GROUP_SIZE : (first + per_batch) * GROUP_SIZE],
                rules=RULES,
                seed=0,
                policy_version=0,
            )
        return samples

    return run


def through_slots(slots: ContinuousBatching, weights: DecodeWeights, prompts: list[Prompt]) -> Way:
    return lambda lengths: slots.generate(
        weights, prompts, group_size=GROUP_SIZE, max_new_tokens=lengths, rules=RULES, seed=0, policy_version=0
    )


def ways_of(options: argparse.Namespace) -> tuple[dict[str, Way], ContinuousBatching]:
    files = open_model(options.model, revision=None)
    definition = DecoderDefinition.of(architecture_from_config(files.config))
    mesh = make_mesh(MeshSettings())
    engine = UnforeseeingEngine(
        definition, mesh, eos_ids=(), decode_text=spelled, dtype=DTYPE, prefill_length_min=PROMPT_LENGTHS[1]
    )
    engine.longest = options.longest
    weights = engine.weights(load_weights(definition, files.weights, mesh))
    shapes = slot_shapes(
        options.slots,
        max_prompt_length=PROMPT_LENGTHS[1],
        max_new_tokens=options.longest,
        prefill_length_min=PROMPT_LENGTHS[1],
        num_pooled=NUM_PROMPTS,
        segment_max=options.longest,
        exact=False,
    )
    slot_engine = SlotEngine(definition, mesh, shapes, eos_ids=(), dtype=DTYPE, exact=False)
    rule = Segment(min=1, overhead_steps=options.overhead_steps)
    slots = ContinuousBatching(slot_engine, decode_text=spelled, rule=rule)
    prompts = random_prompts(definition.architecture.vocab_size)
    ways = {
        "slots": through_slots(slots, weights, prompts),
        "sync": in_batches(engine, weights, prompts, options.slots),
        "all": in_batches(engine, weights, prompts, NUM_PROMPTS * GROUP_SIZE),
    }
    return ways, slots


def same(ours: list[Sample], theirs: list[Sample]) -> float:
    """Share of samples with the same tokens."""
    return float(
        np.mean([np.array_equal(a.completion_ids, b.completion_ids) for a, b in zip(ours, theirs, strict=True)])
    )


def measure(options: argparse.Namespace) -> dict[str, object]:
    lengths = forced_lengths(
        NUM_PROMPTS * GROUP_SIZE, median=options.median_length, sigma=options.sigma, longest=options.longest, seed=0
    )
    ways, slots = ways_of(options)
    samples: dict[str, list[Sample]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        start = time.perf_counter()
        way([1] * len(lengths))
        print(f"{name}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
    slots.engine.tally.take()
    for _ in range(options.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            samples[name] = way(lengths)
            seconds[name].append(time.perf_counter() - start)
            print(f"{name}: {seconds[name][-1]:.2f} s, {sum(lengths) / seconds[name][-1]:.0f} tokens/s", flush=True)
    counts = slots.engine.tally.take()
    tokens_per_s = {name: sum(lengths) / statistics.median(of_way) for name, of_way in seconds.items()}
    return {
        "model": Path(options.model).name,
        "samples": len(lengths),
        "slots": options.slots,
        "sigma": options.sigma,
        "overhead_steps": options.overhead_steps,
        "lengths": {"median": options.median_length, "mean": float(np.mean(lengths)), "max": max(lengths)},
        "tokens": sum(lengths),
        "segments": counts.segments // options.repeats,
        "bubble": round(1 - counts.drawn_tokens / counts.row_steps, 4),
        "prefilled_tokens_per_distinct_prompt_token": counts.prefilled_tokens
        / (options.repeats * sum(len(s.prompt.token_ids) for s in samples["slots"][::GROUP_SIZE])),
        "seconds": {name: [round(s, 3) for s in of_way] for name, of_way in seconds.items()},
        "tokens_per_s": {name: round(speed, 1) for name, speed in tokens_per_s.items()},
        "times_sync": round(tokens_per_s["slots"] / tokens_per_s["sync"], 3),
        "times_all": round(tokens_per_s["slots"] / tokens_per_s["all"], 3),
        "same_samples_as_sync": same(samples["slots"], samples["sync"]),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny", help="as `model.path`")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--median-length", type=float, default=64.0)
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--overhead-steps", type=float, default=0.5, help="as `rollout.segment.overhead_steps`")
    parser.add_argument("--repeats", type=int, default=3)
    result = measure(parser.parse_args())
    print(json.dumps(result, indent=2))
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    kept[str(result["model"])] = result
    RESULTS.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
