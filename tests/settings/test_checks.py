"""Tests the checks that involve several settings: what each refuses and accepts, and which command runs it."""

import pytest

from settings import load
from settings.checks import commands, training
from settings.checks.commands import check_for_mesh, check_for_rollout, check_for_train
from settings.loading.config_file import preset_names
from tests.settings.loading import load_text, over_defaults, refusal, rows_of

REFUSED_BY_TRAIN = rows_of("""
reward.functions=judges:overlong reward.overlong_buffer=2 | =null | `overlong` is reserved for the length penalty of
reward.functions=judges:env env.source=guess_number | =null | `env` is reserved for the reward of env.source
reward.functions=judges:model reward.model=a/b | =null | `model` is reserved for the score of reward.model = 'a/b'
max_length_sample=8 reward.overlong_buffer=8 | =7 | is not below rollout.max_new_tokens = 8 (from --set)
data.curriculum=pass_rate reward.functions=[gsm8k_format] | =[gsm8k_format,gsm8k] | add gsm8k to it, with weight: 0 to
data.curriculum=pass_rate reward.functions=[gsm8k_format,judges:fair] | =[judges:fair] | add gsm8k to it, with weight
rollout.prompts_per_step=131073 | =131072 | is more than 1,048,576 samples a step
batch_size=12 algorithm.mini_batch_prompts=5 | =4 | does not divide rollout.prompts_per_step = 12 (from --set);
  set the former to a divisor, such as 4 or 6$
batch_size=12 algorithm.mini_batch_prompts=13 | =12 | ; set the former to a divisor, such as 12$
max_length_sample=50 max_length_total=177 | =178 | set the latter to 178 or null, or lower rollout.max_new_tokens to 49$
max_length_sample=50 max_length_total=128 | =null | set the latter to 178 or null$
algorithm.max_tokens_per_device=191 | =192 | raise the quota to 192 or more
algorithm.name=ppo critic.max_tokens_per_device=191 | =192 | = 192 tokens, and samples are not split
algorithm.name=ppo algorithm.bootstrap_truncated=true score.critic.max_tokens_per_device=192 | =193
   | + 1 token after it = 193 tokens
reward.model=a/b score.reward.max_tokens_per_device=192 | =193 | raise the quota to 193 or more
eval.num_samples=2 | eval.temperature=1 | eval.num_samples = 2 (from --set): with eval.temperature = 0.0 (from the
eval.num_samples=2 | eval.every_steps=0 | all samples of a prompt are identical
env.source=guess_number env.credit=turn | =trajectory | env.credit = 'turn' (from --set): algorithm.estimator = 'grpo'
algorithm.reward_normalization=each_first | =sum_first | only arithmetic counts in the reward, so there is nothing to
reward.functions=[gsm8k, {name: gsm8k_format, weight: 0}]; algorithm.reward_normalization=each_first | =sum_first
  | only gsm8k counts
algorithm.name=ppo reward.overlong_buffer=8 algorithm.reward_normalization=each_first | =sum_first
  | which algorithm.estimator = 'gae' (from other settings or devices) does not; set algorithm.reward_normalization
algorithm.name=rloo beta=0.1 reward.overlong_buffer=8 algorithm.reward_normalization=each_first | algorithm.kl_in=loss
  | (algorithm.kl_in = 'reward' (from other settings or devices)) is not normalized like the rewards
optimizer.second_moment=bfloat16 | optimizer.beta2=0.95 | one update with optimizer.beta2 = 0.999 (from the default)
algorithm.name=maxrl reward.overlong_buffer=8 | =null | lowers rewards below 0, but algorithm.estimator = 'maxrl' (
algorithm.name=maxrl beta=0.1 algorithm.kl_in=reward | =loss | = 'reward' (from --set) lowers rewards below 0, but
algorithm.name=ppo num_pre_q=1 algorithm.estimator=rloo | =gae | set rollout.group_size to 2 or more
num_pre_q=1 | =2 | rollout.group_size = 1 (from --set): grpo compares the samples of a prompt with each other
rollout.temperature=0 | =0.1 | = 0.0 (from --set): greedy samples of a prompt are identical, so grpo has nothing to
algorithm.name=ppo rollout.temperature=0 | =1 | = 0.0 (from --set): greedy sampling does not explore
env.source=guess_number env.weight=0 | =0.5 | all weights are 0
reward.functions=[{name: gsm8k, weight: 0}]; reward.model=a/b; reward.model_weight=0 | =1 | all weights are 0
algorithm.clip_low=1 | =0.9 | = 1.0 (from --set): algorithm.clip = 'ppo' (from other settings or devices) clips ratios
algorithm.clip_low=1 | algorithm.clip=cispo | set it below 1
algorithm.name=cispo algorithm.dual_clip=3 | =null | already bounds the weight of every token
algorithm.name=ppo num_pre_q=1 algorithm.filter=zero_variance | =none | so no group would be kept
algorithm.estimator=vtrace rollout.scheduler=adaptive rollout.max_staleness=2 algorithm.correction=none | =null
   | tokens may come from an older policy, but algorithm.correction = 'none' (from --set) treats them as on-policy
algorithm.correction=mask algorithm.correction_max=1 algorithm.correction_min=1 | =0.9 | is not below algorithm
algorithm.kl_in=reward | algorithm.beta=0.05 | = 'reward' (from --set): with algorithm.beta = 0.0 (from the default)
beta=0.05 algorithm.kl_target=0.1 | algorithm.kl_in=reward | only a penalty in the reward can be adapted
algorithm.kl_target=0.1 | =null | algorithm.beta = 0.0 (from the default) would stay 0
reward.functions=[{name: arithmetic, weight: 0}]; algorithm.name=distill | reference.path=a/b
   | reference.path = None (from the default): algorithm.name = 'distill'
reference.path=a/b algorithm.name=distill algorithm.beta=0 | =1 | learns from the KL to its teacher; set algorithm.beta
reference.revision=v1 | reference.path=a/b | needs a hub model without a revision, but reference.path = None
reference.path=a/b@v1 reference.revision=v1 | =null | hub model without a revision, but reference.path = 'a/b@v1'
reference.path=a/b beta=1 reward.functions=[] | eval.every_steps=0 | nothing grades the samples of evaluations
reward.functions=[{name: arithmetic, weight: 0}]; beta=1 | reference.path=a/b | all weights are 0
reference.path=a/b; algorithm.name=distill; num_pre_q=1 | reward.functions=[{name: arithmetic, weight: 0}] | with each
reference.path=a/b; beta=1; reward.functions=[{name: gsm8k, weight: 0}]; algorithm.filter=zero_variance | =none
   | without a reward of weight above 0, the rewards of a group are always equal
run.steps=1073741824 algorithm.epochs=2 | =1 | give more than 2,147,483,647 optimizer steps
algorithm.name=ppo run.steps=3 critic.warmup_steps=3 | =2 | lower it to at most 2$
batch_size=8 steps=3 ppo_epochs=2 ppo_mini_batch_size=4 optimizer.warmup_steps=12 | =11
   | gives 12 optimizer steps, so the warm-up would not end; lower it to at most 11$
algorithm.name=ppo run.steps=3 critic.warmup_steps=1 optimizer.warmup_steps=2 | =1 | gives 2 optimizer steps, so
run.steps=5 logging.profile_steps=[5,6,7] | =[1,5] | logging.profile_steps = (5, 6, 7) (from --set): step 6
  is after the last one, run.steps = 5 (from --set); choose steps from 1 to 5$
checkpoint.best_metric=eval/accuracy eval.every_steps=0 | =1 | is never measured, because eval.every_steps = 0
run.early_stopping.patience=2 eval.every_steps=0 | =1 | compares evaluations, but eval.every_steps = 0 (from --set) and
run.early_stopping.patience=2 checkpoint.best_metric=null | =x | = None (from --set) leave nothing to compare
rollout.max_staleness=1 | rollout.scheduler=adaptive | during training; set rollout.scheduler: adaptive, or
rollout.max_staleness=1 rollout.scheduler=sync rollout.placement=global | =island | set rollout.placement: island, or
rollout.scheduler=adaptive rollout.devices=0.5 | rollout.max_staleness=1 | would idle during training, because with
rollout.scheduler=adaptive rollout.max_staleness=1 rollout.ray.address=auto rollout.devices=0.5 | =null
   | with rollout.ray.address = 'auto' (from --set) no device of this host generates
""")
REFUSED_BY_ROLLOUT = rows_of("""
rollout.segment.max=64 rollout.segment.min=65 | =64 | rollout.segment.min = 65 (from --set) exceeds rollout.segment.max
rollout.workers.fast.count=0 rollout.workers.heavy.count=0 | =1 | there are no workers
rollout.workers.fast.max_length=128 | =129 | leaves no token for a completion after a prompt of 128 tokens
  (data.max_prompt_length = 128 (from the default)); raise it to 129 or more
rollout.workers.heavy.count=0 rollout.workers.fast.max_length=191 | =192 | no worker can hold the longest sample
rollout.placement=global rollout.scheduler=pdsr_v2 | =sync | one queue over all devices can only be scheduled by sync
rollout.scheduler=adaptive rollout.slots=8 | =auto | with rollout.scheduler = 'adaptive' (from --set) each worker
rollout.ray.address=auto | rollout.scheduler=adaptive | set rollout.scheduler: adaptive, or rollout.ray.address: null$
rollout.ray.address=auto rollout.scheduler=sync rollout.placement=global | =island | set rollout.placement: island, or
rollout.mode=exact | rollout.slots=16 | are bitwise reproducible only with a fixed number of slots
rollout.mode=exact | rollout.scheduler=adaptive | are bitwise reproducible only with a fixed number of slots
rollout.mode=exact rollout.slots=16 model.dtype=bfloat16 | =float32 | with model.dtype = 'bfloat16' (from --set)
env.source=guess_number rollout.placement=global | =island | an environment answers only its own host's samples
env.tools=calculator rollout.stop=[x] | =[] | turns end at the model's end-of-turn token
rollout.routing_replay=true env.tools=calculator | =[] | observations are not recorded
env.source=guess_number rollout.pdsr.on_fast_limit=truncate rollout.scheduler=pdsr_v1 | =pdsr_v2 | has graded them
mesh.coordinator_address=auto mesh.num_processes=2 | =null | auto finds the hosts itself; set mesh.num_processes to null
mesh.num_processes=2 | =null | also set mesh.coordinator_address and mesh.process_id, or only mesh.coordinator_address
mesh.coordinator_address=h:1 mesh.num_processes=2 mesh.process_id=2 | =1 | own id from 0 to 1$
mesh.coordinator_address=h:1 mesh.num_processes=2 mesh.process_id=1 mesh.expect_processes=4 | =2
   | mesh.expect_processes = 4 (from --set) differs from mesh.num_processes = 2 (from --set)
mesh.cpu_devices=8 mesh.platform=tpu | =cpu | is for CPU hosts, but mesh.platform = 'tpu' (from --set)
""")
"""Refused settings; an accepted alternative, or value of the last one; and part of the message (`$` is its end)."""


@pytest.mark.parametrize(("chosen", "way_out", "expected"), REFUSED_BY_TRAIN + REFUSED_BY_ROLLOUT)
def test_incompatible_settings_are_refused_and_the_advised_ones_accepted(
    chosen: str, way_out: str, expected: str
) -> None:
    overrides = chosen.split("; ") if ";" in chosen else chosen.split()
    accepted = overrides[-1].partition("=")[0] + way_out if way_out.startswith("=") else way_out
    message = refusal(check_for_train, over_defaults(*overrides))
    assert expected in f"{message}$" and len(message.splitlines()) == 1
    check_for_train(over_defaults(*overrides, accepted))
    if [chosen, way_out, expected] in REFUSED_BY_ROLLOUT:
        assert refusal(check_for_rollout, over_defaults(*overrides)) == message
        check_for_rollout(over_defaults(*overrides, accepted))


WRONG_EVERYWHERE = (
    *("algorithm.mini_batch_prompts=3", "rollout.max_length_total=2", "rollout.segment.min=8192"),
    *("env.tools=calculator", "rollout.stop=[x]", "rollout.max_staleness=1", "algorithm.max_tokens_per_device=191"),
    *("score.max_tokens_per_device=192", "mesh.num_processes=2", "mesh.pretend=v4-8", "eval.num_samples=2"),
    *("rollout.temperature=0", "algorithm.kl_in=reward", "reward.overlong_buffer=64", "optimizer.warmup_steps=1000"),
    "rollout.group_size=1",
)
IN_SAMPLING = {"data.max_prompt_length", "rollout.segment.min", "rollout.stop", "mesh.num_processes"}
IN_SIZES = IN_SAMPLING | {"algorithm.mini_batch_prompts", "rollout.max_staleness", "algorithm.max_tokens_per_device"}
IN_TRAINING = IN_SIZES | {
    *("rollout.temperature", "algorithm.kl_in", "reward.overlong_buffer", "optimizer.warmup_steps", "eval.num_samples"),
    "rollout.group_size",
}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train", IN_TRAINING | {"mesh.pretend"}),
        ("dry_run", IN_TRAINING),
        ("inspect_mesh", IN_SIZES),
        ("rollout", IN_SAMPLING | {"mesh.pretend"}),
        ("evaluation", IN_SAMPLING | {"mesh.pretend", "eval.num_samples"}),
        ("score", {"reward.overlong_buffer", "mesh.num_processes", "mesh.pretend"}),
        ("mesh", {"mesh.num_processes", "mesh.pretend"}),
    ],
)
def test_a_command_lists_all_errors_in_the_settings_that_it_uses(command: str, expected: set[str]) -> None:
    message = refusal(getattr(commands, f"check_for_{command}"), over_defaults(*WRONG_EVERYWHERE))
    assert sorted(line.partition(" ")[0] for line in message.splitlines()) == sorted(expected)


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ("", []),
        ("beta=0.1 ppo_epochs=2", ["policy", "reference"]),
        ("beta=0.1 ppo_epochs=2 score.reference.rows_per_device=2", ["policy"]),
        ("algorithm.estimator=vtrace score.critic.max_tokens_per_device=192", ["policy"]),
    ],
)
def test_only_the_token_quotas_of_roles_that_a_step_scores_are_checked(overrides: str, roles: list[str]) -> None:
    resolved = over_defaults("score.max_tokens_per_device=191", *overrides.split())
    lines = refusal(check_for_train, resolved).splitlines() if roles else [check_for_train(resolved)][1:]
    assert lines == [
        f"score.{role}.max_tokens_per_device = 191 (from --set) is less than the longest possible sample: "
        "data.max_prompt_length = 128 (from the default) + rollout.max_new_tokens = 64 (from the default) = 192 tokens,"
        " and samples are not split; raise the quota to 192 or more, lower one of these lengths, or set "
        f"score.{role}.rows_per_device instead"
        for role in roles
    ]


def test_tensorboard_logging_is_refused_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = over_defaults("logging.tensorboard=true")
    monkeypatch.setattr(training, "find_spec", lambda name: object())
    check_for_train(resolved)
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    assert "tensorboardX is not installed; run pip install -e '.[tensorboard]'" in refusal(check_for_train, resolved)


def test_later_layers_can_turn_off_the_kl_penalty() -> None:
    for target in ("null", "0.1"):
        text = f"algorithm: {{kl_in: reward, beta: 0.05, kl_target: {target}}}"
        check_for_train(load_text(text, "algorithm.beta=0"))
    refusal(check_for_train, load_text("algorithm: {beta: 0}", "algorithm.kl_in=reward"))


def test_host_addresses_can_be_left_to_the_platform() -> None:
    check_for_mesh(over_defaults("mesh.coordinator_address=auto"))
    check_for_mesh(over_defaults("mesh.expect_processes=4"))


def test_gsm8k_presets_request_the_answer_format_that_is_parsed() -> None:
    """An unquoted text in YAML ends before ` #`, which starts a comment."""
    for preset in (name for name in preset_names() if "gsm8k" in name):
        assert "####" in (load(preset, [], {}).settings.data.system_prompt or ""), preset
