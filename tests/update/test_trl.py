"""Tests losses, gradients, metrics and advantages against stored numbers of TRL."""

import functools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from app.advantage.group import (
    EPSILON,
    assign_group_advantages,
    group_moments,
    kl_penalized_rewards,
    rloo_advantages,
)
from app.advantage.reward_parts import RewardParts
from app.records.sample import Sample
from app.update.kl import k1, k3
from app.update.loss_aggregation import aggregations
from app.update.policy_loss import PolicyLoss, cispo_surrogate, clipped_surrogate, dual_clipped_surrogate
from app.update.ratios import LOG_RATIOS, LOG_WEIGHTS, ImportanceCorrection, mask_weights, truncate_weights
from scripts.make_trl_numbers import CASES, CORRECTION_BOUNDS, CORRECTION_CASES, DEFAULTS, LENGTHS, LONGEST, PATH, ROWS
from tests.tiny import PLAIN_LOSS, assert_trees_close, make_sample, one_a_row
from tests.update.table_policy import loss_and_gradient

GOLDEN = json.loads(PATH.read_text())
AGGREGATIONS = {
    "grpo": "sequence-mean-token-mean",
    "dr_grpo": "constant-length",
    "dapo": "token-mean",
    "luspo": "sequence-mean-token-sum",
    "cispo": "token-mean",
}
METRICS = {
    "kl": "policy/kl",
    "entropy": "policy/entropy",
    "clip_ratio/low_mean": "policy/clip_fraction_low",
    "clip_ratio/high_mean": "policy/clip_fraction_high",
}


def samples_of(inputs: dict[str, Any]) -> list[Sample]:

    def sample(i: int) -> Sample:
        def per_token(name: str) -> np.ndarray:
            return np.asarray(inputs[name][i][: LENGTHS[i]], np.float32)

        mask = np.asarray(inputs["mask"][i][: LENGTHS[i]])
        return make_sample(
            inputs["completion_ids"][i][: LENGTHS[i]],
            sample_index=i,
            loss_mask=mask,
            reward=inputs["rewards"][i],
            behavior_logprobs=per_token("behavior_logprobs"),
            policy_logprobs=per_token("old_logprobs"),
            reference_logprobs=per_token("reference_logprobs"),
            advantages=np.where(mask, np.float32(inputs["advantages"][i]), np.float32(0)),
        )

    return [sample(i) for i in range(ROWS)]


@functools.cache
def policy_loss(settings: tuple[tuple[str, Any], ...]) -> PolicyLoss:
    chosen = dict(settings)
    clips = {"clip_low": chosen["epsilon_low"], "clip_high": chosen["epsilon_high"]}
    surrogate = partial(clipped_surrogate, **clips)
    if chosen["is_cispo"]:
        surrogate = partial(cispo_surrogate, clip_low=10.0, clip_high=chosen["epsilon_high"] - 1)
    if chosen["delta"] is not None:
        surrogate = partial(dual_clipped_surrogate, dual_clip=chosen["delta"], **clips)
    return replace(
        PLAIN_LOSS,
        surrogate=surrogate,
        kl_estimator=k3 if chosen["beta"] else None,
        beta=chosen["beta"],
        entropy_coef=chosen["entropy_coef"],
        log_ratio=LOG_RATIOS[chosen["importance_sampling_level"]],
        correction=correction_of(chosen["mode"]) if "mode" in chosen else None,
    )


def ours(case: dict[str, Any], inputs: dict[str, Any], aggregation: str):
    settings = DEFAULTS | case
    is_old, kind = settings.pop("old"), settings.pop("loss_type", None)
    return loss_and_gradient(
        policy_loss((("is_cispo", kind == "cispo"), *sorted(settings.items()))),
        rows_of(inputs["logits"]),
        [s if is_old else replace(s, policy_logprobs=None) for s in samples_of(inputs)],
        one_a_row(ROWS, rows_per_micro_batch=2, num_tokens=16, num_targets=9),
        weights=aggregations(max_new_tokens=LONGEST)[aggregation],
    )


def correction_of(mode: str) -> ImportanceCorrection:
    """Returns the correction for a `vllm_importance_sampling_mode` of TRL."""
    level, _, kind = mode.partition("_")
    lowest, highest = CORRECTION_BOUNDS
    bounds = {
        "truncate": partial(truncate_weights, max_weight=highest),
        "mask": partial(mask_weights, min_weight=lowest, max_weight=highest),
    }
    return ImportanceCorrection(LOG_WEIGHTS[level], bounds[kind])


def rows_of(padded: list) -> np.ndarray:
    return np.concatenate([np.asarray(row[:length], np.float32) for row, length in zip(padded, LENGTHS, strict=True)])


def assert_all_equal_to_trl(expected: dict[str, Any]) -> None:
    inputs = expected["inputs"]
    for case in expected["grpo"]:
        gradient, parts = ours(case["settings"], inputs, AGGREGATIONS[case["settings"]["loss_type"]])
        assert float(parts.sums["loss"]) == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
        assert_gradient(gradient, case["gradient"])
        for name, theirs in case["metrics"].items():
            assert float(parts.sums[METRICS[name]]) == pytest.approx(theirs, rel=1e-5)
    for case in expected["corrections"]:
        gradient, parts = ours(case["settings"], inputs, AGGREGATIONS[case["settings"]["loss_type"]])
        assert float(parts.sums["loss"]) == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
        assert_gradient(gradient, case["gradient"])
        weights = np.concatenate(
            [np.asarray(w[: len(s.mask)])[s.mask] for w, s in zip(case["weights"], samples_of(inputs), strict=True)]
        )
        assert float(parts.sums["policy/correction_mean"]) == pytest.approx(weights.mean(), rel=1e-5)
    for case in expected["decoupled_advantages"]:
        samples, parts = decoupled(case)
        deviation = parts.advantages_of(samples).sum(axis=0).std(ddof=1)
        # TRL adds 1e-4 to standard deviations, also to the one of the step.
        scale = (deviation + EPSILON) / (deviation + 1e-4)
        np.testing.assert_allclose(
            [scale * np.asarray(s.advantages)[0] for s in parts.assign(samples)],
            case["advantages"],
            rtol=1e-5,
            atol=1e-6,
        )
    # TRL has one ratio per sample and we have one per token: at ratio 1 the losses differ, but the gradients do not.
    gradient, _ = ours({"old": False}, inputs, "sequence-mean-token-sum")
    assert_gradient(gradient, expected["rloo"]["gradient"])
    for case in expected["rloo_advantages"]:
        samples = [replace(s, loss_mask=None) for s in samples_of(inputs)]
        rewards = partial(kl_penalized_rewards, kl_estimator=k1, beta=case["beta"])
        with_advantages = assign_group_advantages(samples, advantages=rloo_advantages, rewards=rewards)
        np.testing.assert_allclose(
            [np.asarray(s.advantages)[0] for s in with_advantages], case["advantages"], rtol=1e-5, atol=1e-6
        )


def decoupled(case: dict[str, Any]) -> tuple[list[Sample], RewardParts]:
    """Returns samples with several rewards, and reward parts that normalize each reward like TRL."""

    def advantages(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
        group = group_moments(rewards, group_ids)
        return (rewards - group.means) / (group.stds + 1e-4)

    rewards = [{str(k): x for k, x in enumerate(row) if x is not None} for row in case["rewards"]]
    samples = [
        make_sample([0], sample_index=i, group_id=i // case["group_size"], reward=0.0, rewards=row)
        for i, row in enumerate(rewards)
    ]
    return samples, RewardParts({str(k): weight for k, weight in enumerate(case["weights"])}, advantages)


def assert_gradient(gradient, theirs: list) -> None:
    expected = rows_of(theirs)
    assert np.abs(expected).max() > 1e-2
    assert_trees_close(gradient, expected)


def test_losses_gradients_metrics_and_advantages_equal_stored_numbers_of_trl():
    assert [case["settings"] for case in GOLDEN["grpo"]] == list(CASES)
    assert [case["settings"] for case in GOLDEN["corrections"]] == list(CORRECTION_CASES)
    assert GOLDEN["provenance"].keys() == {"script", "trl", "torch", "date", "seed"}
    assert_all_equal_to_trl(GOLDEN)
