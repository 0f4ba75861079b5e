"""Compares rollouts with few KV blocks with rollouts that have enough blocks for all slots at full length.

    python scripts/bench/kv_blocks.py --model DIR [--slots 64] [--samples 128] [--tokens 64] [--shares 0.5 0.33]

Samples have log-normal lengths of at most 4 times the mean, which the engine does not know beforehand. They are
generated with enough blocks for all slots at full length, and with the fractions `--shares` of these blocks.
"""

from __future__ import annotations

import argparse

from app.rollout.engine.continuous_batching import ContinuousBatchGenerator
from app.rollout.engine.engine import SlotEngine
from scripts.bench.forced_rollout import (
    LONGEST_OVER_MEAN,
    ForcedRollout,
    log_normal_lengths,
    open_rollout,
    positive,
)
from settings.schema.rollout import SegmentSettings


def measure(rollout: ForcedRollout, num_slots: int, num_blocks: int | None) -> tuple[SlotEngine, float]:
    """Runs a rollout; returns its engine and its seconds without compilation and warm-up."""
    engine = rollout.new_engine(num_slots, num_blocks=num_blocks)
    batching = ContinuousBatchGenerator(
        engine, decode_text=lambda _: "", stop_text=lambda _: "", segment_rule=rollout.rule
    )
    rollout.generate(batching)
    engine.counters.take()
    return engine, rollout.generate(batching)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny", help="as `model.path`")
    parser.add_argument("--slots", type=positive, default=64)
    parser.add_argument("--samples", type=positive, default=128)
    parser.add_argument("--group", type=positive, default=8, help="samples of a prompt")
    parser.add_argument("--tokens", type=positive, default=64, help="mean length of a sample")
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.33], help="of the blocks of all slots")
    options = parser.parse_args()
    group, mean, longest = options.group, options.tokens, LONGEST_OVER_MEAN * options.tokens
    drawn = log_normal_lengths(options.samples, group=group, mean=mean, sigma=options.sigma, longest=longest)
    rollout = open_rollout(
        options.model,
        num_prompts=options.samples // group,
        lengths=[drawn],
        longest=longest,
        slots=[options.slots],
        rule=SegmentSettings(min=1),
    )
    whole, whole_s = measure(rollout, options.slots, None)
    full, size = whole.programs.num_blocks, whole.programs.block_size
    print(f"{options.slots} slots, samples of up to {max(rollout.lengths[0])} tokens: {full} blocks of {size} tokens")
    for share in options.shares:
        engine, seconds = measure(rollout, options.slots, int(share * full))
        counts = engine.counters.take()
        print(
            f"with {share:.2f}x the blocks: {seconds / whole_s:.2f}x the time, {counts.preempted_rows} preemptions, "
            f"{counts.recomputed_tokens} of {counts.generated_tokens} tokens computed again"
        )


if __name__ == "__main__":
    main()
