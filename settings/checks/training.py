"""Checks of the algorithm, the reward, the batch sizes and the evaluation of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from settings.checks.check import Rule
from settings.loading.algorithm_presets import GROUP_RELATIVE_ESTIMATORS
from settings.loading.fields import value_of
from settings.loading.resolve import Resolved
from settings.schema.reward import ENVIRONMENT_REWARD, MODEL_REWARD, OVERLONG_REWARD
from settings.schema.settings import Settings


def _check_group_size(resolved: Resolved) -> Iterator[str]:
    algorithm = resolved.settings.algorithm
    if resolved.settings.rollout.group_size < 2 and algorithm.estimator in GROUP_RELATIVE_ESTIMATORS:
        yield (
            f"<rollout.group_size>: {algorithm.name} compares the samples of a prompt with each other, so it needs at "
            "least 2 (8 is usual)"
        )


def _check_temperature(resolved: Resolved) -> Iterator[str]:
    algorithm = resolved.settings.algorithm
    if resolved.settings.rollout.temperature > 0:
        return
    if algorithm.estimator in GROUP_RELATIVE_ESTIMATORS:
        reason = f"greedy samples of a prompt are identical, so {algorithm.name} has nothing to compare"
    else:
        reason = "greedy sampling does not explore, and logprobs at temperature 0 are undefined"
    yield f"<rollout.temperature>: {reason}; set it above 0 (1.0 is usual)"


def _reserved_name(name: str, setting: str, owner: str) -> Rule:
    return Rule(
        lambda s: value_of(s, setting) is not None and name in [function.name for function in s.reward.functions],
        f"<reward.functions>: `{name}` is reserved for the {owner} of <{setting}>; give the function another `name:`",
    )


def _check_kl_weight(resolved: Resolved) -> Iterator[str]:
    algorithm = resolved.settings.algorithm
    # A weight of 0 from a later layer turns the penalty off.
    is_off = resolved.is_later("algorithm.beta", "algorithm.kl_in")
    if algorithm.beta == 0 and algorithm.kl_in == "reward" and not is_off:
        yield (
            "<algorithm.kl_in>: with <algorithm.beta> there is no penalty to subtract from the reward; set "
            "algorithm.beta above 0 (0.05 is usual), or set algorithm.kl_in to null"
        )


def _check_adaptive_kl(resolved: Resolved) -> Iterator[str]:
    algorithm = resolved.settings.algorithm
    if algorithm.kl_target is None:
        return
    if algorithm.beta == 0 and not resolved.is_later("algorithm.beta", "algorithm.kl_target"):
        yield (
            "<algorithm.kl_target>: <algorithm.beta> would stay 0, because it is adapted by multiplication; set "
            "algorithm.beta above 0 (0.05 is usual), or set algorithm.kl_target to null"
        )
    if algorithm.beta > 0 and algorithm.kl_in != "reward":
        yield (
            "<algorithm.kl_target>: only a penalty in the reward can be adapted, but <algorithm.kl_in>; set "
            "algorithm.kl_in: reward, or set algorithm.kl_target to null"
        )


def _check_mini_batch_size(resolved: Resolved) -> Iterator[str]:
    step = resolved.settings.rollout.prompts_per_step
    mini_batch = resolved.settings.algorithm.mini_batch_prompts or step
    if step % mini_batch:
        divisors = [size for size in range(1, step + 1) if step % size == 0]
        above = next((place for place, size in enumerate(divisors) if size > mini_batch), len(divisors))
        yield (
            "<algorithm.mini_batch_prompts> does not divide <rollout.prompts_per_step>; the nearest divisors: "
            f"{' or '.join(map(str, divisors[above - 1 : above + 1]))}"
        )


def check_max_length(resolved: Resolved) -> Iterator[str]:
    rollout, data = resolved.settings.rollout, resolved.settings.data
    longest = data.max_prompt_length + rollout.max_new_tokens
    if rollout.max_length_total is not None and longest > rollout.max_length_total:
        remaining = rollout.max_length_total - data.max_prompt_length
        lower = f", or lower rollout.max_new_tokens to {remaining}" if remaining >= 1 else ""
        yield (
            f"<data.max_prompt_length> and <rollout.max_new_tokens> add up to {longest} tokens, more than "
            f"<rollout.max_length_total>; set the latter to {longest} or null{lower}"
        )


def check_token_quotas(resolved: Resolved) -> Iterator[str]:
    """Checks the token quotas of the updates and of every role that a step scores."""
    settings = resolved.settings
    updated = ("algorithm", "critic") if settings.has_critic else ("algorithm",)
    roles = (*settings.scored_roles, "reward") if settings.reward.model else settings.scored_roles
    # Bootstrapping truncated samples and reward models both read one token after a sample.
    extra_tokens = {"score.critic": int(settings.algorithm.bootstrap_truncated), "score.reward": 1}
    for scope in (*updated, *(f"score.{role}" for role in roles)):
        quota = value_of(settings, f"{scope}.max_tokens_per_device")
        extra = extra_tokens.get(scope, 0)
        longest = settings.data.max_prompt_length + settings.rollout.max_new_tokens + extra
        if quota is not None and quota < longest:
            yield (
                f"<{scope}.max_tokens_per_device> is less than the longest possible sample: <data.max_prompt_length> + "
                f"<rollout.max_new_tokens>{' + 1 token after it' if extra else ''} = {longest} tokens, and samples are "
                f"not split; raise the quota to {longest} or more, lower one of these lengths, or set "
                f"{scope}.rows_per_device instead"
            )


def _check_warmup(resolved: Resolved) -> Iterator[str]:
    updates = resolved.settings.num_policy_updates
    if resolved.settings.optimizer.warmup_steps >= max(updates, 1):
        yield (
            f"<optimizer.warmup_steps>: <run.steps> gives {updates} optimizer steps, so the warm-up would not end; "
            f"lower it to at most {updates - 1}"
        )


def _check_critic_warmup(resolved: Resolved) -> Iterator[str]:
    settings = resolved.settings
    if settings.has_critic and settings.critic.warmup_steps >= settings.run.steps:
        yield (
            "<critic.warmup_steps> leaves no step to train the policy, because <run.steps>; "
            f"lower it to at most {settings.run.steps - 1}"
        )


def _check_profile_steps(resolved: Resolved) -> Iterator[str]:
    steps = resolved.settings.run.steps
    beyond = [step for step in resolved.settings.logging.profile_steps if step > steps]
    if beyond:
        yield (
            f"<logging.profile_steps>: step {beyond[0]} is not part of the run, because <run.steps>; choose steps from "
            f"1 to {steps}"
        )


def _rewards_count_nothing(settings: Settings) -> bool:
    reward, env = settings.reward, settings.env
    parts = [*(f.weight for f in reward.functions), reward.model and reward.model_weight, env.source and env.weight]
    return not any(parts)


check_overlong_buffer = Rule(
    lambda s: s.reward.overlong_buffer is not None and s.reward.overlong_buffer >= s.rollout.max_new_tokens,
    "<reward.overlong_buffer> is not below <rollout.max_new_tokens>, so every completion would be penalized; lower it "
    "(a fifth of the latter is usual), or set it to null",
)
check_evaluation_temperature = Rule(
    lambda s: s.eval.num_samples > 1 and s.eval.temperature == 0,
    "<eval.num_samples>: with <eval.temperature> all samples of a prompt are identical; set eval.temperature above 0 "
    "(1.0 is usual), or eval.num_samples to 1",
)
REWARD_CHECKS = (
    _reserved_name(ENVIRONMENT_REWARD, "env.source", "reward"),
    _reserved_name(MODEL_REWARD, "reward.model", "score"),
    check_overlong_buffer,
    _reserved_name(OVERLONG_REWARD, "reward.overlong_buffer", "length penalty"),
)

BATCH_CHECKS = (
    Rule(
        lambda s: s.rollout.prompts_per_step * s.rollout.group_size > 2**20,
        "<rollout.prompts_per_step> times <rollout.group_size> is more than 1,048,576 samples a step, which no host "
        "holds; lower one of the two",
    ),
    _check_mini_batch_size,
    check_max_length,
)

_check_second_moment = Rule(
    lambda s: s.optimizer.second_moment == "bfloat16" and s.optimizer.beta2 > 0.95,
    "<optimizer.second_moment> has 8 bits, in which the change of one update would be lost with <optimizer.beta2>; set "
    "optimizer.beta2 to 0.95 or less, or optimizer.second_moment: float32",
)

ALGORITHM_CHECKS = (
    Rule(
        lambda s: s.env.credit == "turn" and s.algorithm.estimator in GROUP_RELATIVE_ESTIMATORS,
        "<env.credit>: <algorithm.estimator> gives a whole sample one advantage, and a baseline for each turn of a "
        "group would be biased, because the policy itself decides which samples get that far. Set env.credit: "
        "trajectory, or an algorithm.name with returns per token, ppo or reinforce_plus_plus",
    ),
    _check_second_moment,
    _check_group_size,
    _check_temperature,
    Rule(
        _rewards_count_nothing,
        "<reward.functions>: all weights are 0, so every sample would have reward 0; set at least one to 1.0",
    ),
    Rule(
        lambda s: s.algorithm.clip == "ppo" and s.algorithm.clip_low is not None and s.algorithm.clip_low >= 1,
        "<algorithm.clip_low>: <algorithm.clip> clips ratios below 1 - clip_low, and no ratio is below 0; set it below "
        "1 (0.2 is usual), or set algorithm.clip: cispo",
    ),
    Rule(
        lambda s: s.algorithm.clip == "cispo" and s.algorithm.dual_clip is not None,
        "<algorithm.dual_clip>: <algorithm.clip> already bounds the weight of every token; set algorithm.dual_clip "
        "to null, or lower algorithm.clip_high",
    ),
    Rule(
        lambda s: s.rollout.group_size < 2 and s.algorithm.filter != "none",
        "<algorithm.filter>: with <rollout.group_size> the rewards of a group are always equal, so no group would be "
        "kept; set rollout.group_size to 2 or more, or algorithm.filter: none",
    ),
    _check_kl_weight,
    _check_adaptive_kl,
    Rule(
        lambda s: s.rollout.max_staleness > 0 and s.algorithm.correction == "none",
        "<rollout.max_staleness>: tokens may come from an older policy, but <algorithm.correction> treats them as "
        "on-policy; set algorithm.correction to null, or set rollout.max_staleness: 0",
    ),
    Rule(
        lambda s: s.algorithm.correction == "mask" and s.algorithm.correction_min >= s.algorithm.correction_max,
        "<algorithm.correction_min> is not below <algorithm.correction_max>, so rounding alone would mask every token; "
        "lower the former (0.5 is usual) or raise the latter (2.0 is usual)",
    ),
)

RUN_CHECKS = (
    Rule(
        lambda s: s.run.steps * s.updates_per_step >= 2**31,
        "<run.steps> and <algorithm.epochs> give more optimizer steps than the schedule can count (2**31); lower one",
    ),
    _check_critic_warmup,
    _check_warmup,
    _check_profile_steps,
    Rule(
        lambda s: s.logging.tensorboard and find_spec("tensorboardX") is None,
        "<logging.tensorboard>: tensorboardX is not installed; run pip install -e '.[tensorboard]', or set it to false",
    ),
    Rule(
        lambda s: s.eval.every_steps > 0 and check_evaluation_temperature.is_broken(s),
        check_evaluation_temperature.message,
    ),
    Rule(
        lambda s: s.checkpoint.best_metric is not None and s.eval.every_steps == 0,
        "<checkpoint.best_metric> is never measured, because <eval.every_steps> disables evaluation; set it to null, "
        "or eval.every_steps to 1 or more",
    ),
    Rule(
        lambda s: (
            s.run.early_stopping.patience is not None and (s.eval.every_steps == 0 or s.checkpoint.best_metric is None)
        ),
        "<run.early_stopping.patience> compares evaluations, but <eval.every_steps> and <checkpoint.best_metric> leave "
        "nothing to compare; set it to null, or eval.every_steps to 1 or more and checkpoint.best_metric, for example "
        "to eval/accuracy",
    ),
)
