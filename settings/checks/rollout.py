"""Checks of workers, chat template, environments and staleness; messages are as in `settings.checks.training`."""

from __future__ import annotations

from collections.abc import Iterator

from settings.errors import join_words
from settings.loading.resolve import Resolved


def check_workers(resolved: Resolved) -> Iterator[str]:
    settings, rollout, workers = resolved.settings, resolved.settings.rollout, resolved.settings.rollout.workers
    if rollout.segment.min > rollout.segment.max:
        yield "<rollout.segment.min> exceeds <rollout.segment.max>; lower the former or raise the latter"
    if workers.fast.count + workers.heavy.count == 0:
        yield (
            "<rollout.workers.fast.count> and <rollout.workers.heavy.count>: there are no workers; set at least one of "
            "them to 1 or more"
        )
    # Every prompt must fit the fast workers, and every sample if there are no others.
    limit, longest_prompt = workers.fast.max_length, settings.data.max_prompt_length
    longest = longest_prompt + rollout.max_new_tokens
    if limit is not None and limit <= longest_prompt:
        yield (
            "<rollout.workers.fast.max_length> leaves no token for a completion after a prompt of "
            f"{longest_prompt} tokens (<data.max_prompt_length>); raise it to {longest_prompt + 1} or more, or set "
            "it to null"
        )
    if limit is not None and limit < longest and not workers.heavy.count:
        yield (
            f"<rollout.workers.fast.max_length>: no worker can hold the longest sample, {longest_prompt} tokens of "
            f"<data.max_prompt_length> plus {rollout.max_new_tokens} of <rollout.max_new_tokens>; set it to null, "
            f"or to at least {longest}, or add heavy workers"
        )
    if rollout.placement == "global" and rollout.scheduler not in (None, "sync"):
        yield (
            "<rollout.placement>: one queue over all devices can only be scheduled by sync, but <rollout.scheduler>; "
            "set rollout.placement: island"
        )
    if isinstance(rollout.slots, int) and rollout.has_workers:
        yield (
            "<rollout.slots>: with <rollout.scheduler> each worker has its own slots; remove it, and set "
            "rollout.workers.fast.slots and rollout.workers.heavy.slots"
        )
    if rollout.uses_ray and not rollout.has_workers:
        yield (
            "<rollout.ray.address>: Ray runs only workers with a scheduler; "
            f"set {_how_to_get_workers(resolved)}, or rollout.ray.address: null"
        )
    if rollout.mode == "exact" and not isinstance(rollout.slots, int) and not rollout.has_workers:
        yield (
            "<rollout.mode>: samples are bitwise reproducible only with a fixed number of slots; set rollout.slots "
            "(for example to 16), or rollout.mode: fast"
        )
    if rollout.mode == "exact" and settings.model.dtype != "float32":
        yield (
            "<rollout.mode>: with <model.dtype> rounding depends on the batch; set model.dtype: float32, or "
            "rollout.mode: fast"
        )


def check_chat_template(resolved: Resolved) -> Iterator[str]:
    settings = resolved.settings
    if settings.data.chat_template != "none":
        return
    if settings.data.system_prompt is not None:
        yield (
            "<data.system_prompt> is a message of a chat, but with <data.chat_template> prompts are plain text; "
            "write it into the prompts, or remove one of the two"
        )
    if settings.env.is_used:
        yield (
            "<data.chat_template>: environments and tools need a chat template to join turns; remove this setting, "
            "or env.source and env.tools"
        )


def check_environment(resolved: Resolved) -> Iterator[str]:
    rollout = resolved.settings.rollout
    if not resolved.settings.env.is_used:
        return
    if rollout.placement == "global":
        yield (
            "<rollout.placement>: an environment answers only its own host's samples, at times that other hosts do "
            "not know; "
            "set rollout.placement: island, or remove env.source and env.tools"
        )
    if rollout.stop:
        yield (
            "<rollout.stop>: with an environment, turns end at the model's end-of-turn token; remove the stop "
            "strings, or limit turns with env.max_turn_tokens"
        )
    if rollout.routing_replay:
        yield "<rollout.routing_replay>: the routes of an environment's observations are not recorded; set it to false"
    if rollout.scheduler == "pdsr_v1" and rollout.pdsr.on_fast_limit == "truncate":
        yield (
            "<rollout.pdsr.on_fast_limit> would end samples before their environment has graded them; set it to suspend"
        )


def check_staleness(resolved: Resolved) -> Iterator[str]:
    rollout = resolved.settings.rollout
    if rollout.max_staleness > 0 and not rollout.has_workers:
        yield (
            "<rollout.max_staleness>: only workers with a scheduler generate during training; "
            f"set {_how_to_get_workers(resolved)}, or rollout.max_staleness: 0"
        )
    if rollout.devices is not None and rollout.max_staleness == 0:
        yield (
            "<rollout.devices> would idle during training, because with <rollout.max_staleness> generation and "
            "training alternate; set rollout.max_staleness: 1, or rollout.devices: null"
        )
    if rollout.devices is not None and rollout.uses_ray:
        yield (
            "<rollout.devices>: with <rollout.ray.address> no device of this host generates; set "
            "rollout.devices: null, or rollout.ray.address: null"
        )


def _how_to_get_workers(resolved: Resolved) -> str:
    rollout = resolved.settings.rollout
    missing = ["rollout.scheduler: adaptive"] if rollout.scheduler is None else []
    missing += ["rollout.placement: island"] if rollout.placement == "global" else []
    return join_words(missing, last="and")
