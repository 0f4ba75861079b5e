"""Tests that settings select the functions of the update."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from app.training.learner import make_correction, make_policy_loss
from app.update.kl import k1, k2, k3
from app.update.policy_loss import (
    cispo_surrogate,
    clipped_surrogate,
    dual_clipped_surrogate,
)
from app.update.ratios import (
    geometric_log_weight,
    mask_weights,
    sequence_log_ratio,
    sequence_log_weight,
    token_log_ratio,
    truncate_weights,
)
from settings import load
from settings.schema.algorithm import AlgorithmSettings


def algorithm(*overrides: str) -> AlgorithmSettings:
    return load(None, [f"algorithm.{override}" for override in overrides], {}).settings.algorithm


def partial_of(function: Any) -> functools.partial:
    assert isinstance(function, functools.partial)
    return function


def test_a_penalty_in_the_reward_is_not_paid_in_the_loss_again():
    in_loss, in_reward = algorithm("beta=0.1"), algorithm("beta=0.1", "kl_in=reward")
    loss = make_policy_loss(in_loss)
    assert (loss.beta, loss.kl_estimator) == (0.1, k3)
    loss = make_policy_loss(in_reward)
    assert (loss.beta, loss.kl_estimator) == (0.0, k1)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_without_a_weight_no_penalty_is_wired_whatever_else_was_said_of_it(place):
    unpaid = algorithm(f"kl_in={place}", "kl_estimator=k2")
    assert make_policy_loss(unpaid).kl_estimator is None
    assert make_policy_loss(algorithm("beta=1", "kl_estimator=k2")).kl_estimator is k2


def test_a_second_clip_is_another_surrogate():
    once = partial_of(make_policy_loss(algorithm("clip_high=0.28")).surrogate)
    assert (once.func, once.keywords) == (clipped_surrogate, {"clip_low": 0.2, "clip_high": 0.28})
    twice = partial_of(make_policy_loss(algorithm("dual_clip=3.0")).surrogate)
    assert twice.func is dual_clipped_surrogate
    assert twice.keywords == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}


def test_level_of_the_ratio_and_kind_of_clip_are_chosen_apart_from_each_other():
    assert make_policy_loss(algorithm()).log_ratio is token_log_ratio
    mixed = make_policy_loss(algorithm("name=cispo", "ratio_level=sequence"))
    assert mixed.log_ratio is sequence_log_ratio
    surrogate = partial_of(mixed.surrogate)
    assert (surrogate.func, surrogate.keywords) == (cispo_surrogate, {"clip_low": 10.0, "clip_high": 0.2})
    assert make_policy_loss(algorithm("name=gspo")).log_ratio is sequence_log_ratio


def test_an_older_policy_is_corrected_only_where_that_is_asked_for():
    assert make_policy_loss(algorithm()).correction is None
    truncating = make_correction(algorithm("correction=truncate", "name=gspo", "correction_max=3.0"))
    assert truncating is not None
    assert (truncating.log_weight, truncating.veto) == (geometric_log_weight, 1e-4)
    bound = partial_of(truncating.bound)
    assert (bound.func, bound.keywords) == (truncate_weights, {"max_weight": 3.0})
    masking = make_correction(algorithm("correction=mask", "correction_level=sequence", "correction_veto=0"))
    assert masking is not None
    assert (masking.log_weight, masking.veto) == (sequence_log_weight, 0.0)
    bound = partial_of(masking.bound)
    assert (bound.func, bound.keywords) == (mask_weights, {"min_weight": 0.5, "max_weight": 2.0})
