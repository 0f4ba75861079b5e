"""Tests that every micro-batch setting affects exactly the roles that it is for."""

from itertools import chain

import numpy as np

from app.batching.micro_batch_plan import MicroBatchPlan
from app.batching.micro_batcher import MicroBatcher, sequence_lengths
from app.runtime.micro_batching import MaxLengths, make_batcher, make_score_batcher
from settings import load
from settings.schema.settings import Settings
from tests.tiny import ODD, random_samples

BASE = (
    "data.max_prompt_length=8",
    "rollout.max_new_tokens=16",
    "rollout.group_size=4",
    "algorithm.max_tokens_per_device=64",
)
SAMPLES = random_samples(9, 4, vocab_size=ODD.vocab_size, longest_prompt=8, longest_completion=16)


def settings_of(*overrides: str) -> Settings:
    # One layer may not choose both ways, so the case's overrides are in a layer above the base.
    chosen = (override.partition("=") for override in overrides)
    environment = {f"GRPO__{name.replace('.', '__').upper()}": value for name, _, value in chosen}
    return load(None, [*BASE, "algorithm.beta=0.1", "algorithm.epochs=2"], environment).settings


def plan(cut: MicroBatcher, *, devices: int = 2) -> MicroBatchPlan:
    return cut.plan(sequence_lengths(SAMPLES), num_devices=devices)


def update(*overrides: str) -> MicroBatchPlan:
    settings = settings_of(*overrides)
    return plan(make_batcher(settings, settings.algorithm, ODD, MaxLengths.from_settings(settings)))


def role(name, *overrides: str) -> MicroBatchPlan:
    settings = settings_of(*overrides)
    return plan(make_score_batcher(settings, name, ODD, MaxLengths.from_settings(settings)))


def shapes(planned: MicroBatchPlan) -> list[tuple[int, int]]:
    return [(len(one.rows), one.shape.num_tokens) for one in planned.micro_batches]


def members(planned: MicroBatchPlan) -> list[int]:
    rows = chain.from_iterable(one.rows for one in planned.micro_batches)
    return sorted(i for row in rows for segment in row for i in segment)


def test_token_budgets_limit_the_micro_batches_of_updates_and_scoring() -> None:
    assert max(rows * tokens for rows, tokens in shapes(update())) <= 2 * 64
    larger = update("algorithm.max_tokens_per_device=128")
    assert larger.num_micro_batches < update().num_micro_batches
    assert role("policy", "algorithm.max_tokens_per_device=128") == larger


def test_balancing_keeps_all_samples_of_the_step() -> None:
    # A prompt is packed once for all its samples in a row.
    assert sum(len(row) for one in update().micro_batches for row in one.rows) < len(SAMPLES)
    assert update("algorithm.balance_batch=false") != update()
    assert members(update("algorithm.balance_batch=false")) == members(update()) == list(range(len(SAMPLES)))


def test_score_strategy_determines_the_sizes_of_fixed_micro_batches() -> None:
    """36 samples on two devices give ten rows per micro-batch."""
    five = "score.rows_per_device=5"
    assert [rows for rows, _ in shapes(role("policy", five))] == [10, 10, 10, 6]
    assert [rows for rows, _ in shapes(role("policy", five, "score.strategy=scan"))] == [10, 10, 10, 10]
    assert [rows for rows, _ in shapes(role("policy", "score.strategy=off"))] == [36]
    assert [rows for rows, _ in shapes(role("policy", "score.dynamic=false"))] == [16, 16, 4]
    assert update(five) == update()


def test_fixed_rows_apply_only_to_the_role_or_update_that_sets_them() -> None:
    chosen = "score.reference.rows_per_device=3"
    assert [rows for rows, _ in shapes(role("reference", chosen))] == [6] * 6
    assert role("policy", chosen) == role("policy")
    fixed = update("algorithm.dynamic_microbatch=false")
    assert [rows for rows, _ in shapes(fixed)] == [16, 16, 16]
    assert np.prod(shapes(fixed), axis=1).max() > 2 * 64
    assert role("policy", "algorithm.dynamic_microbatch=false") == role("policy")
