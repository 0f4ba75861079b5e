"""Checks of rollouts: segments, P-DSR, workers and staleness."""

from __future__ import annotations

from collections.abc import Iterator

from settings.checks.check import Rule
from settings.loading.resolve import Resolved


def _check_row_limits(resolved: Resolved) -> Iterator[str]:
    """Every prompt must fit the fast workers, and every sample if there are no others."""
    settings = resolved.settings
    workers, longest_prompt = settings.rollout.workers, settings.data.max_prompt_length
    limit, longest = workers.fast.max_length, longest_prompt + settings.rollout.max_new_tokens
    if limit is not None and limit <= longest_prompt:
        yield (
            "<rollout.workers.fast.max_length> leaves no token for a completion after a prompt of "
            f"{longest_prompt} tokens (<data.max_prompt_length>); raise it to {longest_prompt + 1} or more, or set "
            "it to null"
        )
    if limit is not None and limit < longest and not workers.heavy.count:
        yield (
            f"<rollout.workers.fast.max_length>: no worker is left for the longest sample, {longest_prompt} tokens "
            f"of <data.max_prompt_length> and {settings.rollout.max_new_tokens} of <rollout.max_new_tokens>; set it to "
            f"null, or to at least {longest}, or add heavy workers"
        )


EXACT_MODE_CHECKS = (
    Rule(
        lambda s: s.rollout.mode == "exact" and not isinstance(s.rollout.slots, int) and not s.rollout.has_workers,
        "<rollout.mode>: samples are bitwise reproducible only with a fixed number of slots; set rollout.slots "
        "(for example to 16), or rollout.mode: fast",
    ),
    Rule(
        lambda s: s.rollout.mode == "exact" and s.model.dtype != "float32",
        "<rollout.mode>: with <model.dtype> rounding depends on the batch; set model.dtype: float32, or "
        "rollout.mode: fast",
    ),
)


ENVIRONMENT_CHECKS = (
    Rule(
        lambda s: s.env.is_used and s.rollout.placement == "global",
        "<rollout.placement>: environments answer the samples of their own host, at times that others do not know; set "
        "rollout.placement: island, or remove env.source and env.tools",
    ),
    Rule(
        lambda s: s.env.is_used and bool(s.rollout.stop),
        "<rollout.stop>: with an environment, a turn ends with the model's own end-of-turn token; remove the stop "
        "strings, and end a turn early with env.max_turn_tokens",
    ),
    Rule(
        lambda s: s.env.is_used and s.rollout.routing_replay,
        "<rollout.routing_replay>: routes of observations are not recorded; set it to false",
    ),
    Rule(
        lambda s: s.env.is_used and s.rollout.scheduler == "pdsr_v1" and s.rollout.pdsr.on_fast_limit == "truncate",
        "<rollout.pdsr.on_fast_limit> would end samples before their environment has judged them; set it to suspend",
    ),
)


def _check_ray_pool(resolved: Resolved) -> Iterator[str]:
    rollout = resolved.settings.rollout
    if rollout.uses_ray and not rollout.has_workers:
        yield (
            "<rollout.ray.address>: Ray runs only workers with a scheduler; "
            f"set {_how_to_get_workers(resolved)}, or rollout.ray.address: null"
        )


def _check_staleness(resolved: Resolved) -> Iterator[str]:
    rollout = resolved.settings.rollout
    if rollout.max_staleness > 0 and not rollout.has_workers:
        yield (
            "<rollout.max_staleness>: only workers with a scheduler generate during training; "
            f"set {_how_to_get_workers(resolved)}, or rollout.max_staleness: 0"
        )


def _how_to_get_workers(resolved: Resolved) -> str:
    return "rollout.scheduler: adaptive" if resolved.settings.rollout.scheduler is None else "rollout.placement: island"


SCHEDULE_CHECKS = (
    Rule(
        lambda s: s.rollout.segment.min > s.rollout.segment.max,
        "<rollout.segment.min> exceeds <rollout.segment.max>; lower the former or raise the latter",
    ),
    Rule(
        lambda s: s.rollout.workers.fast.count + s.rollout.workers.heavy.count == 0,
        "<rollout.workers.fast.count> and <rollout.workers.heavy.count>: there are no workers; set at least one of "
        "them to 1 or more",
    ),
    _check_row_limits,
)

WORKER_CHECKS = (
    Rule(
        lambda s: s.rollout.placement == "global" and s.rollout.scheduler not in (None, "sync"),
        "<rollout.placement>: one queue over all devices can only be scheduled by sync, but <rollout.scheduler>; set "
        "rollout.placement: island",
    ),
    Rule(
        lambda s: isinstance(s.rollout.slots, int) and s.rollout.has_workers,
        "<rollout.slots>: with <rollout.scheduler> each worker has its own slots; remove it, and set "
        "rollout.workers.fast.slots and rollout.workers.heavy.slots",
    ),
    _check_ray_pool,
    *EXACT_MODE_CHECKS,
)

STALENESS_CHECKS = (
    _check_staleness,
    Rule(
        lambda s: s.rollout.devices is not None and s.rollout.max_staleness == 0,
        "<rollout.devices> would wait for training, and training for them: with <rollout.max_staleness> generation and "
        "training alternate; set rollout.max_staleness: 1, or rollout.devices: null",
    ),
    Rule(
        lambda s: s.rollout.devices is not None and s.rollout.uses_ray,
        "<rollout.devices>: with <rollout.ray.address> no device of this host generates; set "
        "rollout.devices: null, or rollout.ray.address: null",
    ),
)
