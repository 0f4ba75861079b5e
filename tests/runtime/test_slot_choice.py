"""Tests the numbers that `rollout.slots: auto` and `rollout.kv_blocks: auto` choose."""

import logging
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import pytest

from app.mesh import jax_startup
from app.mesh.placement import bytes_per_device
from app.rollout.engine.programs import SlotPrograms
from app.runtime import slot_choice
from app.runtime.model_spec import read_model_spec
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from app.runtime.slot_choice import blocks_in_memory
from app.training.setup import open_session
from settings import load

TINY = {
    **{"data.max_prompt_length": 16, "data.num_problems": 8, "model.dtype": "float32", "mesh.shape": "'8,1,1'"},
    **{"rollout.prompts_per_step": 4, "rollout.group_size": 4, "rollout.max_new_tokens": 48},
}
GIB = 2**30


def opened(
    held_bytes: int = 0,
    *,
    environment: str = "null",
    generates: Literal["rollouts", "evaluations"] = "rollouts",
    **rollout: int | str,
) -> Session:
    chosen = TINY | {"env.source": environment} | {f"rollout.{name}": value for name, value in rollout.items()}
    settings = load(None, [f"{name}={value}" for name, value in chosen.items()], {}).settings
    jax_startup.initialize_distributed(settings.mesh)
    scoring = ScoringSession.open(settings, read_model_spec(settings))
    return Session.open(scoring, generates=generates, held_bytes=held_bytes)


def set_memory(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    monkeypatch.setattr(slot_choice, "device_memory_bytes", lambda: size)


def size_of(session: Session) -> tuple[int, int]:
    assert session.continuous_batching is not None
    programs = session.continuous_batching.engine.programs
    return programs.shapes.num_slots, programs.num_blocks


@pytest.mark.parametrize("memory", [None, 100 * GIB])
def test_all_samples_get_slots_if_memory_allows_it(memory: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, memory)
    session = opened()
    assert size_of(session) == (16, 2 * 4 + 2)
    assert session.generation_notes[-1].startswith(
        "rollout.slots: auto: 16 on each host for all samples of a step, with a KV cache of 1,024 tokens, "
    )
    # A step of 15 samples needs a number that all devices share.
    assert size_of(opened(prompts_per_step=3, group_size=5))[0] == 16


WORKERS: dict[str, Any] = {"scheduler": "adaptive", "workers.heavy.slots": 4}
ASYNC: dict[str, Any] = WORKERS | {"max_staleness": 1}


def test_evaluations_have_slots_while_workers_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, None)
    chosen: dict[str, Any] = ASYNC | {"mode": "exact", "prompts_per_step": 3, "group_size": 5}
    with closing(opened(environment="guess_number", **chosen)) as session:
        assert session.workers is not None and session.evaluation_generator is session.continuous_batching
        assert size_of(session)[0] == 16
        assert session.generation_notes[-1].startswith("rollout.slots: auto: 16 on each host for evaluations, with")
        # They need not round like the slots of workers, which must agree with one another.
        assert {worker.engine.shapes.rows_together for worker in session.workers.workers} == {4}
        assert session.evaluation_generator.engine.shapes.rows_together is None


def test_evaluations_use_the_engine_of_rollouts_unless_workers_are_busy() -> None:
    with closing(opened(environment="guess_number", **WORKERS)) as session:
        assert session.workers is not None and session.evaluation_generator is session.workers
    with closing(opened(environment="guess_number", slots=8)) as session:
        assert session.evaluation_generator is session.continuous_batching is not None
    with closing(opened(**ASYNC)) as session:
        assert session.evaluation_generator is session.continuous_batching is not None
    # Busy workers are not opened for evaluations alone.
    with closing(opened(generates="evaluations", **ASYNC)) as session:
        assert session.workers is None and not session.generates_async
        assert session.evaluation_generator is session.continuous_batching is not None
    with closing(opened(generates="evaluations", **WORKERS)) as session:
        assert session.evaluation_generator is session.workers is not None


def needed_bytes(programs: SlotPrograms, num_blocks: int) -> dict[str, int]:
    """Returns the bytes on a device that the compiler counts for each program."""
    lowered = replace(programs, shapes=programs.shapes._replace(num_blocks=num_blocks)).lower_programs(
        truncates=False, recomputes=True
    )
    found: dict[str, Any] = {name: one.compile().memory_analysis() for name, one in lowered.items()}
    return {
        name: one.argument_size_in_bytes + one.temp_size_in_bytes - one.alias_size_in_bytes + one.output_size_in_bytes
        for name, one in found.items()
    }


def test_kv_blocks_fill_the_memory_left_by_compiled_programs(monkeypatch, caplog):
    set_memory(monkeypatch, None)
    caplog.set_level(logging.INFO)
    session = opened(max_new_tokens=512)
    assert session.continuous_batching is not None
    engine = session.continuous_batching.engine
    programs, held = engine.programs, 3 * GIB
    arrays = bytes_per_device(programs.abstract_weights)
    arrays += slot_choice.POOL_COPIES * bytes_per_device(programs.abstract_pool)
    set_memory(monkeypatch, int((held + arrays) / slot_choice.SURE_SHARE) + 1)
    assert blocks_in_memory(engine, held_bytes=held, truncates=False) is None
    assert "compiling" not in caplog.text
    first = programs.with_blocks_for_rows(1).num_blocks
    needed, more = (needed_bytes(programs, num_blocks) for num_blocks in (first, first + 1))
    # The prefill of prompt and completion, which recomputes preempted samples, needs more than that of four prompts.
    assert needed["recompute"] > max(needed["prefill"], needed["decode"])
    block = more["recompute"] - needed["recompute"]
    room = held + needed["recompute"] + 2 * block + block // 8
    set_memory(monkeypatch, int(room / (1 - slot_choice.SPARE_SHARE)) + 2)
    assert blocks_in_memory(engine, held_bytes=held, truncates=False) == first + 2
    assert blocks_in_memory(engine, held_bytes=held + block, truncates=False) == first + 1
    assert "compiling generation programs to measure how much memory is left" in caplog.text


def test_memory_of_training_and_workers_reduces_the_kv_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "app.runtime.generators.blocks_in_memory", lambda *_, held_bytes, **__: asked.append(held_bytes)
    )
    session = opened()
    open_session(session.scoring, None)
    weights = 4 * session.scoring.model_spec.definition.num_parameters
    # Two moments have the size of the weights; counters are small.
    assert asked[0] == 0 and 3 * weights <= asked[1] < 3 * weights + 100
    with closing(opened(environment="guess_number", **ASYNC)) as session:
        assert session.workers is not None
        assert asked[2:] == [bytes_per_device(session.footprint(session.workers))]


def test_the_automatic_number_of_slots_assumes_half_full_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, None)
    full = opened(prompts_per_step=16)
    assert size_of(full) == (64, 8 * 4 + 2)
    monkeypatch.setattr("app.runtime.generators.blocks_in_memory", lambda *_, **__: 12)
    scarce = opened(prompts_per_step=16)
    # A row at its mean length has two blocks and half of a third.
    assert size_of(scarce) == (4 * 8, 12)
    assert "32 on each host for as many samples as fit, with a KV cache" in scarce.generation_notes[-1]
    assert size_of(opened(prompts_per_step=16, kv_blocks=9)) == (2 * 8, 9)
    # A number that was set explicitly is kept.
    assert size_of(opened(prompts_per_step=16, slots=64)) == (64, 12)
    assert size_of(opened(slots=64, kv_blocks="null")) == (64, 34)


def test_memory_for_less_than_one_sample_is_reported_by_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_memory(monkeypatch, 2**20)
    with caplog.at_level(logging.WARNING):
        session = opened(held_bytes=2**20)
    assert size_of(session) == (8, 6)
    assert "rollout.kv_blocks: auto: a device's 1.0 MiB cannot hold the KV cache of one sample" in caplog.text
    assert "lower rollout.max_new_tokens" in caplog.text
