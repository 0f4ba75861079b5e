"""Tests of the notices at launch: settings without effect, and what a user may not have meant."""

import pytest

from settings import load
from settings.checks.commands import check_for_train
from settings.checks.unused_settings import launch_notices, unused_adapter_notices
from tests.settings.loading import over_defaults, rows_of, with_sets

UNUSED = rows_of("""
algorithm.gamma=0.9 | algorithm.estimator gae or reinforce_plus_plus or vtrace | algorithm.name=reinforce_plus_plus
algorithm.gae_chunk_size=64 | grpo gae --backend chunked | -
algorithm.lam=0.9 | algorithm.estimator gae or vtrace | algorithm.estimator=vtrace
critic.learning_rate=1.0 | algorithm.estimator gae or vtrace | algorithm.name=ppo
critic.max_tokens_per_device=4096 | algorithm.estimator gae or vtrace | algorithm.name=ppo
critic.lam=0.5 | algorithm.estimator gae | algorithm.estimator=gae
algorithm.correction_max=3.0 | algorithm.correction mask or truncate | algorithm.correction=truncate
algorithm.correction_min=0.1 | algorithm.correction mask | algorithm.correction=mask
model.lora.alpha=32.0 | model.lora.rank of 1 or more | model.lora.rank=2
score.reference.offload=True | model.lora.rank null | model.lora.rank=0
env.max_turns=3 | env.source or env.tools | env.tools=calculator
env.weight=0.5 | env.source | env.source=guess_number
env.turn_discount=0.5 | env.credit turn | env.credit=turn
""")


@pytest.mark.parametrize(("unused", "condition", "used_with"), UNUSED)
def test_a_setting_that_nothing_reads_is_named_with_what_would_read_it(
    unused: str, condition: str, used_with: str
) -> None:
    needed = {"model.lora.rank null": "model.lora.rank=8", "env.credit turn": "env.source=guess_number"}
    base = ("optimizer.learning_rate=1e-5", needed.get(condition, "algorithm.name=grpo"))
    field, _, value = unused.partition("=")
    resolved = over_defaults(*base, unused)
    assert f"no effect without {condition}: {field} = {value} (from --set)" in launch_notices(resolved)
    if used_with != "-":
        notices = launch_notices(over_defaults(*base, unused, used_with))
        assert [notice for notice in notices if notice.startswith("no effect")] == []


def test_settings_of_a_preset_for_another_algorithm_are_named_in_one_line() -> None:
    ppo = load("quickstart_ppo", [], {})
    assert launch_notices(ppo) == (ppo.algorithm_changes,)
    resolved = load("quickstart_ppo", ["algorithm.name=grpo", "rollout.group_size=2"], {})
    check_for_train(resolved)
    (notice,) = launch_notices(resolved)
    assert notice.startswith("no effect without algorithm.estimator gae or vtrace: algorithm.lam = 1.0 (from yaml:")
    assert ", critic.learning_rate = " in notice and ", critic.warmup_steps = " in notice
    # The micro-batches of the critic are the policy's.
    assert launch_notices(with_sets("algorithm.rows_per_device=2", "algorithm.dynamic_microbatch=false")) == ()


def test_adapter_notes_name_a_low_learning_rate_or_adapters_that_are_not_loaded() -> None:
    resolved = over_defaults("model.lora.rank=8")
    (line,) = launch_notices(resolved)
    assert line.startswith("optimizer.learning_rate = 1e-06 (from the default) suits training all weights")
    assert unused_adapter_notices(resolved) == (
        "model.lora.rank = 8 (from --set) has no effect here: model.path is loaded without adapters",
    )
    for without in (over_defaults(), over_defaults("model.lora.rank=0")):
        assert launch_notices(without) == () == unused_adapter_notices(without)


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        ("env.tools=calculator", "rollout.mode: fast: with an environment"),
        ("env.tools=calculator rollout.mode=exact rollout.slots=4", None),
        ("data.source=a.jsonl data.eval_source=a.jsonl", "data.eval_source is data.source"),
        ("data.source=a.jsonl data.eval_source=b.jsonl", None),
        ("data.source=hf:a/b data.eval_source=hf:a/b", None),
        ("data.source=hf:a/b data.eval_source=hf:a/b data.eval_split=train", "data.eval_source is data.source"),
    ],
)
def test_launch_notes_name_surprising_combinations_of_settings(overrides: str, start: str | None) -> None:
    notices = launch_notices(with_sets(*overrides.split()))
    assert [notice.startswith(start) for notice in notices] == [True] if start else notices == ()
