"""Tests the notices at launch about settings without effect and surprising combinations."""

from dataclasses import replace

import pytest

from settings import load
from settings.checks.commands import check_for_train
from settings.checks.resumed_settings import is_in
from settings.checks.unused_settings import (
    SECTIONS_OF_ROLLOUTS,
    USAGE_CONDITIONS,
    launch_notices,
    unused_adapter_notices,
    unused_setting_notices,
)
from settings.loading.config_file import ConfigFile, find_config_file
from settings.loading.fields import FIELDS, value_of
from settings.loading.printing import without_derived
from tests.settings.loading import over_defaults, rows_of, with_sets

UNUSED = rows_of("""
algorithm.gamma=0.9 | algorithm.estimator gae or reinforce_plus_plus or vtrace | algorithm.name=reinforce_plus_plus
algorithm.gae_chunk_size=64 | grpo gae --backend chunked | -
algorithm.lam=0.9 | algorithm.estimator gae or vtrace | algorithm.estimator=vtrace
critic.learning_rate=1.0 | algorithm.estimator gae or vtrace | algorithm.name=ppo
critic.lam=0.5 | algorithm.estimator gae | algorithm.estimator=gae
algorithm.correction_max=3.0 | algorithm.correction mask or truncate | algorithm.correction=truncate
algorithm.correction_min=0.1 | algorithm.correction mask | algorithm.correction=mask
model.lora.alpha=32.0 | model.lora.rank of 1 or more | model.lora.rank=2
score.reference.offload=True | model.lora.rank null or reference.path | model.lora.rank=0
score.reference.offload=True | model.lora.rank null or reference.path | reference.path=teacher
env.max_turns=3 | env.source or env.tools | env.tools=calculator
env.weight=0.5 | env.source | env.source=guess_number
env.turn_discount=0.5 | env.credit turn | env.credit=turn
rollout.pdsr.heavy_percent=20.0 | rollout.scheduler pdsr_v1 and rollout.placement island | rollout.scheduler=pdsr_v1
rollout.pdsr.percentile=90.0 | rollout.scheduler pdsr_v2 or adaptive and rollout.placement island |
  rollout.scheduler=adaptive
rollout.pdsr.fast_limit_tokens=9 | rollout.scheduler pdsr_v1 or pdsr_v2 and rollout.placement island |
  rollout.scheduler=pdsr_v2
rollout.pdsr.window=64 | rollout.scheduler pdsr_v1, pdsr_v2 or adaptive and rollout.placement island |
  rollout.scheduler=adaptive
rollout.workers.heavy.count=2 | rollout.scheduler set and rollout.placement island | rollout.scheduler=sync
rollout.workers.fast.slots=2 | rollout.scheduler set and rollout.placement island, and
  rollout.workers.fast.count of 1 or more | rollout.scheduler=sync
rollout.ray.heavy_resources={'GPU': 1.0} | rollout.ray.address, and rollout.workers.heavy.count of 1 or more |
  rollout.ray.address=local
score.policy.rows_per_device=4 | several optimizer steps in a training step, algorithm.kl_in reward or advantage, or
  estimator vtrace | algorithm.epochs=2
score.reference.max_tokens_per_device=4096 | algorithm.beta above 0 | algorithm.beta=0.1
score.reward.rows_per_device=4 | reward.model | reward.model=judge
score.strategy=scan | a scored role or reward.model | algorithm.beta=0.1
score.max_tokens_per_device=4096 | a scored role or reward.model | reward.model=judge
reward.overlong_penalty=2.0 | reward.overlong_buffer | reward.overlong_buffer=8
reward.batch_size=8 | a reward function in Python | reward.functions=a.py:f
plugins.timeout_s=5.0 | a reward function in a file or module, env.source or env.tools |
  reward.functions=math_verify
algorithm.bootstrap_truncated=True | algorithm.mask_truncated false | algorithm.mask_truncated=false
algorithm.max_rounds=3 | algorithm.filter zero_variance | algorithm.filter=zero_variance
reference.path=teacher | algorithm.beta above 0 | algorithm.beta=0.1
algorithm.kl_estimator=k1 | algorithm.beta above 0 | algorithm.beta=0.1
algorithm.shuffle=True | algorithm.mini_batch_prompts | algorithm.mini_batch_prompts=2
optimizer.final_fraction=0.1 | optimizer.schedule linear or cosine | optimizer.schedule=cosine
eval.num_prompts=3 | eval.every_steps above 0 | eval.every_steps=2
data.eval_split=dev | evaluation data that is built in or on the hub | data.eval_source=hf:a/b
data.split=dev | data.source that is built in or on the hub | data.source=hf:a/b
data.answer_column=a | data in files or on the hub | data.source=a.jsonl
data.shuffle=False | data.curriculum none | data.curriculum=none
data.num_problems=9 | builtin:arithmetic as data.source or data.eval_source | data.source=builtin:arithmetic
logging.wandb_mode=offline | logging.wandb_project | logging.wandb_project=p
""")
NEEDED = {
    "algorithm.mask_truncated false": ("algorithm.name=ppo", "algorithm.mask_truncated=true"),
    "model.lora.rank null or reference.path": ("model.lora.rank=8", "algorithm.beta=0.1"),
    "env.credit turn": ("env.source=guess_number",),
    "eval.every_steps above 0": ("eval.every_steps=0",),
    "data.curriculum none": ("data.curriculum=pass_rate",),
    "evaluation data that is built in or on the hub": ("data.eval_source=a.jsonl",),
    "data.source that is built in or on the hub": ("data.source=a.jsonl", "data.eval_source=b.jsonl"),
    "builtin:arithmetic as data.source or data.eval_source": ("data.source=a.jsonl", "data.eval_source=b.jsonl"),
}
ALWAYS_READ = (
    *("run", "mesh", "watchdog", "checkpoint", "model.path", "model.eos_tokens", "model.dtype", "model.remat"),
    *("model.attention", "model.logits_chunk", "model.lora.rank", "data.source", "data.system_prompt"),
    *("data.chat_template", "data.max_prompt_length", "data.overlong_prompts", "data.curriculum"),
    *("eval.every_steps", "env.source", "env.tools", "reward.functions", "reward.model", "reward.overlong_buffer"),
    *("reward.on_error", "logging.wandb_project", "logging.tensorboard", "logging.profile_steps"),
    *("logging.save_rollouts", "logging.completions_every_steps", "logging.report", "rollout.segment.max"),
    *("rollout.prompts_per_step", "rollout.group_size", "rollout.max_new_tokens", "rollout.stop"),
    *("rollout.max_length_total", "rollout.prefill_length_min", "rollout.temperature", "rollout.top_k"),
    *("rollout.top_p", "rollout.min_p", "rollout.kv_blocks", "rollout.mode", "rollout.scheduler"),
    *("rollout.placement", "rollout.mesh", "rollout.weights", "rollout.kv_cache", "algorithm.name"),
    *("algorithm.estimator", "algorithm.ratio_level", "algorithm.clip", "algorithm.beta", "algorithm.clip_low"),
    *("algorithm.clip_high", "algorithm.entropy_coef", "algorithm.loss_aggregation", "algorithm.filter"),
    "algorithm.mask_truncated",
    *("algorithm.correction", "algorithm.epochs", "algorithm.mini_batch_prompts", "algorithm.dynamic_microbatch"),
    *("algorithm.max_tokens_per_device", "algorithm.rows_per_device", "algorithm.whiten_advantages"),
    *("optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.beta1"),
    *("optimizer.beta2", "optimizer.first_moment", "optimizer.second_moment", "optimizer.offload"),
    *("optimizer.epsilon", "optimizer.weight_decay", "optimizer.max_grad_norm"),
)
"""Settings and sections without a condition."""
REFUSED = (
    "algorithm.reward_normalization",
    *("algorithm.dual_clip", "algorithm.kl_target", "rollout.slots", "rollout.routing_replay", "rollout.devices"),
    *("rollout.max_staleness", "rollout.ray.address"),
)
"""Settings that are refused where nothing reads them."""


def test_every_setting_is_either_used_under_a_condition_or_always_read_or_refused() -> None:
    conditional = {field for *_, fields in USAGE_CONDITIONS for field in fields}
    others = {field for field in FIELDS if is_in(field, (*ALWAYS_READ, *REFUSED))}
    assert not conditional & others and conditional | others == {*FIELDS}


@pytest.mark.parametrize(("unused", "condition", "used_with"), UNUSED)
def test_an_unused_setting_is_named_with_its_condition(unused, condition, used_with):
    base = ("optimizer.learning_rate=1e-5", *NEEDED.get(condition, ()))
    field, _, value = unused.partition("=")
    resolved = over_defaults(*base, unused)
    shown = repr(value_of(resolved.settings, field))
    assert shown.strip("'") == value
    assert f"no effect without {condition}: {field} = {shown} (from --set)" in launch_notices(resolved)
    if used_with != "-":
        notices = launch_notices(over_defaults(*base, unused, used_with))
        assert [notice for notice in notices if notice.startswith("no effect")] == []


def test_a_command_reports_only_settings_that_it_reads() -> None:
    resolved = with_sets("data.source=a.jsonl", "rollout.pdsr.window=64", "score.strategy=scan")
    (notice,) = unused_setting_notices(resolved, SECTIONS_OF_ROLLOUTS)
    assert notice.endswith("rollout.placement island: rollout.pdsr.window = 64 (from --set)")
    assert [notice.partition(": ")[2][:6] for notice in unused_setting_notices(resolved)] == ["rollou", "score."]
    assert unused_setting_notices(resolved, ()) == ()


def test_settings_of_a_users_file_for_another_algorithm_are_named_in_one_line() -> None:
    ppo, other = load("quickstart_ppo", [], {}), ["algorithm.name=grpo", "rollout.group_size=2"]
    assert launch_notices(ppo) == (ppo.algorithm_changes,)
    file = find_config_file("quickstart_ppo")
    resolved = load(replace(file, is_own=True), other, {})
    check_for_train(resolved)
    (notice,) = launch_notices(resolved)
    assert notice.startswith("no effect without algorithm.estimator gae or vtrace: algorithm.lam = 1.0 (from yaml:")
    assert ", critic.learning_rate = " in notice and ", critic.warmup_steps = " in notice
    # Settings of a preset or an earlier run were not set for this command.
    run = without_derived(ConfigFile("settings.yaml", "settings", ppo.to_yaml().encode()))
    assert [launch_notices(load(base, other, {})) for base in ("quickstart_ppo", run)] == [(), ()]
    (notice,) = launch_notices(load("quickstart_ppo", [*other, "critic.lam=0.5"], {}))
    assert notice == "no effect without algorithm.estimator gae: critic.lam = 0.5 (from --set)"
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
