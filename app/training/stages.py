"""One room at a time: what `grpo rollout` and `grpo inspect-mesh` do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from app.flow import Prompt, Sample
from app.jsonl import check_output, write_jsonl
from app.mesh import topology
from app.mesh.inspect import MeshReport, mesh_report
from app.mesh.placement import num_row_shards
from app.policy.decoder import by_path
from app.policy.kv_cache import DecodeWeights
from app.prompts.dataset import load_dataset
from app.prompts.encode import encode_prompts
from app.prompts.source import load_training_data
from app.report.timeline import timeline_picture
from app.sample_records import sample_to_record
from app.training.session import Session, check_context, open_on_one_host, read_model_input
from app.training.simulate import panel, timeline_kind
from app.whole_file import write_whole
from settings import Resolved, Settings
from settings.errors import InputError


def rollout(
    resolved: Resolved, *, prompts: Path | None, limit: int | None, out: Path, timeline: Path | None = None
) -> dict[str, Any]:
    """Samples every prompt (the first `limit`) `rollout.group_size` times and writes the records to `out`.

    Args:
        timeline: where the picture of what the workers did goes.

    Raises:
        InputError: settings, model, prompts or output file that cannot be used.
    """
    settings = resolved.settings
    check_output(out)
    _check_timeline(timeline, settings)
    model = read_model_input(settings)
    check_context(model.architecture, settings, path=settings.model.path)
    if prompts is None:
        dataset = load_training_data(settings.data, seed=settings.run.seed)
    else:
        dataset = load_dataset(
            str(prompts),
            split=settings.data.split,
            revision=None,
            prompt_column=settings.data.prompt_column,
            answer_column=settings.data.answer_column,
        )
    encoded, report = encode_prompts(
        dataset.rows[:limit],
        model.tokenizer,
        system_prompt=settings.data.system_prompt,
        max_prompt_length=settings.data.max_prompt_length,
        overlong=settings.data.overlong_prompts,
    )
    session = open_on_one_host(settings, model)
    weights = session.engine.weights(session.load_params())
    counter = SampleCounter()
    session.compile_rollout(evaluates=False)
    start = time.perf_counter()
    write_jsonl(out, (sample_to_record(s) for s in counter.count(_sampled(session, weights, encoded))))
    seconds = time.perf_counter() - start
    scheduled = _scheduled(session, timeline)
    return {
        "prompts": len(encoded),
        "dropped prompts": report.dropped,
        **counter.figures(),
        "seconds": round(seconds, 2),
        "tokens per second": round(counter.num_tokens / seconds, 1),
        **scheduled,
        "written to": str(out),
    }


def _check_timeline(path: Path | None, settings: Settings) -> None:
    if path is None:
        return
    if not settings.rollout.has_workers:
        raise InputError(
            "--timeline draws what scheduled workers do, and rollout.scheduler is null or rollout.placement global; "
            "set rollout.scheduler: adaptive, or leave it out"
        )
    check_output(path)
    timeline_kind(path)


def _scheduled(session: Session, timeline: Path | None) -> dict[str, Any]:
    """How good the schedule was, in words; nothing where nothing was scheduled. Draws it."""
    if session.workers is None:
        return {}
    (found,) = session.take_figures()
    policy = session.workers.schedule.policy
    if timeline is not None:
        slots = tuple((worker.name, worker.engine.shapes.num_slots) for worker in session.workers.workers)
        drawn = panel(policy, session.workers.records, found, slots, None)
        title = f"{session.settings.model.path}: {len(slots)} workers, {sum(n for _, n in slots)} slots"
        write_whole(timeline, timeline_picture([drawn], title=title, kind=timeline_kind(timeline)))
    return {
        "scheduler": policy,
        "makespan": f"{found.makespan_s:.3g} s, bubble {found.bubble:.0%}, tail {found.tail_fraction:.0%}",
        "suspended": found.suspensions,
        "wasted tokens": found.wasted_tokens,
        **({} if timeline is None else {"timeline": str(timeline)}),
    }


def _sampled(session: Session, weights: DecodeWeights, prompts: Sequence[Prompt]) -> Iterator[Sample]:
    """Batches of `rollout.prompts_per_step` prompts, one after another; with slots or workers a queue of all."""
    if session.queue:
        yield from session.stream(weights, prompts)
        return
    size = session.settings.rollout.prompts_per_step
    for first in range(0, len(prompts), size):
        yield from session.sample(weights, prompts[first : first + size], policy_version=0, first_group_id=first)


class SampleCounter:
    """Counts samples as they stream past."""

    def __init__(self) -> None:
        self.num_samples = self.num_tokens = self.num_truncated = 0

    def count(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        for sample in samples:
            self.num_samples += 1
            self.num_tokens += len(sample.completion_ids)
            self.num_truncated += sample.finish_reason == "length"
            yield sample

    def figures(self) -> dict[str, Any]:
        return {
            "samples": self.num_samples,
            "completion tokens": self.num_tokens,
            "mean length": round(self.num_tokens / max(self.num_samples, 1), 1),
            "truncated": self.num_truncated,
        }


def inspect_mesh(resolved: Resolved) -> MeshReport:
    """Where the weights of `model.path` and the samples of a step lie on the mesh. Loads no weights."""
    settings = resolved.settings
    definition = read_model_input(settings).definition
    topology.start(settings.mesh)
    mesh = topology.make_mesh(settings.mesh)
    shapes, dims = by_path(definition.shapes), by_path(definition.dims)
    return mesh_report(
        mesh,
        {".".join(path): (shapes[path].shape, dims[path]) for path in shapes},
        samples_per_step=settings.rollout.prompts_per_step * settings.rollout.group_size * jax.process_count(),
        num_row_shards=num_row_shards(mesh),
    )
