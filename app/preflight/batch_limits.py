"""The largest batches that fit a device's memory, by shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from app.batching.micro_batch_plan import Plan
from app.mesh.placement import bytes_per_device, num_local_row_shards, num_row_shards
from app.preflight.activation_memory import WORKING_SET, Held, critic_moments, fullest_of, num_decoding, update_moments
from app.preflight.memory import Shapes, fullest_mini_batch, plan_of
from app.rollout.slot_engine import SlotEngine
from app.runtime.micro_batching import Longest, wire_update
from app.runtime.session import Session
from settings.schema.rollout import MAX_SLOTS
from settings.schema.settings import Algorithm, Critic

USABLE = 0.9
"""Of a device's memory: programs, fragments and what is only estimated take the rest."""
GRAIN = 256
"""Quotas are tried in steps of so many tokens."""
MOST_PROMPTS = 2**20


@dataclass(frozen=True)
class Largest:
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


def largest(session: Session, shapes: Shapes, memory: dict[str, Held], *, available_bytes: int) -> list[Largest]:
    """For each setting that decides about a batch, its largest value that keeps the phase under `USABLE`."""
    room = int(USABLE * available_bytes)
    # What actors hold is elsewhere.
    is_here = session.settings.rollout.pool != "ray"
    rollout = [_rollout(session, shapes, memory["rollout"], room)] if is_here else []
    return [*rollout, *_updates(session, memory, room)]


def _rollout(session: Session, shapes: Shapes, held: Held, room: int) -> Largest:
    if session.queue is None:
        return _prompts(session, shapes, held, room)
    setting, engine, num_alike = _slots_of(session)
    now = engine.shapes.num_slots
    of_logits = (held["logits"] + held["logits_work"]) // num_decoding(session, session.queue.footprint()) * now
    of_slots = num_alike * (bytes_per_device(engine.footprint().slots) + of_logits)
    rest = sum(held.values()) - of_slots

    def held_at(slots: int) -> int:
        return rest + of_slots * slots // now

    fits = _largest(held_at, grain=_row_shards(engine), most=MAX_SLOTS, room=room)
    return Largest(setting, now, fits, "rollout", held_at(fits) if fits else rest)


def _slots_of(session: Session) -> tuple[str, SlotEngine, int]:
    """Whose slots fill a device: the setting, one such engine, and how many of them are on that device."""
    if session.slots is not None:
        return "rollout.slots", session.slots.engine, 1
    assert session.workers is not None
    workers = session.workers.workers
    fullest = max(workers, key=lambda worker: bytes_per_device(worker.engine.footprint()))
    alike = sum(worker.kind == fullest.kind for worker in workers) if fullest.device is not None else 1
    return f"rollout.workers.{fullest.kind}.slots", fullest.engine, alike


def _row_shards(engine: SlotEngine) -> int:
    """Slots are split evenly over so many devices."""
    return num_row_shards(jax.tree.leaves(engine.programs.abstract_weights)[0].sharding.mesh)


def _prompts(session: Session, shapes: Shapes, held: Held, room: int) -> Largest:
    """Of one batch: rows hold caches and logits, prompts the caches and activations of their prefill."""
    batch = shapes.rollout
    assert batch is not None
    settings, shards = session.settings, num_local_row_shards(session.mesh)
    of_rows = sum(held[name] for name in ("kv_cache", "logits", "logits_work"))
    of_prompts = sum(held[name] for name in ("prompt_cache", "activations"))
    rest = sum(held.values()) - of_rows - of_prompts

    def held_at(prompts: int) -> int:
        rows = -(-prompts * settings.rollout.group_size // shards)
        more_rows = rows * shards / batch.num_rows
        more_prompts = -(-prompts // shards) * shards / batch.num_prompts
        return rest + int(of_rows * more_rows + of_prompts * more_prompts)

    now = settings.rollout.prompts_per_step
    # Mini-batches stay as large as they are, and then there may be more of them.
    grain = now // settings.num_mini_batches if settings.num_mini_batches > 1 else 1
    fits = _largest(held_at, grain=grain, most=MOST_PROMPTS, room=room)
    return Largest("rollout.prompts_per_step", now, fits, "rollout", held_at(fits) if fits else rest)


def _updates(session: Session, memory: dict[str, Held], room: int) -> list[Largest]:
    settings, found = session.settings, []
    scopes: list[tuple[str, str, Algorithm | Critic]] = [("algorithm", "update", settings.algorithm)]
    if settings.has_critic:
        scopes.append(("critic", "critic", settings.critic))
    for scope, phase, chosen in scopes:
        if chosen.max_tokens_per_device is not None:
            found.append(_quota(session, scope, phase, chosen, memory[phase], room))
    return found


def _quota(session: Session, scope: str, phase: str, chosen: Algorithm | Critic, held: Held, room: int) -> Largest:
    settings, longest = session.settings, Longest.of(session.settings)
    mini_batch = fullest_mini_batch(session, longest_prompt=settings.data.max_prompt_length)
    architecture = session.architecture_of("critic" if scope == "critic" else "policy")

    def plan_at(quota: int) -> Plan:
        scope_then = chosen.model_copy(update={"max_tokens_per_device": quota})
        return plan_of(session, wire_update(settings, scope_then, architecture, longest), mini_batch)

    now = chosen.max_tokens_per_device
    assert now is not None
    present = plan_at(now)
    moments = (critic_moments if scope == "critic" else update_moments)(session, present)
    base = sum(size for name, size in held.items() if name not in WORKING_SET)

    def held_at(quota: int) -> int:
        """Activations grow with the tokens of the fullest micro-batch, and nothing else does."""
        more = _num_tokens(plan_at(quota)) / _num_tokens(present) - 1
        return base + max(sum(moment.values()) + int(more * moment["activations"]) for moment in moments)

    all_at_once = -(-int(mini_batch.totals.sum()) // num_local_row_shards(session.mesh) // GRAIN) * GRAIN
    smallest = -(-longest.sample // GRAIN) * GRAIN
    most = max(all_at_once, smallest)
    fits = _largest(held_at, grain=GRAIN, most=most, room=room, least=smallest)
    return Largest(f"{scope}.max_tokens_per_device", now, fits, phase, held_at(fits) if fits else base, fits == most)


def _num_tokens(plan: Plan) -> int:
    fullest = fullest_of(plan)
    return len(fullest.rows) * fullest.shape.num_tokens


def _largest(held_at: Callable[[int], int], *, grain: int, most: int, room: int, least: int = 1) -> int | None:
    """The largest multiple of `grain` from `least` to `most` that leaves enough room; more holds no less."""
    low, high = -(-least // grain), most // grain
    if high < low or held_at(low * grain) > room:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if held_at(middle * grain) <= room else (low, middle - 1)
    return low * grain
