"""Compares the speed of packed rows and padded rows under the same quota of token positions, in scoring and update.

    python scripts/bench/throughput.py [--shape small|qwen2.5-0.5b] [--quota 4096] [--num-samples 48] [--dtype float32]
        [--rounds 3] [--out FILE.json]

Lengths are log-normal (sigma 1), limited to the quota. The baseline puts each sample into a separate row, padded to the
bucket of the longest sample. Micro-batches of both have at most `--quota` token positions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from app.batching.micro_batch_plan import TokenBudget, choose_row_length
from app.batching.micro_batch_shapes import bucket_length
from app.batching.micro_batcher import FixedRowBatcher, MicroBatcher, PackedRowBatcher
from app.mesh.axis_rules import AXES
from app.model.architecture import Architecture, RopeConfig, forward_flops
from app.model.decoder import DecoderDefinition
from app.records.sample import Prompt, Sample
from app.score.scorer import Scorer
from app.update.loss_aggregation import token_mean
from app.update.optimizer import TrainState, init_train_state, make_optimizer, make_schedule, train_state_shardings
from app.update.policy_loss import PolicyLoss, clipped_surrogate, make_policy_objective
from app.update.step import UpdateStep
from app.update.updater import PolicyBatchPacker, Updater
from settings.schema.algorithm import OptimizerSettings

SMALL = Architecture(
    family="llama",
    vocab_size=8192,
    num_layers=4,
    model_dim=256,
    mlp_dim=768,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rope=RopeConfig(theta=10_000.0),
    norm_epsilon=1e-5,
    max_positions=32_768,
    tied_embeddings=True,
    qkv_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
)
SHAPES = {
    "small": SMALL,
    "qwen2.5-0.5b": replace(
        SMALL,
        family="qwen2",
        vocab_size=151_936,
        num_layers=24,
        model_dim=896,
        mlp_dim=4864,
        num_query_heads=14,
        num_kv_heads=2,
        rope=RopeConfig(theta=1_000_000.0),
        norm_epsilon=1e-6,
        qkv_bias=True,
    ),
}
PROMPT_SHARE = 0.25
"""Fraction of a sample's tokens that belong to the prompt."""
LEARNING_RATE = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--quota", type=int, default=4096, help="tokens of a micro-batch, and the longest sample")
    parser.add_argument("--num-samples", type=int, default=48)
    parser.add_argument("--mean-length", type=int, default=800)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes of each side, in turn")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    architecture = SHAPES[options.shape]
    samples = draw_samples(options, architecture.vocab_size)
    cutters = cutters_of(options, architecture, samples)
    passes = {**scoring(options, architecture, samples, cutters), **updating(options, architecture, samples, cutters)}
    seconds = in_turn(passes, options.rounds)
    print(table(samples, cutters, seconds))
    if options.out:
        options.out.write_text(
            json.dumps(record(options, samples, cutters, seconds), indent=1) + "\n", encoding="utf-8"
        )


def draw_samples(options: argparse.Namespace, vocab_size: int) -> list[Sample]:
    """Returns samples with log-normal lengths and random advantages, each with its own prompt."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(options.mean_length) - 0.5, 1.0, options.num_samples)
    samples = []
    for i, length in enumerate(np.clip(lengths, 16, options.quota).astype(int).tolist()):
        ids = rng.integers(vocab_size, size=length).astype(np.int32)
        num_prompt = max(1, int(length * PROMPT_SHARE))
        zeros = np.zeros(length - num_prompt, np.float32)
        samples.append(
            Sample(
                prompt=Prompt(f"row-{i}", ids[:num_prompt], "", None),
                sample_index=0,
                group_id=i,
                completion_ids=ids[num_prompt:],
                completion="",
                behavior_logprobs=zeros,
                advantages=zeros + np.float32(rng.normal()),
                finish_reason="stop",
                policy_version=0,
            )
        )
    return samples


def cutters_of(
    options: argparse.Namespace, architecture: Architecture, samples: list[Sample]
) -> dict[str, MicroBatcher]:
    longest = max(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
    rows = max(1, options.quota // bucket_length(longest))
    budget = TokenBudget(
        max_tokens_per_device=options.quota,
        row_length=choose_row_length(options.quota, longest),
        share_prompts=True,
        balance=True,
    )
    return {
        f"padded, {rows} a micro-batch": FixedRowBatcher(rows, trim_tail=True),
        "packed": PackedRowBatcher(budget, forward_flops(architecture)),
    }


def one_device() -> Mesh:
    return jax.make_mesh((1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:1])


def scoring(
    options: argparse.Namespace, architecture: Architecture, samples: list[Sample], cutters: dict[str, MicroBatcher]
) -> dict[tuple[str, str], Callable[[], None]]:
    """Returns, for each kind of micro-batch, a function that scores all samples."""
    mesh, definition = one_device(), DecoderDefinition.create(architecture)
    params = definition.initialise(0)
    scorer = Scorer(definition, mesh, dtype=jnp.dtype(options.dtype), logits_chunk=1024)

    def score(cut: MicroBatcher) -> None:
        scorer.per_token(params, samples, cut(samples, mesh).local_plan, temperature=1.0)

    return {("score", name): lambda cut=cut: score(cut) for name, cut in cutters.items()}


def updating(
    options: argparse.Namespace, architecture: Architecture, samples: list[Sample], cutters: dict[str, MicroBatcher]
) -> dict[tuple[str, str], Callable[[], None]]:
    """Returns, for each kind of micro-batch, a function that makes an optimizer step from the same weights."""
    mesh, definition = one_device(), DecoderDefinition.create(architecture)
    settings = OptimizerSettings(learning_rate=LEARNING_RATE)
    schedule = make_schedule(settings, num_updates=1000)
    optimizer = make_optimizer(settings, schedule)
    shardings = train_state_shardings(optimizer, definition.shapes, definition.shardings(mesh), mesh)
    loss = PolicyLoss(
        surrogate=lambda *args: clipped_surrogate(*args, clip_low=0.2, clip_high=0.2),
        kl_estimator=None,
        beta=0.0,
        entropy_coef=0.0,
    )
    objective = make_policy_objective(
        definition, loss, dtype=jnp.dtype(options.dtype), remat="minimal", logits_chunk=1024
    )
    step = UpdateStep(objective, optimizer, schedule, shardings)
    kept: list[TrainState] = [init_train_state(optimizer, definition.initialise(0), shardings)]

    def update(cut: MicroBatcher) -> None:
        updater = Updater(step, mesh, micro_batcher=cut, pack=PolicyBatchPacker(token_mean, roles=()))
        kept[0], _ = updater.update(kept[0], [[samples]], temperature=1.0)

    return {("update", name): lambda cut=cut: update(cut) for name, cut in cutters.items()}


def in_turn(passes: dict[tuple[str, str], Callable[[], None]], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Returns the seconds of each pass in each round; a warm-up compiles, then passes alternate."""
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in passes}
    for number in range(rounds + 1):
        for key, run in passes.items():
            start = time.perf_counter()
            run()
            if number:
                seconds[key].append(time.perf_counter() - start)
    return seconds


def table(samples: list[Sample], cutters: dict[str, MicroBatcher], seconds: dict[tuple[str, str], list[float]]) -> str:
    tokens = sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
    baseline, packed = cutters
    lines = [
        f"{len(samples)} samples, {tokens:,} tokens; tokens/s:",
        f"{'':<10}{baseline:>34}{packed:>20}{'ratio':>8}",
    ]
    for phase in ("score", "update"):
        slow, fast = (tokens / statistics.median(seconds[phase, name]) for name in (baseline, packed))
        lines.append(f"{phase:<10}{slow:>34,.0f}{fast:>20,.0f}{fast / slow:>7.2f}x")
    return "\n".join(lines)


def record(
    options: argparse.Namespace,
    samples: list[Sample],
    cutters: dict[str, MicroBatcher],
    seconds: dict[tuple[str, str], list[float]],
) -> dict:
    tokens = sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
    device = jax.devices()[0]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{device.platform}: {device.device_kind}",
        "jax": jax.__version__,
        **{name: value for name, value in vars(options).items() if name != "out"},
        "tokens": tokens,
        "fill": {name: cut(samples, one_device()).packing_stats()["fill"] for name, cut in cutters.items()},
        "seconds": {f"{phase}, {name}": values for (phase, name), values in seconds.items()},
    }


if __name__ == "__main__":
    main()
