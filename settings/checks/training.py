"""Checks of the algorithm, the reward, the batch sizes and the evaluation of a training run.

Each yields error messages, in which `<a.b>` stands for the setting's name, value and origin.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from settings.loading.algorithm_presets import GROUP_RELATIVE_ESTIMATORS, SUPERVISED_VALUES
from settings.loading.fields import value_of
from settings.loading.resolve import Resolved
from settings.schema.reward import BUILT_IN_REWARDS, ENVIRONMENT_REWARD, MODEL_REWARD, OVERLONG_REWARD


def check_rewards(resolved: Resolved) -> Iterator[str]:
    reward, longest = resolved.settings.reward, resolved.settings.rollout.max_new_tokens
    reserved = [
        (ENVIRONMENT_REWARD, "env.source", "reward"),
        (MODEL_REWARD, "reward.model", "score"),
        (OVERLONG_REWARD, "reward.overlong_buffer", "length penalty"),
    ]
    for name, setting, owner in reserved:
        if value_of(resolved.settings, setting) is not None and name in [one.name for one in reward.functions]:
            yield (
                f"<reward.functions>: `{name}` is reserved for the {owner} of <{setting}>; give the function another "
                "`name:`"
            )
    if reward.overlong_buffer is not None and reward.overlong_buffer >= longest:
        yield (
            "<reward.overlong_buffer> is not below <rollout.max_new_tokens>, so every completion would be penalized; "
            "lower it (a fifth of the latter is usual), or set it to null"
        )


def check_curriculum(resolved: Resolved) -> Iterator[str]:
    settings = resolved.settings
    names = [function.name for function in settings.reward.functions]
    judge = names[0].removesuffix("_format") if names and names[0] in BUILT_IN_REWARDS else ""
    is_graded = judge in names if judge else bool(names) or settings.env.source is not None
    if settings.data.curriculum != "none" and not is_graded:
        yield (
            "<data.curriculum> draws prompts by how often the policy solves them, but <reward.functions> has no "
            f"function that grades answers; add {judge or 'one'} to it, with weight: 0 to keep it out of training"
        )


def check_batch(resolved: Resolved) -> Iterator[str]:
    rollout = resolved.settings.rollout
    step = rollout.prompts_per_step
    if step * rollout.group_size > 2**20:
        yield (
            "<rollout.prompts_per_step> times <rollout.group_size> is more than 1,048,576 samples a step, which no "
            "host can hold; lower one of the two"
        )
    mini_batch = resolved.settings.algorithm.mini_batch_prompts or step
    if step % mini_batch:
        divisors = [size for size in range(1, step + 1) if step % size == 0]
        above = next((place for place, size in enumerate(divisors) if size > mini_batch), len(divisors))
        yield (
            "<algorithm.mini_batch_prompts> does not divide <rollout.prompts_per_step>; set the former to a divisor, "
            f"such as {' or '.join(map(str, divisors[above - 1 : above + 1]))}"
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
    """Checks that the longest possible sample fits into the token quotas of the updates and of every scored role."""
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


def check_evaluation_temperature(resolved: Resolved) -> Iterator[str]:
    if resolved.settings.eval.num_samples > 1 and resolved.settings.eval.temperature == 0:
        yield (
            "<eval.num_samples>: with <eval.temperature> all samples of a prompt are identical; set eval.temperature "
            "above 0 (1.0 is usual), or eval.num_samples to 1"
        )


def check_algorithm(resolved: Resolved) -> Iterator[str]:
    settings, algorithm = resolved.settings, resolved.settings.algorithm
    if settings.optimizer.second_moment == "bfloat16" and settings.optimizer.beta2 > 0.95:
        yield (
            "<optimizer.second_moment> has a precision of 8 bits, too low for the change of one update with "
            "<optimizer.beta2>; set optimizer.beta2 to 0.95 or less, or optimizer.second_moment: float32"
        )
    if settings.is_supervised:
        for field, value in SUPERVISED_VALUES.items():
            if value_of(settings, field) != value:
                way_out = f"set {field}: {'null' if value is None else value}"
                yield f"<{field}> is for sampled completions, and <algorithm.name> learns given ones; {way_out}"
        return
    is_relative = algorithm.estimator in GROUP_RELATIVE_ESTIMATORS
    if settings.env.credit == "turn" and is_relative:
        yield (
            "<env.credit>: <algorithm.estimator> gives a whole sample one advantage, and a baseline per turn of a "
            "group would be biased, because the policy itself decides which samples get that far. Set env.credit: "
            "trajectory, or an algorithm.name with returns per token, ppo or reinforce_plus_plus"
        )
    if algorithm.reward_normalization == "each_first":
        yield from _check_decoupled_rewards(resolved, is_relative=is_relative)
    compares = bool(settings.reward_weights) or algorithm.kl_in_reward
    if settings.rollout.group_size < 2 and is_relative and compares:
        yield (
            f"<rollout.group_size>: {algorithm.name} compares the samples of a prompt with each other; set "
            "rollout.group_size to 2 or more (8 is usual)"
        )
    lowering = [("<algorithm.kl_in>", "loss")] if algorithm.kl_in_reward else []
    lowering += [("<reward.overlong_buffer>", "null")] if settings.reward.overlong_buffer is not None else []
    for lowered_by, instead in lowering if algorithm.estimator == "maxrl" else ():
        yield (
            f"{lowered_by} lowers rewards below 0, but <algorithm.estimator> divides by the mean reward of a group; "
            f"set {lowered_by[1:-1]} to {instead}, or algorithm.estimator: grpo"
        )
    if settings.rollout.temperature == 0:
        reason = "greedy sampling does not explore, and logprobs at temperature 0 are undefined"
        if is_relative:
            reason = f"greedy samples of a prompt are identical, so {algorithm.name} has nothing to compare"
        yield f"<rollout.temperature>: {reason}; set it above 0 (1.0 is usual)"
    if not (settings.has_reward or settings.has_teacher or algorithm.name == "distill"):
        yield "<reward.functions>: all weights are 0, so every sample would have reward 0; set at least one to 1.0"
    if algorithm.clip == "ppo" and algorithm.clip_low is not None and algorithm.clip_low >= 1:
        yield (
            "<algorithm.clip_low>: <algorithm.clip> clips ratios below 1 - clip_low, and no ratio is below 0; set it "
            "below 1 (0.2 is usual), or set algorithm.clip: cispo"
        )
    if algorithm.clip == "cispo" and algorithm.dual_clip is not None:
        yield (
            "<algorithm.dual_clip>: <algorithm.clip> already bounds the weight of every token; set algorithm.dual_clip "
            "to null, or lower algorithm.clip_high"
        )
    if settings.rollout.group_size < 2 and algorithm.filter != "none":
        yield (
            "<algorithm.filter>: with <rollout.group_size> the rewards of a group are always equal, so no group would "
            "be kept; set rollout.group_size to 2 or more, or algorithm.filter: none"
        )
    if settings.rollout.max_staleness > 0 and algorithm.correction == "none":
        yield (
            "<rollout.max_staleness>: tokens may come from an older policy, but <algorithm.correction> treats them as "
            "on-policy; set algorithm.correction to null, or set rollout.max_staleness: 0"
        )
    if algorithm.correction == "mask" and algorithm.correction_min >= algorithm.correction_max:
        yield (
            "<algorithm.correction_min> is not below <algorithm.correction_max>, so rounding alone would mask every "
            "token; lower the former (0.5 is usual) or raise the latter (2.0 is usual)"
        )


def _check_decoupled_rewards(resolved: Resolved, *, is_relative: bool) -> Iterator[str]:
    names = [*resolved.settings.reward_weights]
    sum_first = "set algorithm.reward_normalization: sum_first"
    if not is_relative:
        yield (
            "<algorithm.reward_normalization> compares each reward within the samples of a prompt, which "
            f"<algorithm.estimator> does not; {sum_first}, or algorithm.estimator: grpo"
        )
    elif len(names) < 2:
        yield (
            f"<algorithm.reward_normalization>: only {names[0] if names else 'nothing'} counts in the reward, so there "
            f"is nothing to balance; {sum_first}, or give a second one of <reward.functions> a weight"
        )
    if is_relative and resolved.settings.algorithm.kl_in_reward:
        yield (
            "<algorithm.reward_normalization>: a KL penalty in the reward (<algorithm.kl_in>) is not normalized "
            f"like the rewards, so its weight would be arbitrary; set algorithm.kl_in: loss, or {sum_first[4:]}"
        )


def check_reference(resolved: Resolved) -> Iterator[str]:
    reference = resolved.settings.reference
    if reference.revision is not None and (reference.path is None or "@" in reference.path):
        yield (
            "<reference.revision> needs a hub model without a revision, but <reference.path>; set reference.path to "
            "the model's name alone, or reference.revision to null"
        )


def check_distillation(resolved: Resolved) -> Iterator[str]:
    settings, algorithm = resolved.settings, resolved.settings.algorithm
    if algorithm.name == "distill" and settings.reference.path is None:
        yield (
            "<reference.path>: <algorithm.name> learns from a teacher; set reference.path to a model with the policy's "
            "vocabulary, or choose another algorithm.name"
        )
    if algorithm.name == "distill" and algorithm.beta == 0:
        yield "<algorithm.beta>: <algorithm.name> learns from the KL to its teacher; set algorithm.beta to 1.0"
    if settings.has_teacher and not settings.has_reward and algorithm.filter != "none":
        yield (
            "<algorithm.filter>: without a reward of weight above 0, the rewards of a group are always equal, so no "
            "group would be kept; set algorithm.filter: none"
        )


def check_judge(resolved: Resolved) -> Iterator[str]:
    """Checks that evaluations have a reward function, or an environment's reward, to grade samples with."""
    if not resolved.settings.reward.functions and resolved.settings.env.source is None:
        yield (
            "<reward.functions>: nothing grades the samples of evaluations; add a function, with weight 0 to keep "
            "it out of training: [{name: gsm8k, weight: 0}]"
        )


def check_penalty(resolved: Resolved) -> Iterator[str]:
    algorithm, is_later = resolved.settings.algorithm, resolved.is_later
    # beta: 0 in a later layer than the other settings turns the penalty off.
    if algorithm.beta == 0 and algorithm.kl_in == "reward" and not is_later("algorithm.beta", "algorithm.kl_in"):
        yield (
            "<algorithm.kl_in>: with <algorithm.beta> there is no penalty to subtract from the reward; set "
            "algorithm.beta above 0 (0.05 is usual), or set algorithm.kl_in to null"
        )
    if algorithm.kl_target is None:
        return
    if algorithm.beta == 0 and not is_later("algorithm.beta", "algorithm.kl_target"):
        yield (
            "<algorithm.kl_target>: <algorithm.beta> would stay 0, because it is adapted by multiplication; set "
            "algorithm.beta above 0 (0.05 is usual), or set algorithm.kl_target to null"
        )
    if algorithm.beta > 0 and not algorithm.penalizes_samples:
        yield (
            "<algorithm.kl_target>: only a penalty in the reward can be adapted, but <algorithm.kl_in>; set "
            "algorithm.kl_in: reward, or set algorithm.kl_target to null"
        )


def check_run(resolved: Resolved) -> Iterator[str]:
    settings, steps, updates = resolved.settings, resolved.settings.run.steps, resolved.settings.num_policy_updates
    if steps * settings.updates_per_step >= 2**31:
        yield "<run.steps> and <algorithm.epochs> give more than 2,147,483,647 optimizer steps; lower one of the two"
    if settings.has_critic and settings.critic.warmup_steps >= steps:
        yield (
            "<critic.warmup_steps> is not below <run.steps>, so no step would train the policy; lower it to at most "
            f"{steps - 1}"
        )
    if settings.optimizer.warmup_steps >= max(updates, 1):
        yield (
            f"<optimizer.warmup_steps>: <run.steps> gives {updates} optimizer steps, so the warm-up would not end; "
            f"lower it to at most {max(updates - 1, 0)}"
        )
    if beyond := [step for step in settings.logging.profile_steps if step > steps]:
        yield (
            f"<logging.profile_steps>: step {beyond[0]} is after the last one, <run.steps>; choose steps from 1 to "
            f"{steps}"
        )
    if settings.logging.tensorboard and find_spec("tensorboardX") is None:
        yield (
            "<logging.tensorboard>: tensorboardX is not installed; run pip install -e '.[tensorboard]', or set it to "
            "false"
        )
    best_metric = settings.checkpoint.best_metric
    if settings.eval.every_steps > 0:
        yield from check_evaluation_temperature(resolved)
        yield from (f"{problem}, or set eval.every_steps: 0" for problem in check_judge(resolved))
    elif best_metric is not None:
        yield (
            "<checkpoint.best_metric> is never measured, because <eval.every_steps> disables evaluation; set it to "
            "null, or eval.every_steps to 1 or more"
        )
    if settings.run.early_stopping.patience is not None and (settings.eval.every_steps == 0 or best_metric is None):
        yield (
            "<run.early_stopping.patience> compares evaluations, but <eval.every_steps> and <checkpoint.best_metric> "
            "leave nothing to compare; set it to null, or eval.every_steps to 1 or more and checkpoint.best_metric, "
            "for example to eval/accuracy"
        )
