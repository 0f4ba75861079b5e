"""One room at a time: what `grpo rollout` and `grpo inspect-mesh` do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax

from app.flow import Prompt, Sample
from app.jsonl import check_distinct, check_output, write_jsonl
from app.mesh import topology
from app.mesh.inspect import MeshReport, mesh_report
from app.mesh.placement import num_row_shards
from app.policy.decoder import by_path
from app.policy.kv_cache import DecodeWeights
from app.prompts.dataset import load_dataset
from app.prompts.encode import EncodeReport, encode_prompts
from app.prompts.source import load_training_data
from app.report.timeline import check_timeline, write_timeline
from app.rollout.scheduling.event_log import EventLog
from app.sample_records import sample_to_record
from app.training.rollout_log import Past, open_log
from app.training.rollout_progress import RolloutProgress
from app.training.session import ModelInput, Session, check_context, read_model_input, start_on_one_host
from app.training.simulate import panel, recorded_table
from settings import Resolved, Settings
from settings.errors import InputError


def rollout(
    resolved: Resolved,
    *,
    prompts: Path | None,
    limit: int | None,
    out: Path,
    timeline: Path | None = None,
    log: Path | None = None,
) -> dict[str, Any]:
    """Samples every prompt (the first `limit`) `rollout.group_size` times and writes the records to `out`.

    Under a scheduler, a rollout that was killed goes on from the log beside its output.

    Args:
        timeline: where the picture of what the workers did goes.
        log: where the log is kept.

    Raises:
        InputError: settings, model, prompts, log or output file that cannot be used.
    """
    settings = resolved.settings
    check_distinct({"--prompts": prompts, "--out": out, "--timeline": timeline, "--log": log})
    check_output(out)
    _check_only_scheduled("--timeline draws", timeline, settings)
    _check_only_scheduled("--log keeps", log, settings)
    if timeline is not None:
        check_timeline(timeline)
    model = read_model_input(settings)
    check_context(model.architecture, settings, path=settings.model.path)
    encoded, report = _encoded(settings, model, prompts, limit=limit)
    start_on_one_host(settings)
    with ExitStack() as stack:
        written = stack.enter_context(open_log(out, settings, model, encoded)) if settings.rollout.has_workers else None
        past = Past.of(written)
        session = stack.enter_context(closing(Session.open(settings, model)))
        weights = session.engine.weights(session.load_params())
        counter = SampleCounter()
        session.compile_rollout(evaluates=False)
        start = time.perf_counter()
        with RolloutProgress(num_samples=len(encoded) * settings.rollout.group_size) as progress:
            if past is not None:
                progress.say(past.to_text())
            samples = _sampled(session, weights, encoded, progress=progress, log=written)
            write_jsonl(out, (sample_to_record(s) for s in counter.count(samples)))
        seconds = time.perf_counter() - start
        scheduled = _scheduled(session, timeline, was_killed=past is not None)
        if written is not None:
            written.finish(keep=log)
    drawn_now = counter.num_tokens - (past.num_tokens if past else 0)
    return {
        "prompts": len(encoded),
        "dropped prompts": report.dropped,
        **counter.figures(),
        "seconds": round(seconds, 2),
        "tokens per second": round(drawn_now / seconds, 1),
        **({} if past is None else {"sampled before": f"{past.num_done} samples, {past.num_tokens} tokens"}),
        **scheduled,
        "written to": str(out),
        **({} if log is None else {"log": str(log)}),
    }


def _encoded(
    settings: Settings, model: ModelInput, prompts: Path | None, *, limit: int | None
) -> tuple[Sequence[Prompt], EncodeReport]:
    """The first prompts of the file, or of `data.source`."""
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
    return encode_prompts(
        dataset.rows[:limit],
        model.tokenizer,
        system_prompt=settings.data.system_prompt,
        max_prompt_length=settings.data.max_prompt_length,
        overlong=settings.data.overlong_prompts,
    )


def _check_only_scheduled(option: str, path: Path | None, settings: Settings) -> None:
    """Whether there will be something to write there."""
    if path is None:
        return
    if not settings.rollout.has_workers:
        raise InputError(
            f"{option} what scheduled workers do, and rollout.scheduler is null or rollout.placement global; "
            "set rollout.scheduler: adaptive, or leave it out"
        )
    check_output(path)


def _scheduled(session: Session, timeline: Path | None, *, was_killed: bool) -> dict[str, Any]:
    """How good the schedule was, in words; nothing where nothing was scheduled. Draws it."""
    if session.workers is None:
        return {}
    (found,) = session.take_figures()
    policy = session.workers.schedule.policy
    if timeline is not None:
        drawn = panel(policy, session.workers.records, found, None)
        slots = [slots for _, slots in drawn.slots]
        title = f"{session.settings.model.path}: {len(slots)} workers, {sum(slots)} slots"
        if was_killed:
            title += "; it was killed and went on, without the time between"
        write_timeline(timeline, [drawn], title=title, table=recorded_table(policy, found))
    return {
        "scheduler": policy,
        "makespan": f"{found.makespan_s:.3g} s, bubble {found.bubble:.0%}, tail {found.tail_fraction:.0%}",
        "suspended": found.suspensions,
        "wasted tokens": found.wasted_tokens,
        **({} if timeline is None else {"timeline": str(timeline)}),
    }


def _sampled(
    session: Session,
    weights: DecodeWeights,
    prompts: Sequence[Prompt],
    *,
    progress: RolloutProgress,
    log: EventLog | None,
) -> Iterator[Sample]:
    """Batches of `rollout.prompts_per_step` prompts, one after another; with slots or workers a queue of all."""
    if session.workers is not None:
        session.workers.log, session.workers.watch = log, progress.watch
        yield from session.stream(weights, prompts)
    elif session.slots is not None:
        yield from progress.count(session.stream(weights, prompts))
    else:
        yield from progress.count(_in_batches(session, weights, prompts))


def _in_batches(session: Session, weights: DecodeWeights, prompts: Sequence[Prompt]) -> Iterator[Sample]:
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
