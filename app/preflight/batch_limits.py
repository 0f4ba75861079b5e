"""The largest batches that fit a device's memory, by shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from app.batching.micro_batch_plan import MicroBatchPlan
from app.mesh.placement import bytes_per_device, num_local_row_shards, num_row_shards
from app.preflight.activation_memory import (
    TEMPORARY_BUFFERS,
    MemoryBreakdown,
    critic_update_memory_points,
    largest_micro_batch,
    num_decode_rows,
    update_memory_points,
)
from app.preflight.memory import StepShapes, largest_mini_batch, plan_for_equal_hosts
from app.rollout.slot_engine import SlotEngine
from app.runtime.micro_batching import MaxLengths, make_update_batcher
from app.runtime.session import Session
from settings.schema.rollout import MAX_SLOTS
from settings.schema.settings import AlgorithmSettings, CriticSettings

USABLE_MEMORY_FRACTION = 0.9
"""Of a device's memory: programs, fragments and what is only estimated take the rest."""
QUOTA_STEP = 256
"""Quotas are tried in steps of so many tokens."""
MAX_PROMPTS = 2**20


@dataclass(frozen=True)
class BatchLimit:
    """How far one setting can be raised while all others stay."""

    setting: str
    now: int
    fits: int | None
    """None where not even the smallest value does."""
    phase: str
    """That it fills."""
    bytes_at_fits: int
    """What that phase then holds on each device."""
    more_changes_nothing: bool = False
    """All of a step already fits at once."""

    def to_text(self) -> str:
        held = f"{self.phase} then holds {self.bytes_at_fits / 2**30:.2f} GiB"
        if self.fits is None:
            return f"{self.setting} = {self.now:,}: nothing fits beside what {self.phase} always holds"
        if self.more_changes_nothing:
            return f"{self.setting} = {self.now:,}: any fits; from {self.fits:,} on all is done at once, and {held}"
        return f"{self.setting} = {self.now:,}: at most {self.fits:,} fits; {held}"


def find_batch_limits(
    session: Session, shapes: StepShapes, memory: dict[str, MemoryBreakdown], *, available_bytes: int
) -> list[BatchLimit]:
    """For each setting that decides about a batch, its largest value that keeps the phase under `USABLE`."""
    room = int(USABLE_MEMORY_FRACTION * available_bytes)
    # What actors hold is elsewhere.
    is_here = session.settings.rollout.pool != "ray"
    rollout = [_rollout_limit(session, shapes, memory["rollout"], room)] if is_here else []
    return [*rollout, *_update_limits(session, memory, room)]


def _rollout_limit(
    session: Session, shapes: StepShapes, phase_memory: MemoryBreakdown, memory_limit: int
) -> BatchLimit:
    if session.continuous_generator is None:
        return _prompts_per_step_limit(session, shapes, phase_memory, memory_limit)
    setting, engine, num_alike = _fullest_engine(session)
    now = engine.shapes.num_slots
    of_logits = (
        (phase_memory["logits"] + phase_memory["logits_work"])
        // num_decode_rows(session, session.continuous_generator.footprint())
        * now
    )
    of_slots = num_alike * (bytes_per_device(engine.footprint().slots) + of_logits)
    rest = sum(phase_memory.values()) - of_slots

    def held_at(slots: int) -> int:
        return rest + of_slots * slots // now

    fits = _largest_fitting(held_at, step=_num_slot_shards(engine), maximum=MAX_SLOTS, memory_limit=memory_limit)
    return BatchLimit(setting, now, fits, "rollout", held_at(fits) if fits else rest)


def _fullest_engine(session: Session) -> tuple[str, SlotEngine, int]:
    """Whose slots fill a device: the setting, one such engine, and how many of them are on that device."""
    if session.continuous_batching is not None:
        return "rollout.slots", session.continuous_batching.engine, 1
    assert session.workers is not None
    workers = session.workers.workers
    fullest = max(workers, key=lambda worker: bytes_per_device(worker.engine.footprint()))
    alike = sum(worker.kind == fullest.kind for worker in workers) if fullest.device is not None else 1
    return f"rollout.workers.{fullest.kind}.slots", fullest.engine, alike


def _num_slot_shards(engine: SlotEngine) -> int:
    """Slots are split evenly over so many devices."""
    return num_row_shards(jax.tree.leaves(engine.programs.abstract_weights)[0].sharding.mesh)


def _prompts_per_step_limit(
    session: Session, shapes: StepShapes, phase_memory: MemoryBreakdown, memory_limit: int
) -> BatchLimit:
    """Of one batch: rows hold caches and logits, prompts the caches and activations of their prefill."""
    batch = shapes.rollout
    assert batch is not None
    settings, shards = session.settings, num_local_row_shards(session.mesh)
    of_rows = sum(phase_memory[name] for name in ("kv_cache", "logits", "logits_work"))
    of_prompts = sum(phase_memory[name] for name in ("prompt_cache", "activations"))
    rest = sum(phase_memory.values()) - of_rows - of_prompts

    def held_at(prompts: int) -> int:
        rows = -(-prompts * settings.rollout.group_size // shards)
        more_rows = rows * shards / batch.num_rows
        more_prompts = -(-prompts // shards) * shards / batch.num_prompts
        return rest + int(of_rows * more_rows + of_prompts * more_prompts)

    now = settings.rollout.prompts_per_step
    # Mini-batches stay as large as they are, and then there may be more of them.
    grain = now // settings.num_mini_batches if settings.num_mini_batches > 1 else 1
    fits = _largest_fitting(held_at, step=grain, maximum=MAX_PROMPTS, memory_limit=memory_limit)
    return BatchLimit("rollout.prompts_per_step", now, fits, "rollout", held_at(fits) if fits else rest)


def _update_limits(session: Session, memory: dict[str, MemoryBreakdown], memory_limit: int) -> list[BatchLimit]:
    settings, found = session.settings, []
    scopes: list[tuple[str, str, AlgorithmSettings | CriticSettings]] = [("algorithm", "update", settings.algorithm)]
    if settings.has_critic:
        scopes.append(("critic", "critic", settings.critic))
    for scope, phase, chosen in scopes:
        if chosen.max_tokens_per_device is not None:
            found.append(_token_quota_limit(session, scope, phase, chosen, memory[phase], memory_limit))
    return found


def _token_quota_limit(
    session: Session,
    scope: str,
    phase: str,
    section: AlgorithmSettings | CriticSettings,
    phase_memory: MemoryBreakdown,
    memory_limit: int,
) -> BatchLimit:
    settings, longest = session.settings, MaxLengths.from_settings(session.settings)
    mini_batch = largest_mini_batch(session, longest_prompt=settings.data.max_prompt_length)
    architecture = session.architecture_of("critic" if scope == "critic" else "policy")

    def plan_at(quota: int) -> MicroBatchPlan:
        scope_then = section.model_copy(update={"max_tokens_per_device": quota})
        return plan_for_equal_hosts(
            session, make_update_batcher(settings, scope_then, architecture, longest), mini_batch
        )

    now = section.max_tokens_per_device
    assert now is not None
    present = plan_at(now)
    moments = (critic_update_memory_points if scope == "critic" else update_memory_points)(session, present)
    base = sum(size for name, size in phase_memory.items() if name not in TEMPORARY_BUFFERS)

    def held_at(quota: int) -> int:
        """Activations grow with the tokens of the fullest micro-batch, and nothing else does."""
        more = _num_tokens(plan_at(quota)) / _num_tokens(present) - 1
        return base + max(sum(moment.values()) + int(more * moment["activations"]) for moment in moments)

    all_at_once = -(-int(mini_batch.totals.sum()) // num_local_row_shards(session.mesh) // QUOTA_STEP) * QUOTA_STEP
    smallest = -(-longest.sample // QUOTA_STEP) * QUOTA_STEP
    most = max(all_at_once, smallest)
    fits = _largest_fitting(held_at, step=QUOTA_STEP, maximum=most, memory_limit=memory_limit, minimum=smallest)
    return BatchLimit(f"{scope}.max_tokens_per_device", now, fits, phase, held_at(fits) if fits else base, fits == most)


def _num_tokens(plan: MicroBatchPlan) -> int:
    fullest = largest_micro_batch(plan)
    return len(fullest.rows) * fullest.shape.num_tokens


def _largest_fitting(
    bytes_at: Callable[[int], int], *, step: int, maximum: int, memory_limit: int, minimum: int = 1
) -> int | None:
    """The largest multiple of `grain` from `least` to `most` that leaves enough room; more holds no less."""
    low, high = -(-minimum // step), maximum // step
    if high < low or bytes_at(low * step) > memory_limit:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_at(middle * step) <= memory_limit else (low, middle - 1)
    return low * step
