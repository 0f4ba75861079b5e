"""What settings of a rollout contradict each other: segments, verdicts, workers and who schedules them."""

from __future__ import annotations

from settings.loading.resolve import Resolved


def _segments_have_a_length(resolved: Resolved) -> str | None:
    segment = resolved.settings.rollout.segment
    if segment.min <= segment.max:
        return None
    return (
        f"{resolved.named('rollout.segment.min')} is more than {resolved.named('rollout.segment.max')}; lower the "
        "one or raise the other"
    )


def _the_window_holds_a_verdict(resolved: Resolved) -> str | None:
    pdsr = resolved.settings.rollout.pdsr
    if pdsr.window >= pdsr.window_min:
        return None
    return (
        f"{resolved.named('rollout.pdsr.window')} is shorter than {resolved.named('rollout.pdsr.window_min')}, so "
        "no prompt would ever be judged; raise it to that or more"
    )


def _somebody_decodes(resolved: Resolved) -> str | None:
    workers = resolved.settings.rollout.workers
    if workers.fast.count + workers.heavy.count > 0:
        return None
    return (
        f"{resolved.named('rollout.workers.fast.count')} and {resolved.named('rollout.workers.heavy.count')}: "
        "nobody would decode; set one of them to 1 or more"
    )


def _exact_samples_are_exact(resolved: Resolved) -> str | None:
    settings = resolved.settings
    if settings.rollout.mode != "exact":
        return None
    if settings.rollout.slots is None and not settings.rollout.has_workers:
        return (
            f"{resolved.named('rollout.mode')}: samples are the same bit for bit where they always meet as many slots; "
            "set rollout.slots, 16 for example, or rollout.mode: fast"
        )
    fast, heavy = settings.rollout.workers.fast, settings.rollout.workers.heavy
    if settings.rollout.has_workers and fast.count and heavy.count and fast.slots != heavy.slots:
        return (
            f"{resolved.named('rollout.mode')}: samples are the same bit for bit where all workers have as many slots, "
            f"got {resolved.named('rollout.workers.fast.slots')} and {resolved.named('rollout.workers.heavy.slots')}; "
            "set both to the same"
        )
    if settings.model.dtype != "float32":
        return (
            f"{resolved.named('rollout.mode')}: {resolved.named('model.dtype')} rounds differently in every batch; set "
            "model.dtype: float32, or rollout.mode: fast"
        )
    return None


def _workers_have_devices_of_their_own(resolved: Resolved) -> str | None:
    workers = resolved.settings.rollout.workers
    named = [*(workers.fast.devices or ()), *(workers.heavy.devices or ())]
    twice = sorted({device for device in named if named.count(device) > 1})
    if not twice:
        return None
    return (
        f"{resolved.named('rollout.workers.fast.devices')} and {resolved.named('rollout.workers.heavy.devices')} "
        f"overlap: {', '.join(map(str, twice))} is named twice; give each device to one pool, once"
    )


def _the_scheduler_has_workers(resolved: Resolved) -> str | None:
    rollout = resolved.settings.rollout
    if rollout.scheduler is None:
        return None
    if rollout.placement == "global" and rollout.scheduler != "sync":
        return (
            f"{resolved.named('rollout.placement')}: one batch over all devices can only be scheduled by sync, and "
            f"{resolved.named('rollout.scheduler')}; set rollout.placement: island"
        )
    if rollout.slots is not None and rollout.has_workers:
        return (
            f"{resolved.named('rollout.slots')}: with {resolved.named('rollout.scheduler')} slots are those of the "
            "workers; leave it null, and set rollout.workers.fast.slots and rollout.workers.heavy.slots"
        )
    return None


def _slots_are_of_one_host(resolved: Resolved) -> str | None:
    rollout = resolved.settings.rollout
    if rollout.placement == "island" or rollout.slots is None:
        return None
    return (
        f"{resolved.named('rollout.slots')}: every host fills slots of its own, and "
        f"{resolved.named('rollout.placement')} asks for one batch of all hosts; leave rollout.slots null, or set "
        "rollout.placement: island"
    )


def _workers_hold_whole_weights(resolved: Resolved) -> str | None:
    rollout = resolved.settings.rollout
    if rollout.decode_layout == "gathered" or not rollout.has_workers:
        return None
    return (
        f"{resolved.named('rollout.decode_layout')}: {resolved.named('rollout.scheduler')} gives each worker weights "
        "of its own, whole but for tp; set rollout.decode_layout: gathered, or rollout.scheduler: null"
    )


def _actors_have_a_scheduler(resolved: Resolved) -> str | None:
    rollout = resolved.settings.rollout
    if rollout.pool == "local":
        return None
    if not rollout.has_workers:
        way_out = "rollout.scheduler: adaptive" if rollout.scheduler is None else "rollout.placement: island"
        return (
            f"{resolved.named('rollout.pool')}: only workers with a scheduler run as actors; set {way_out}, or "
            "rollout.pool: local"
        )
    for kind in ("fast", "heavy"):
        if getattr(rollout.workers, kind).devices is not None:
            return (
                f"{resolved.named(f'rollout.workers.{kind}.devices')} are numbers of this host's devices, and with "
                f"{resolved.named('rollout.pool')} an actor has all that Ray gives it; leave it null, and set "
                f"rollout.ray.{kind}.num_gpus or resources"
            )
    return None


def _workers_run_ahead(resolved: Resolved) -> str | None:
    rollout = resolved.settings.rollout
    if rollout.max_staleness == 0 or rollout.has_workers:
        return None
    way_out = "rollout.scheduler: adaptive" if rollout.scheduler is None else "rollout.placement: island"
    return (
        f"{resolved.named('rollout.max_staleness')}: only workers with a scheduler generate while others train; set "
        f"{way_out}, or rollout.max_staleness: 0"
    )


def _training_does_not_run_leases_out(resolved: Resolved) -> str | None:
    rollout = resolved.settings.rollout
    # Actors have devices of their own.
    if rollout.max_staleness == 0 or rollout.workers.lease_s is None or rollout.pool == "ray":
        return None
    return (
        f"{resolved.named('rollout.workers.lease_s')}: under {resolved.named('rollout.max_staleness')} training "
        "computes on the workers' devices meanwhile, and a worker that waits for it would count as silent; leave "
        "rollout.workers.lease_s null, or set rollout.max_staleness: 0"
    )


WORKERS = (
    _the_scheduler_has_workers,
    _slots_are_of_one_host,
    _workers_hold_whole_weights,
    _actors_have_a_scheduler,
    _exact_samples_are_exact,
)
AHEAD = (_workers_run_ahead, _training_does_not_run_leases_out)
SCHEDULE = (_segments_have_a_length, _the_window_holds_a_verdict, _somebody_decodes, _workers_have_devices_of_their_own)
