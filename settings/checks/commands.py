"""What must hold between settings before a verb starts: each check a function, each verb a list of them.

A check returns what is wrong and what would be right, or None. Checks that need a model file, a data
set or a device live with whoever opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from settings.checks.correction import CORRECTION_CHECKS
from settings.checks.evaluation import EVALUATION_CHECKS, check_evaluation_temperature
from settings.checks.rollout import SCHEDULE_CHECKS, STALENESS_CHECKS, WORKER_CHECKS
from settings.checks.unused_settings import check_unused_settings
from settings.errors import InputError
from settings.loading.algorithm_presets import GROUP_RELATIVE_ESTIMATORS
from settings.loading.fields import value_of
from settings.loading.resolve import Resolved, real_device_fields
from settings.loading.sources import precedence
from settings.schema.reward import MODEL_REWARD, OVERLONG_REWARD

Check = Callable[[Resolved], str | None]


def check_for_train(resolved: Resolved) -> None:
    """Raises InputError listing everything that keeps these settings from being trained with."""
    _run_checks(resolved, (*_train_checks(), _check_no_pretend))


def check_for_dry_run(resolved: Resolved) -> None:
    """The same, for a run that is only looked ahead at: its devices may be pretended."""
    _run_checks(resolved, (*_train_checks(), _check_pretend_conflicts))


def check_for_inspect_mesh(resolved: Resolved) -> None:
    """Raises InputError listing everything by which no sizes follow from these settings."""
    _run_checks(
        resolved,
        (
            _check_mini_batch_size,
            _check_max_length,
            *SCHEDULE_CHECKS,
            *WORKER_CHECKS,
            *STALENESS_CHECKS,
            _check_token_quotas,
            *HOST_CHECKS,
            _check_pretend_conflicts,
        ),
    )


def _train_checks() -> tuple[Check, ...]:
    return (
        _check_group_size,
        _check_temperature,
        _check_reward_weights,
        _check_reward_names,
        _check_clip_bounds,
        _check_group_filter,
        _check_overlong_buffer,
        _check_kl_weight,
        _check_adaptive_kl,
        _check_vtrace_bounds,
        *CORRECTION_CHECKS,
        check_unused_settings,
        _check_mini_batch_size,
        _check_max_length,
        *SCHEDULE_CHECKS,
        *WORKER_CHECKS,
        *STALENESS_CHECKS,
        _check_token_quotas,
        _check_critic_warmup,
        _check_warmup,
        _check_profile_steps,
        *EVALUATION_CHECKS,
        *HOST_CHECKS,
    )


def check_for_rollout(resolved: Resolved) -> None:
    """Raises InputError listing everything that keeps these settings from being sampled with."""
    _run_checks(resolved, (_check_max_length, *SCHEDULE_CHECKS, *WORKER_CHECKS, *HOST_CHECKS, _check_no_pretend))


def check_for_evaluation(resolved: Resolved) -> None:
    """Raises InputError listing everything that keeps a model from being evaluated under these settings."""
    _run_checks(
        resolved,
        (
            _check_max_length,
            check_evaluation_temperature,
            *SCHEDULE_CHECKS,
            *WORKER_CHECKS,
            *HOST_CHECKS,
            _check_no_pretend,
        ),
    )


def check_for_score(resolved: Resolved) -> None:
    """Raises InputError; lengths of samples are not checked, because scoring takes its shapes from its input."""
    _run_checks(resolved, (_check_reward_names, _check_overlong_buffer, *HOST_CHECKS, _check_no_pretend))


def check_for_mesh(resolved: Resolved) -> None:
    """Raises InputError when the hosts of the mesh are half described."""
    _run_checks(resolved, (*HOST_CHECKS, _check_no_pretend))


def _run_checks(resolved: Resolved, checks: Sequence[Check]) -> None:
    problems = [problem for check in checks if (problem := check(resolved))]
    if problems:
        raise InputError("\n".join(problems))


def _check_group_size(resolved: Resolved) -> str | None:
    algorithm = resolved.settings.algorithm
    if resolved.settings.rollout.group_size >= 2 or algorithm.estimator not in GROUP_RELATIVE_ESTIMATORS:
        return None
    return (
        f"{resolved.describe('rollout.group_size')}: {algorithm.name} compares the samples "
        "of a prompt with each other, so it needs at least 2; 8 is usual"
    )


def _check_temperature(resolved: Resolved) -> str | None:
    algorithm = resolved.settings.algorithm
    if resolved.settings.rollout.temperature > 0:
        return None
    if algorithm.estimator in GROUP_RELATIVE_ESTIMATORS:
        reason = f"greedy samples of a prompt are all alike, which leaves {algorithm.name} nothing to compare"
    else:
        reason = (
            "greedy sampling explores nothing, and the logprobs that updates compare are those at the sampler's "
            "temperature, of which there are none at 0"
        )
    return f"{resolved.describe('rollout.temperature')}: {reason}; set it above 0, 1.0 is usual"


def _check_clip_bounds(resolved: Resolved) -> str | None:
    algorithm = resolved.settings.algorithm
    assert algorithm.clip_low is not None
    if algorithm.clip == "ppo" and algorithm.clip_low >= 1:
        return (
            f"{resolved.describe('algorithm.clip_low')}: {resolved.describe('algorithm.clip')} cuts below 1 - "
            f"clip_low, "
            "and no ratio is below 0; set it below 1, 0.2 is usual, or algorithm.clip: cispo"
        )
    if algorithm.clip == "cispo" and algorithm.dual_clip is not None:
        return (
            f"{resolved.describe('algorithm.dual_clip')}: {resolved.describe('algorithm.clip')} already bounds what "
            "every token weighs; leave algorithm.dual_clip null, or lower algorithm.clip_high"
        )
    return None


def _check_group_filter(resolved: Resolved) -> str | None:
    if resolved.settings.rollout.group_size >= 2 or resolved.settings.algorithm.filter == "none":
        return None
    return (
        f"{resolved.describe('algorithm.filter')}: {resolved.describe('rollout.group_size')}, so the rewards of every "
        "group are all equal and none would be left; set rollout.group_size to 2 or more, or algorithm.filter: none"
    )


def _check_overlong_buffer(resolved: Resolved) -> str | None:
    reward, longest = resolved.settings.reward, resolved.settings.rollout.max_new_tokens
    if reward.overlong_buffer is None:
        return None
    if reward.overlong_buffer >= longest:
        return (
            f"{resolved.describe('reward.overlong_buffer')}: {resolved.describe('rollout.max_new_tokens')}, so every "
            "completion would be too long; set it lower, a fifth of that is usual, or to null"
        )
    if OVERLONG_REWARD in [function.name for function in reward.functions]:
        return (
            f"reward.functions (from {resolved.origin('reward.functions')}): `{OVERLONG_REWARD}` is the name of the "
            f"penalty "
            f"of {resolved.describe('reward.overlong_buffer')}; give the function another `name:`"
        )
    return None


def _check_reward_weights(resolved: Resolved) -> str | None:
    reward = resolved.settings.reward
    if any(function.weight != 0 for function in reward.functions) or (reward.model and reward.model_weight != 0):
        return None
    return (
        f"reward.functions (from {resolved.origin('reward.functions')}): every weight is 0, so every sample "
        "would have reward 0; give one a weight such as 1.0"
    )


def _check_reward_names(resolved: Resolved) -> str | None:
    reward = resolved.settings.reward
    if reward.model is None or all(function.name != MODEL_REWARD for function in reward.functions):
        return None
    return (
        f"reward.functions (from {resolved.origin('reward.functions')}): `{MODEL_REWARD}` is the name of the score of "
        f"{resolved.describe('reward.model')}; give the function another `name:`"
    )


def _check_kl_weight(resolved: Resolved) -> str | None:
    algorithm = resolved.settings.algorithm
    if algorithm.beta > 0 or algorithm.kl_in != "reward":
        return None
    # Turned off by a later layer than the one that placed it: that choice wins.
    if precedence(resolved.provenance["algorithm.beta"]) > precedence(resolved.provenance["algorithm.kl_in"]):
        return None
    return (
        f"{resolved.describe('algorithm.kl_in')}: {resolved.describe('algorithm.beta')}, so the reward would lose "
        "nothing; set algorithm.beta above 0, 0.05 is usual, or leave algorithm.kl_in null"
    )


def _check_adaptive_kl(resolved: Resolved) -> str | None:
    algorithm = resolved.settings.algorithm
    if algorithm.kl_target is None:
        return None
    if algorithm.beta == 0:
        # As with its place: no penalty, said later than what it should be held at, wins.
        if precedence(resolved.provenance["algorithm.beta"]) > precedence(resolved.provenance["algorithm.kl_target"]):
            return None
        return (
            f"{resolved.describe('algorithm.kl_target')}: {resolved.describe('algorithm.beta')} stays 0 however often "
            f"it "
            "is multiplied; set algorithm.beta above 0, 0.05 is usual, or leave algorithm.kl_target null"
        )
    if algorithm.kl_in == "reward":
        return None
    return (
        f"{resolved.describe('algorithm.kl_target')}: only a penalty in the reward is adapted, and "
        f"{resolved.describe('algorithm.kl_in')}; set algorithm.kl_in: reward, or leave algorithm.kl_target null"
    )


def _check_vtrace_bounds(resolved: Resolved) -> str | None:
    algorithm = resolved.settings.algorithm
    if algorithm.estimator != "vtrace" or algorithm.vtrace_max_trace <= algorithm.vtrace_max_ratio:
        return None
    return (
        f"{resolved.describe('algorithm.vtrace_max_trace')} is larger than "
        f"{resolved.describe('algorithm.vtrace_max_ratio')}, and V-trace is defined for traces clipped at or below "
        "their ratios; lower the former, or raise the latter"
    )


def _check_mini_batch_size(resolved: Resolved) -> str | None:
    step = resolved.settings.rollout.prompts_per_step
    mini_batch = resolved.settings.algorithm.mini_batch_prompts or step
    if step % mini_batch == 0:
        return None
    divisors = [size for size in range(1, step + 1) if step % size == 0]
    below = [size for size in divisors if size < mini_batch][-1:]
    above = [size for size in divisors if size > mini_batch][:1]
    return (
        f"{resolved.describe('algorithm.mini_batch_prompts')} does not divide "
        f"{resolved.describe('rollout.prompts_per_step')}; the nearest that does: "
        f"{' or '.join(map(str, below + above))}"
    )


def _check_max_length(resolved: Resolved) -> str | None:
    rollout, data = resolved.settings.rollout, resolved.settings.data
    longest = data.max_prompt_length + rollout.max_new_tokens
    if rollout.max_length_total is None or longest <= rollout.max_length_total:
        return None
    room = rollout.max_length_total - data.max_prompt_length
    lower = f", or lower rollout.max_new_tokens to {room}" if room >= 1 else ""
    return (
        f"{resolved.describe('data.max_prompt_length')} and {resolved.describe('rollout.max_new_tokens')} make "
        f"{longest} tokens, more than {resolved.describe('rollout.max_length_total')}; "
        f"raise that to {longest} (or null){lower}"
    )


def _check_token_quotas(resolved: Resolved) -> str | None:
    """Of the update and of every role that a step scores, where they are dynamic."""
    settings = resolved.settings
    lengths = ("data.max_prompt_length", "rollout.max_new_tokens")
    problems = []
    updated = ("algorithm", "critic") if settings.has_critic else ("algorithm",)
    roles = (*settings.scored_roles, "reward") if settings.reward.model else settings.scored_roles
    for scope in (*updated, *(f"score.{role}" for role in roles)):
        quota = value_of(settings, f"{scope}.max_tokens_per_device")
        # One more token is read behind a truncated sample, and behind whatever a reward model reads.
        reads_on = {"score.critic": settings.algorithm.bootstrap_truncated, "score.reward": True}
        behind = 1 if reads_on.get(scope) else 0
        longest = sum(value_of(settings, field) for field in lengths) + behind
        if quota is not None and quota < longest:
            problems.append(
                f"{resolved.describe(f'{scope}.max_tokens_per_device')} is less than the longest possible sample: "
                f"{' + '.join(resolved.describe(field) for field in lengths)}"
                f"{' + 1 read behind it' if behind else ''} = {longest} tokens, and no sample is cut; "
                f"raise it to {longest} or more, lower one of those, or choose {scope}.rows_per_device instead"
            )
    return "\n".join(problems) or None


def _check_warmup(resolved: Resolved) -> str | None:
    settings = resolved.settings
    updates = settings.num_policy_updates
    if settings.optimizer.warmup_steps < max(updates, 1):
        return None
    return (
        f"{resolved.describe('optimizer.warmup_steps')}: {resolved.describe('run.steps')} make {updates} "
        f"optimizer steps, so the warm-up would not end; lower it to at most {updates - 1}"
    )


def _check_critic_warmup(resolved: Resolved) -> str | None:
    settings = resolved.settings
    if not settings.has_critic or settings.critic.warmup_steps < settings.run.steps:
        return None
    return (
        f"{resolved.describe('critic.warmup_steps')}: {resolved.describe('run.steps')}, so the policy would never "
        f"learn; "
        f"lower it to at most {settings.run.steps - 1}"
    )


def _check_profile_steps(resolved: Resolved) -> str | None:
    steps = resolved.settings.run.steps
    beyond = [step for step in resolved.settings.logging.profile_steps if step > steps]
    if not beyond:
        return None
    return (
        f"logging.profile_steps (from {resolved.origin('logging.profile_steps')}): step {beyond[0]} is beyond the run, "
        f"which ends at {resolved.describe('run.steps')}; choose steps from 1 to {steps}"
    )


def _check_processes(resolved: Resolved) -> str | None:
    mesh = resolved.settings.mesh
    trio = ("mesh.coordinator_address", "mesh.num_processes", "mesh.process_id")
    missing = [field for field in trio if value_of(resolved.settings, field) is None]
    if mesh.coordinator_address == "auto":
        given = " and ".join(resolved.describe(field) for field in trio[1:] if field not in missing)
        return f"{given}: leave it null, mesh.coordinator_address is auto" if given else None
    if missing and len(missing) < len(trio):
        present = " and ".join(resolved.describe(field) for field in trio if field not in missing)
        return (
            f"{present}: also set {' and '.join(missing)}, or only mesh.coordinator_address: auto where the "
            "platform knows its hosts"
        )
    if mesh.num_processes is not None and mesh.process_id is not None and mesh.process_id >= mesh.num_processes:
        return (
            f"{resolved.describe('mesh.process_id')} is too large for "
            f"{resolved.describe('mesh.num_processes')}; ids go from 0 to {mesh.num_processes - 1}"
        )
    return None


def _check_expected_processes(resolved: Resolved) -> str | None:
    mesh = resolved.settings.mesh
    if None in (mesh.expect_processes, mesh.num_processes) or mesh.expect_processes == mesh.num_processes:
        return None
    return (
        f"{resolved.describe('mesh.expect_processes')} is not {resolved.describe('mesh.num_processes')}; leave it "
        f"null, or "
        "set both to the number of hosts"
    )


def _check_cpu_devices(resolved: Resolved) -> str | None:
    mesh = resolved.settings.mesh
    if mesh.cpu_devices is None or mesh.platform in ("auto", "cpu"):
        return None
    return (
        f"{resolved.describe('mesh.cpu_devices')} is for CPU hosts, and {resolved.describe('mesh.platform')}; leave "
        f"it null, "
        "or set mesh.platform: cpu"
    )


HOST_CHECKS: tuple[Check, ...] = (_check_processes, _check_expected_processes, _check_cpu_devices)
"""Of every verb that starts devices."""


def _check_no_pretend(resolved: Resolved) -> str | None:
    if resolved.settings.mesh.pretend is None:
        return None
    return (
        f"{resolved.describe('mesh.pretend')}: only grpo train --dry-run and grpo inspect-mesh accept devices "
        "that do not exist; leave it out"
    )


def _check_pretend_conflicts(resolved: Resolved) -> str | None:
    real = real_device_fields(resolved.settings)
    if resolved.settings.mesh.pretend is None or not real:
        return None
    return (
        f"{resolved.describe('mesh.pretend')} and {' and '.join(map(resolved.describe, real))} ask for pretended and "
        f"for "
        "real devices; leave one of the two out"
    )
