"""Tests of the notices at launch: settings without effect, and what a user may not have meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings import load
from settings.checks.commands import check_for_train
from settings.checks.unused_settings import launch_notices, unused_adapter_notices
from tests.settings.loading import load_text, with_sets

CRITICS = "algorithm.estimator gae or vtrace"


@pytest.mark.parametrize(
    ("unused", "condition", "used_with"),
    [
        ("algorithm.gamma=0.9", "algorithm.estimator gae or reinforce_plus_plus or vtrace", "algorithm.name=ppo"),
        ("algorithm.lam=0.9", CRITICS, "algorithm.estimator=vtrace"),
        ("critic.learning_rate=1.0", CRITICS, "algorithm.name=ppo"),
        ("critic.max_tokens_per_device=4096", CRITICS, "algorithm.name=ppo"),
        ("critic.lam=0.5", "algorithm.estimator gae", "algorithm.estimator=gae"),
        ("algorithm.correction_max=3.0", "algorithm.correction mask or truncate", "algorithm.correction=truncate"),
        ("algorithm.correction_min=0.1", "algorithm.correction mask", "algorithm.correction=mask"),
        ("model.lora.alpha=32.0", "model.lora.rank of 1 or more", "model.lora.rank=2"),
        ("env.max_turns=3", "env.source or env.tools", "env.tools=calculator"),
        ("env.weight=0.5", "env.source", "env.source=guess_number"),
        ("env.turn_discount=0.5", "env.source", None),
    ],
)
def test_a_setting_that_nothing_reads_is_named_with_what_would_read_it(
    unused: str, condition: str, used_with: str | None
) -> None:
    resolved = with_sets(unused)
    check_for_train(resolved)
    field, _, value = unused.partition("=")
    assert f"no effect without {condition}: {field} = {value} (from --set)" in launch_notices(resolved)
    if used_with is not None:
        notices = launch_notices(with_sets(unused, used_with, "optimizer.learning_rate=1e-5"))
        assert [notice for notice in notices if notice.startswith("no effect")] == []


def test_what_a_preset_set_for_another_algorithm_is_told_in_one_line() -> None:
    ppo = load("quickstart_ppo", [], {})
    assert launch_notices(ppo) == (ppo.algorithm_changes,)
    resolved = load("quickstart_ppo", ["algorithm.name=grpo", "rollout.group_size=2"], {})
    check_for_train(resolved)
    (notice,) = launch_notices(resolved)
    assert notice.startswith(f"no effect without {CRITICS}: algorithm.lam = 1.0 (from yaml:")
    assert ", critic.learning_rate = " in notice and ", critic.warmup_steps = " in notice


def test_the_critic_s_micro_batches_are_not_named_where_they_are_the_policy_s() -> None:
    assert launch_notices(with_sets("algorithm.rows_per_device=2", "algorithm.dynamic_microbatch=false")) == ()


def test_with_adapters_the_reference_is_not_moved_to_host_memory() -> None:
    offload = ("score.reference.offload=true", "algorithm.beta=0.1")
    assert with_sets(*offload).settings.offloads_reference is True
    resolved = with_sets(*offload, "model.lora.rank=8", "optimizer.learning_rate=1e-5")
    assert resolved.settings.offloads_reference is False
    assert launch_notices(resolved) == (
        "no effect without model.lora.rank null: score.reference.offload = True (from --set)",
    )


def test_the_default_learning_rate_is_called_too_low_for_adapters(folder: Path) -> None:
    (line,) = launch_notices(load_text(folder, "model: {lora: {rank: 8}}"))
    assert line.startswith("optimizer.learning_rate = 1e-06 (from the default) suits training all weights")
    assert unused_adapter_notices(with_sets("model.lora.rank=8")) == (
        "model.lora.rank = 8 (from --set) has no effect here: model.path is loaded without adapters",
    )


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [(("env.tools=calculator",), True), (("env.tools=calculator", "rollout.mode=exact", "rollout.slots=4"), False)],
)
def test_a_launch_says_where_the_times_of_answers_decide_roundings(overrides: tuple[str, ...], is_told: bool) -> None:
    notices = launch_notices(with_sets(*overrides))
    assert [one.startswith("rollout.mode: fast: with an environment") for one in notices] == [True] * is_told


@pytest.mark.parametrize(
    ("source", "eval_source", "eval_split", "is_told"),
    [
        ("a.jsonl", "a.jsonl", None, True),
        ("a.jsonl", "b.jsonl", None, False),
        ("hf:a/b", "hf:a/b", None, False),
        ("hf:a/b", "hf:a/b", "train", True),
    ],
)
def test_evaluating_on_the_training_data_is_told(
    source: str, eval_source: str, eval_split: str | None, is_told: bool
) -> None:
    options = [f"data.source={source}", f"data.eval_source={eval_source}", f"data.eval_split={eval_split or 'null'}"]
    told = [notice.startswith("data.eval_source is data.source") for notice in launch_notices(with_sets(*options))]
    assert any(told) is is_told
