"""The largest batches that fit a device's memory, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

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
from app.runtime.micro_batching import MaxLengths, make_update_batcher
from app.runtime.session import Session
from settings.schema.rollout import MAX_SLOTS

USABLE_MEMORY_FRACTION = 0.9
"""Part of a device's memory that a phase may fill; programs, fragmentation and estimation errors take the rest."""
QUOTA_STEP = 256
"""Granularity, in tokens, of the token quotas that are tried."""
MAX_PROMPTS = 2**20


@dataclass(frozen=True)
class BatchLimit:
    """How far one setting can be raised while all others stay the same."""

    setting: str
    now: int
    fits: int | None
    """Largest value that fits; None if not even the smallest does."""
    phase: str
    """Phase that the setting fills."""
    bytes_at_fits: int
    """Bytes of that phase on each device at the largest value."""
    more_changes_nothing: bool = False
    """True if all samples of a step already fit at once."""

    def to_text(self) -> str:
        """Returns one line for a person."""
        size = f"{self.phase} then needs {self.bytes_at_fits / 2**30:.2f} GiB"
        if self.fits is None:
            return f"{self.setting} = {self.now:,}: nothing fits next to what {self.phase} always needs"
        if self.more_changes_nothing:
            return f"{self.setting} = {self.now:,}: any fits; from {self.fits:,} on one pass does all, and {size}"
        return f"{self.setting} = {self.now:,}: at most {self.fits:,} fits; {size}"


class _Candidate(NamedTuple):
    """A setting whose largest value is searched."""

    setting: str
    phase: str
    now: int
    bytes_at: Callable[[int], int]
    """Bytes of the phase on each device at a value; never fewer at a larger one."""
    step: int
    """The values that are tried are its multiples."""
    maximum: int
    minimum: int = 1
    maximum_is_all: bool = False
    """True if the maximum already holds all samples of a step."""

    def limit(self, memory_limit: int) -> BatchLimit:
        """Returns the largest value that leaves the phase under the limit, found by bisection."""
        low, high = -(-self.minimum // self.step), self.maximum // self.step
        if high < low or self.bytes_at(low * self.step) > memory_limit:
            return BatchLimit(self.setting, self.now, None, self.phase, 0)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_at(middle * self.step) <= memory_limit else (low, middle - 1)
        fits = low * self.step
        is_all = self.maximum_is_all and fits == self.maximum
        return BatchLimit(self.setting, self.now, fits, self.phase, self.bytes_at(fits), is_all)


def find_batch_limits(
    session: Session, shapes: StepShapes, memory: dict[str, MemoryBreakdown], *, available_bytes: int
) -> list[BatchLimit]:
    """Returns, for each setting of a batch's size, the largest value that keeps its phase in the usable memory."""
    memory_limit = int(USABLE_MEMORY_FRACTION * available_bytes)
    return [candidate.limit(memory_limit) for candidate in _candidates(session, shapes, memory)]


def _candidates(session: Session, shapes: StepShapes, memory: dict[str, MemoryBreakdown]) -> Iterator[_Candidate]:
    settings = session.settings
    # Ray actors hold their slots on other machines.
    if settings.rollout.pool != "ray":
        by = _prompts_per_step if session.continuous_generator is None else _slots
        yield by(session, shapes, memory["rollout"])
    if settings.algorithm.max_tokens_per_device is not None:
        yield _token_quota(session, "algorithm", memory["update"], settings.algorithm.max_tokens_per_device)
    if settings.has_critic and settings.critic.max_tokens_per_device is not None:
        yield _token_quota(session, "critic", memory["critic"], settings.critic.max_tokens_per_device)


def _slots(session: Session, _: StepShapes, rollout: MemoryBreakdown) -> _Candidate:
    """Returns the slots of the engine that fills its device most."""
    setting, num_alike = "rollout.slots", 1
    if session.continuous_batching is not None:
        engine = session.continuous_batching.engine
    else:
        assert session.workers is not None
        workers = session.workers.workers
        fullest = max(workers, key=lambda worker: bytes_per_device(worker.engine.footprint()))
        engine, setting = fullest.engine, f"rollout.workers.{fullest.kind}.slots"
        if fullest.device is not None:
            num_alike = sum(worker.kind == fullest.kind for worker in workers)
    assert session.continuous_generator is not None
    now, num_rows = engine.shapes.num_slots, num_decode_rows(session, session.continuous_generator.footprint())
    logits = (rollout["logits"] + rollout["logits_work"]) // num_rows * now
    slots = num_alike * (bytes_per_device(engine.footprint().slots) + logits)
    fixed = sum(rollout.values()) - slots
    shards = num_row_shards(jax.tree.leaves(engine.programs.abstract_weights)[0].sharding.mesh)
    return _Candidate(setting, "rollout", now, lambda n: fixed + slots * n // now, step=shards, maximum=MAX_SLOTS)


def _prompts_per_step(session: Session, shapes: StepShapes, rollout: MemoryBreakdown) -> _Candidate:
    """Returns the prompts of one batch: its rows need caches and logits, its prompts the buffers of their prefill."""
    batch, settings, shards = shapes.rollout, session.settings, num_local_row_shards(session.mesh)
    assert batch is not None
    of_rows = sum(rollout[name] for name in ("kv_cache", "logits", "logits_work"))
    of_prompts = sum(rollout[name] for name in ("prompt_cache", "activations"))
    fixed = sum(rollout.values()) - of_rows - of_prompts

    def bytes_at(prompts: int) -> int:
        rows = -(-prompts * settings.rollout.group_size // shards) * shards
        padded_prompts = -(-prompts // shards) * shards
        return fixed + int(of_rows * rows / batch.num_rows + of_prompts * padded_prompts / batch.num_prompts)

    now = settings.rollout.prompts_per_step
    # Mini-batches keep their size, so more prompts are more mini-batches.
    step = now // settings.num_mini_batches if settings.num_mini_batches > 1 else 1
    return _Candidate("rollout.prompts_per_step", "rollout", now, bytes_at, step, MAX_PROMPTS)


def _token_quota(session: Session, section: str, phase: MemoryBreakdown, now: int) -> _Candidate:
    """Returns the token quota of an update; only activations grow with the tokens of its largest micro-batch."""
    settings, longest = session.settings, MaxLengths.from_settings(session.settings)
    mini_batch = largest_mini_batch(session, longest_prompt=settings.data.max_prompt_length)
    is_critic = section == "critic"
    architecture = session.architecture_of("critic" if is_critic else "policy")

    def plan_at(quota: int) -> MicroBatchPlan:
        chosen = settings.critic if is_critic else settings.algorithm
        changed = chosen.model_copy(update={"max_tokens_per_device": quota})
        return plan_for_equal_hosts(session, make_update_batcher(settings, changed, architecture, longest), mini_batch)

    present = plan_at(now)
    points = (critic_update_memory_points if is_critic else update_memory_points)(session, present)
    fixed = sum(size for name, size in phase.items() if name not in TEMPORARY_BUFFERS)

    def bytes_at(quota: int) -> int:
        growth = _num_tokens(plan_at(quota)) / _num_tokens(present) - 1
        return fixed + max(sum(point.values()) + int(growth * point["activations"]) for point in points)

    in_one_pass = -(-int(mini_batch.totals.sum()) // num_local_row_shards(session.mesh) // QUOTA_STEP) * QUOTA_STEP
    smallest = -(-longest.sample // QUOTA_STEP) * QUOTA_STEP
    maximum, name = max(in_one_pass, smallest), "critic" if is_critic else "update"
    return _Candidate(
        f"{section}.max_tokens_per_device", name, now, bytes_at, QUOTA_STEP, maximum, smallest, maximum_is_all=True
    )


def _num_tokens(plan: MicroBatchPlan) -> int:
    largest = largest_micro_batch(plan)
    return len(largest.rows) * largest.shape.num_tokens
