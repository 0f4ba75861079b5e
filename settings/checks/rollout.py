"""What settings of a rollout contradict each other: segments, verdicts, workers and who schedules them."""

from __future__ import annotations

from settings.loading.resolve import Resolved


def _check_segment_bounds(resolved: Resolved) -> str | None:
    segment = resolved.settings.rollout.segment
    if segment.min <= segment.max:
        return None
    return (
        f"{resolved.describe('rollout.segment.min')} is more than {resolved.describe('rollout.segment.max')}; lower "
        f"the "
        "one or raise the other"
    )


def _check_pdsr_window(resolved: Resolved) -> str | None:
    pdsr = resolved.settings.rollout.pdsr
    if pdsr.window >= pdsr.window_min:
        return None
    return (
        f"{resolved.describe('rollout.pdsr.window')} is shorter than {resolved.describe('rollout.pdsr.window_min')}, "
        f"so "
        "no prompt would ever be judged; raise it to that or more"
    )


def _check_worker_count(resolved: Resolved) -> str | None:
    workers = resolved.settings.rollout.workers
    if workers.fast.count + workers.heavy.count > 0:
        return None
    return (
        f"{resolved.describe('rollout.workers.fast.count')} and {resolved.describe('rollout.workers.heavy.count')}: "
        "nobody would decode; set one of them to 1 or more"
    )


def _check_exact_mode(resolved: Resolved) -> str | None:
    settings = resolved.settings
    if settings.rollout.mode != "exact":
        return None
    if settings.rollout.slots is None and not settings.rollout.has_workers:
        return (
            f"{resolved.describe('rollout.mode')}: samples are the same bit for bit where they always meet as many "
            f"slots; "
            "set rollout.slots, 16 for example, or rollout.mode: fast"
        )
    fast, heavy = settings.rollout.workers.fast, settings.rollout.workers.heavy
    if settings.rollout.has_workers and fast.count and heavy.count and fast.slots != heavy.slots:
        return (
            f"{resolved.describe('rollout.mode')}: samples are the same bit for bit where all workers have as many "
            f"slots, "
            f"got {resolved.describe('rollout.workers.fast.slots')} and "
            f"{resolved.describe('rollout.workers.heavy.slots')}; "
            "set both to the same"
        )
    if settings.model.dtype != "float32":
        return (
            f"{resolved.describe('rollout.mode')}: {resolved.describe('model.dtype')} rounds differently in every "
            f"batch; set "
            "model.dtype: float32, or rollout.mode: fast"
        )
    return None


def _check_worker_devices(resolved: Resolved) -> str | None:
    workers = resolved.settings.rollout.workers
    named = [*(workers.fast.devices or ()), *(workers.heavy.devices or ())]
    twice = sorted({device for device in named if named.count(device) > 1})
    if not twice:
        return None
    return (
        f"{resolved.describe('rollout.workers.fast.devices')} and {resolved.describe('rollout.workers.heavy.devices')} "
        f"overlap: {', '.join(map(str, twice))} is named twice; give each device to one pool, once"
    )


def _check_scheduler(resolved: Resolved) -> str | None:
    rollout = resolved.settings.rollout
    if rollout.scheduler is None:
        return None
    if rollout.placement == "global" and rollout.scheduler != "sync":
        return (
            f"{resolved.describe('rollout.placement')}: one batch over all devices can only be scheduled by sync, and "
            f"{resolved.describe('rollout.scheduler')}; set rollout.placement: island"
        )
    if rollout.slots is not None and rollout.has_workers:
        return (
            f"{resolved.describe('rollout.slots')}: with {resolved.describe('rollout.scheduler')} slots are those of "
            f"the "
            "workers; leave it null, and set rollout.workers.fast.slots and rollout.workers.heavy.slots"
        )
    return None


def _check_slots(resolved: Resolved) -> str | None:
    rollout = resolved.settings.rollout
    if rollout.placement == "island" or rollout.slots is None:
        return None
    return (
        f"{resolved.describe('rollout.slots')}: every host fills slots of its own, and "
        f"{resolved.describe('rollout.placement')} asks for one batch of all hosts; leave rollout.slots null, or set "
        "rollout.placement: island"
    )


def _check_decode_layout(resolved: Resolved) -> str | None:
    rollout = resolved.settings.rollout
    if rollout.decode_layout == "gathered" or not rollout.has_workers:
        return None
    return (
        f"{resolved.describe('rollout.decode_layout')}: {resolved.describe('rollout.scheduler')} gives each worker "
        f"weights "
        "of its own, whole but for tp; set rollout.decode_layout: gathered, or rollout.scheduler: null"
    )


def _check_ray_pool(resolved: Resolved) -> str | None:
    rollout = resolved.settings.rollout
    if rollout.pool == "local":
        return None
    if not rollout.has_workers:
        way_out = "rollout.scheduler: adaptive" if rollout.scheduler is None else "rollout.placement: island"
        return (
            f"{resolved.describe('rollout.pool')}: only workers with a scheduler run as actors; set {way_out}, or "
            "rollout.pool: local"
        )
    for kind in ("fast", "heavy"):
        if getattr(rollout.workers, kind).devices is not None:
            return (
                f"{resolved.describe(f'rollout.workers.{kind}.devices')} are numbers of this host's devices, and with "
                f"{resolved.describe('rollout.pool')} an actor has all that Ray gives it; leave it null, and set "
                f"rollout.ray.{kind}.num_gpus or resources"
            )
    return None


def _check_staleness(resolved: Resolved) -> str | None:
    rollout = resolved.settings.rollout
    if rollout.max_staleness == 0 or rollout.has_workers:
        return None
    way_out = "rollout.scheduler: adaptive" if rollout.scheduler is None else "rollout.placement: island"
    return (
        f"{resolved.describe('rollout.max_staleness')}: only workers with a scheduler generate while others train; set "
        f"{way_out}, or rollout.max_staleness: 0"
    )


def _check_lease(resolved: Resolved) -> str | None:
    rollout = resolved.settings.rollout
    # Actors have devices of their own.
    if rollout.max_staleness == 0 or rollout.workers.lease_s is None or rollout.pool == "ray":
        return None
    return (
        f"{resolved.describe('rollout.workers.lease_s')}: under {resolved.describe('rollout.max_staleness')} training "
        "computes on the workers' devices meanwhile, and a worker that waits for it would count as silent; leave "
        "rollout.workers.lease_s null, or set rollout.max_staleness: 0"
    )


WORKER_CHECKS = (
    _check_scheduler,
    _check_slots,
    _check_decode_layout,
    _check_ray_pool,
    _check_exact_mode,
)
STALENESS_CHECKS = (_check_staleness, _check_lease)
SCHEDULE_CHECKS = (_check_segment_bounds, _check_pdsr_window, _check_worker_count, _check_worker_devices)
