"""One room at a time: what `grpo rollout` does."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from app.distributed.collectives import gather_over_hosts, sum_over_hosts
from app.distributed.host_consistency import check_hosts_agree
from app.distributed.lockstep import error_barrier, per_host_path, sample_json_lines, write_collectively
from app.model.kv_cache import DecodeWeights
from app.prompts.data_sources import load_training_data
from app.prompts.dataset import load_dataset
from app.prompts.encode import EncodeReport
from app.records.jsonl import check_distinct_paths, check_output_path
from app.records.sample import Prompt, Sample
from app.report.timeline import check_timeline_path, write_timeline
from app.rollout.scheduling.event_log import EventLog
from app.rollout.scheduling.sample_states import SampleTable
from app.runtime.host_group import PhaseCallback, iterate_in_phase, join_hosts, wait_for_other_hosts
from app.runtime.inputs import encode_rows
from app.runtime.model_spec import ModelSpec, check_context_length, read_model_spec
from app.runtime.session import Session
from app.stages.prompt_shards import PromptShard
from app.stages.rollout_resume import PreviousProgress, open_event_log, rollout_facts
from app.stages.simulate import recorded_table, timeline_panel
from app.tracking.rollout_progress import RolloutProgress
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
) -> dict[str, Any] | None:
    """Samples every prompt (the first `limit`) `rollout.group_size` times and writes the records to `out`.

    Several hosts share the prompts, and the first of them writes the file; it alone returns figures. Under a scheduler,
    a rollout that was killed goes on from the log beside its output, or from those of all hosts.

    Args:
        timeline: where the picture of what the workers did goes.
        log: where the log is kept.

    Raises:
        InputError: settings, model, prompts, log or output file that cannot be used.
    """
    settings = resolved.settings
    check_distinct_paths({"--prompts": prompts, "--out": out, "--timeline": timeline, "--log": log})
    check_output_path(out)
    _check_scheduler_option("--timeline draws", timeline, settings)
    _check_scheduler_option("--log keeps", log, settings)
    if timeline is not None:
        check_timeline_path(timeline)
    model = read_model_spec(settings).without_adapters
    check_context_length(model.architecture, settings, path=settings.model.path)
    questions, report = _read_prompts(settings, model, prompts, limit=limit)
    with ExitStack() as stack:
        entered = stack.enter_context(join_hosts(settings, out=out))
        check_hosts_agree(
            resolved, {name: str(value) for name, value in rollout_facts(settings, model, questions).items()}
        )
        work = PromptShard.from_prompts(questions, settings)
        with error_barrier():
            written = (
                stack.enter_context(open_event_log(out, settings, model, work.host_prompts))
                if settings.rollout.has_workers
                else None
            )
        past = PreviousProgress.from_log(written)
        session = stack.enter_context(closing(Session.open(settings, model)))
        weights = session.engine.to_decode_weights(session.load_params())
        counter = SampleCounter()
        session.compile_rollout()
        start = time.perf_counter()
        with RolloutProgress(num_samples=work.num_samples, enabled=jax.process_index() == 0) as progress:
            if past is not None:
                progress.print_line(past.to_text())
            samples = _generate_samples(session, weights, work, progress=progress, log=written, enter_phase=entered)
            _write_samples(out, work, iterate_in_phase(counter.count(samples), "rollout", entered), entered)
        seconds = time.perf_counter() - start
        scheduled = _schedule_metrics(session, timeline and per_host_path(timeline), was_resumed=past is not None)
        if written is not None:
            written.finish(keep=log and per_host_path(log))
        drawn = _sampling_metrics(counter.total_over_hosts(), past, seconds)
    if jax.process_index() > 0:
        return None
    return {
        "prompts": len(questions),
        "dropped prompts": report.dropped,
        **({} if jax.process_count() == 1 else {"hosts": jax.process_count()}),
        **drawn,
        **scheduled,
        "written to": str(out),
        **({} if log is None else {"log": str(per_host_path(log))}),
    }


def _write_samples(out: Path, shard: PromptShard, samples: Iterator[Sample], enter_phase: PhaseCallback) -> None:
    """Several hosts keep theirs in files without names: they wait for each other only when all have them."""
    lines = sample_json_lines(samples, path=out)
    if jax.process_count() == 1:
        write_collectively(out, shard.split_by_round(lines))
        return
    with tempfile.TemporaryFile(dir=out.absolute().parent) as file:
        file.writelines(lines)
        file.seek(0)
        wait_for_other_hosts(enter_phase)
        enter_phase("save")
        write_collectively(out, shard.split_by_round(file))


def _sampling_metrics(total: SampleCounter, previous: PreviousProgress | None, seconds: float) -> dict[str, Any]:
    """Samples of all hosts, and how fast those were drawn that a rollout that was killed had not drawn before."""
    own = (previous.num_done, previous.num_tokens) if previous else (0, 0)
    num_done, num_tokens = sum_over_hosts(np.asarray(own)).tolist()
    return {
        **total.metrics(),
        "seconds": round(seconds, 2),
        "tokens per second": round((total.num_tokens - num_tokens) / seconds, 1),
        **({"sampled before": f"{num_done} samples, {num_tokens} tokens"} if num_done or previous else {}),
    }


def _read_prompts(
    settings: Settings, model: ModelSpec, prompts: Path | None, *, limit: int | None
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
    return encode_rows(settings, dataset.rows[:limit], model.tokenizer)


def _check_scheduler_option(option: str, path: Path | None, settings: Settings) -> None:
    """Whether there will be something to write there."""
    if path is None:
        return
    if not settings.rollout.has_workers:
        raise InputError(
            f"{option} what scheduled workers do, and rollout.scheduler is null or rollout.placement global; "
            "set rollout.scheduler: adaptive, or leave it out"
        )
    check_output_path(path)


def _schedule_metrics(session: Session, timeline: Path | None, *, was_resumed: bool) -> dict[str, Any]:
    """How good the schedule was, in words; nothing where nothing was scheduled. Draws this host's."""
    if session.workers is None:
        return {}
    (found,) = session.take_schedule_metrics()
    policy = session.workers.schedule.policy
    if timeline is not None:
        drawn = timeline_panel(policy, session.workers.records, found, None)
        slots = [slots for _, slots in drawn.slots]
        title = f"{session.settings.model.path}: {len(slots)} workers, {sum(slots)} slots"
        if was_resumed:
            title += "; it was killed and went on, without the time between"
        write_timeline(timeline, [drawn], title=title, table=recorded_table(policy, found))
    own = (found.makespan_s, found.bubble, found.tail_fraction, found.suspensions, found.wasted_tokens)
    makespans, bubbles, tails, suspensions, wasted = gather_over_hosts(np.asarray(own, np.float64)).T
    bubble, tail = (np.average(shares, weights=makespans) for shares in (bubbles, tails))
    return {
        "scheduler": policy,
        "makespan": f"{makespans.max():.3g} s, bubble {bubble:.0%}, tail {tail:.0%}",
        "suspended": int(suspensions.sum()),
        "wasted tokens": int(wasted.sum()),
        **({} if timeline is None else {"timeline": str(timeline)}),
    }


def _generate_samples(
    session: Session,
    weights: DecodeWeights,
    shard: PromptShard,
    *,
    progress: RolloutProgress,
    log: EventLog | None,
    enter_phase: PhaseCallback,
) -> Iterator[Sample]:
    """This host's, round after round; with slots or workers a queue of all."""

    def watch(ledger: SampleTable) -> None:
        progress.update_rollout(ledger)
        # The first sample in order may be the last that is drawn.
        enter_phase("rollout")

    if session.workers is not None:
        session.workers.event_log, session.workers.on_progress = log, watch
        yield from _generate_from_queue(session, weights, shard)
    elif session.continuous_batching is not None:
        yield from progress.track(_generate_from_queue(session, weights, shard))
    else:
        yield from progress.track(_generate_in_rounds(session, weights, shard))


def _generate_from_queue(session: Session, weights: DecodeWeights, shard: PromptShard) -> Iterator[Sample]:
    # A host without a prompt samples one all the same, and drops it: its queue is no special case.
    prompts = shard.host_prompts or shard.prompts[:1]
    samples = session.stream(weights, prompts, session.rollout_request())
    places = (place for place in shard.prompt_indices for _ in range(shard.group_size))
    for place, sample in zip(places, samples, strict=False):
        yield replace(sample, group_id=place)
    for _ in samples:
        assert not shard.host_prompts


def _generate_in_rounds(session: Session, weights: DecodeWeights, shard: PromptShard) -> Iterator[Sample]:
    for one in shard.rounds:
        samples = session.sample(
            weights, shard.padded_prompts(one), policy_version=0, first_group_id=one.prompt_indices.start
        )
        yield from samples[: len(one.prompt_indices) * shard.group_size]


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

    def total_over_hosts(self) -> SampleCounter:
        """The same of all hosts."""
        total, own = SampleCounter(), (self.num_samples, self.num_tokens, self.num_truncated)
        total.num_samples, total.num_tokens, total.num_truncated = sum_over_hosts(np.asarray(own)).tolist()
        return total

    def metrics(self) -> dict[str, Any]:
        return {
            "samples": self.num_samples,
            "completion tokens": self.num_tokens,
            "mean length": round(self.num_tokens / max(self.num_samples, 1), 1),
            "truncated": self.num_truncated,
        }
