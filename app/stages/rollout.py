"""Implements `grpo rollout`: samples prompts and writes the samples to a file."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from app.checkpoint.policy_weights import read_policy_source
from app.distributed.collective_files import per_host_path, sample_json_lines, write_collectively
from app.distributed.collectives import error_barrier, gather_over_hosts, sum_over_hosts
from app.distributed.host_consistency import check_hosts_agree
from app.model.decode_weights import DecodeWeights
from app.prompts.data_sources import load_training_data
from app.prompts.encode import EncodeReport
from app.records.atomic_write import remove_partial_files
from app.records.jsonl import check_distinct_paths, check_output_path
from app.records.partial_samples import PartFile, PartialSamples, part_path, remove_parts
from app.records.sample import Prompt, Sample
from app.records.text_format import format_percent
from app.report.matplotlib_figures import check_picture_path
from app.report.slot_timeline import SUPPORTED_SUFFIXES, write_timeline
from app.rollout.scheduling.sample_states import SampleTable
from app.rollout.sequence import RolloutSequence
from app.runtime.host_supervision import PhaseCallback, iterate_in_phase, join_hosts, wait_for_other_hosts
from app.runtime.inputs import encode_rows
from app.runtime.model_spec import ModelSpec
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from app.stages.prompt_shards import PromptShard
from app.stages.rollout_identity import rollout_identity
from app.stages.rollout_timeline import rollout_timeline
from app.tracking.console import RolloutProgress
from settings import Resolved, Settings
from settings.errors import InputError


def rollout(
    resolved: Resolved,
    *,
    prompts: Path | None,
    limit: int | None,
    out: Path,
    timeline: Path | None = None,
    checkpoint: Path | None = None,
) -> dict[str, Any] | None:
    """Samples each prompt (only the first `limit`) `rollout.group_size` times and writes the samples to `out`.

    Several hosts share the prompts. Only process 0 writes the file and returns the summary. A killed rollout
    continues from the samples in its part files; unfinished samples are generated again.

    Args:
        timeline: file for a plot of the workers' activity.
        checkpoint: folder of a run or of one of its checkpoints, whose policy samples; None for that of `model.path`.

    Raises:
        InputError: the settings, the model, the checkpoint, the prompts or a file cannot be used.
    """
    settings = resolved.settings
    check_distinct_paths({"--prompts": prompts, "--out": out, "--timeline": timeline})
    check_output_path(out)
    if timeline is not None:
        _check_has_workers(settings)
        check_picture_path(timeline, "--timeline", SUPPORTED_SUFFIXES)
    source = read_policy_source(settings, checkpoint)
    settings, model, saved = source
    questions, report = _read_prompts(settings, model, prompts, limit=limit)
    with ExitStack() as stack:
        enter_phase = stack.enter_context(join_hosts(settings, out=out))
        identity = rollout_identity(settings, model, questions, saved)
        check_hosts_agree(resolved, identity)
        shard = PromptShard.from_prompts(questions, settings)
        with error_barrier():
            partial = PartialSamples(out, identity)
            finished = partial.read(shard.host_prompts, num_samples=shard.group_size)
            part_file = stack.enter_context(PartFile(per_host_path(part_path(out)), header=partial.header))
            remove_partial_files(out)
        session = stack.enter_context(closing(Session.open(ScoringSession.open(settings, model))))
        weights = source.load_decode_weights(session)
        counter = SampleCounter()
        session.compile_rollout()
        start = time.perf_counter()
        # Workers report only the samples generated now.
        num_shown = shard.num_samples - (len(finished) if session.workers else 0)
        with RolloutProgress(num_samples=num_shown, enabled=jax.process_index() == 0) as progress:
            for note in session.generation_notes:
                progress.print_line(note)
            if finished:
                progress.print_line(f"continuing: {len(finished)} of {shard.num_samples} samples are done")
            generation = Generation(session, weights, shard, finished, part_file, saved.step if saved else 0)
            samples = generation.samples(progress, enter_phase)
            _write_samples(out, shard, iterate_in_phase(counter.count(samples), "rollout", enter_phase), enter_phase)
        seconds = time.perf_counter() - start
        with error_barrier():
            remove_parts(out)
        schedule = _schedule_metrics(session, timeline and per_host_path(timeline))
        sampling = counter.metrics_over_hosts(finished, seconds)
    if jax.process_index() > 0:
        return None
    return {
        "prompts": len(questions),
        "dropped prompts": report.dropped,
        **({} if jax.process_count() == 1 else {"hosts": jax.process_count()}),
        **sampling,
        **schedule,
        "written to": str(out),
    }


def _write_samples(out: Path, shard: PromptShard, samples: Iterator[Sample], enter_phase: PhaseCallback) -> None:
    """Writes the output. If there are several hosts, each keeps its lines in a temporary file until all are done."""
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


def _read_prompts(
    settings: Settings, model: ModelSpec, prompts: Path | None, *, limit: int | None
) -> tuple[Sequence[Prompt], EncodeReport]:
    """Returns the first `limit` prompts of the file, or of `data.source` if there is none."""
    data = settings.data if prompts is None else settings.data.model_copy(update={"source": str(prompts)})
    dataset = load_training_data(data, seed=settings.run.seed)
    return encode_rows(settings, dataset.rows[:limit], model.tokenizer)


def _check_has_workers(settings: Settings) -> None:
    if not settings.rollout.has_workers:
        raise InputError(
            "--timeline plots the activity of scheduled workers, but rollout.scheduler is null or rollout.placement is "
            "global; set rollout.scheduler: adaptive and rollout.placement: island, or omit --timeline"
        )


def _schedule_metrics(session: Session, timeline: Path | None) -> dict[str, Any]:
    """Returns the metrics of all hosts' schedules, empty without one, and plots the timeline of this host."""
    if session.workers is None:
        return {}
    (metrics,) = session.take_schedule_metrics()
    policy = session.workers.schedule.policy
    if timeline is not None:
        model = session.settings.model.path
        write_timeline(timeline, rollout_timeline(session.workers.records, metrics, model=model, policy=policy))
    local = (metrics.makespan_s, metrics.bubble, metrics.tail_fraction, metrics.suspensions, metrics.repacked_tokens)
    makespans, bubbles, tails, suspensions, recomputed = gather_over_hosts(np.asarray(local, np.float64)).T
    bubble, tail = (format_percent(np.average(shares, weights=makespans)) for shares in (bubbles, tails))
    return {
        "scheduler": policy,
        "makespan": f"{makespans.max():.3g} s, bubble {bubble}, tail {tail}",
        "suspended": int(suspensions.sum()),
        "recomputed tokens": int(recomputed.sum()),
        **({} if timeline is None else {"timeline": str(timeline)}),
    }


@dataclass(frozen=True)
class Generation:
    """Generation of this host's samples, some of which may already be finished."""

    session: Session
    weights: DecodeWeights
    shard: PromptShard
    finished: Mapping[str, Sample]
    """Finished samples by uid."""
    part_file: PartFile
    policy_version: int
    """The training step of the weights, which is part of the sampling noise's key."""

    def samples(self, progress: RolloutProgress, enter_phase: PhaseCallback) -> Iterator[Sample]:
        """Yields all samples in order. New ones are appended to the part file as soon as they are finished."""
        if self.session.workers is not None:

            def report(table: SampleTable) -> None:
                progress.update_rollout(table)
                # Restarts the watchdog's limit, because the first sample in order may be the last to finish.
                enter_phase("rollout")

            self.session.workers.on_progress, self.session.workers.on_sample_done = report, self._append
            return self._from_queue(self._stream())
        return progress.track(self._from_queue(self.part_file.write_through(self._stream())))

    def _append(self, sequence: RolloutSequence) -> None:
        assert self.session.workers is not None
        self.part_file.append(self.session.workers.to_sample(sequence, 0, self.session.rollout_request()))

    def _stream(self) -> Iterator[Sample]:
        # A host without prompts still samples one and drops the results, so that its queue is not a special case.
        prompts = self.shard.host_prompts or self.shard.prompts[:1]
        return self.session.generator.stream(
            self.weights,
            prompts,
            self.session.rollout_request(policy_version=self.policy_version),
            skipped_uids=self.finished.keys(),
        )

    def _from_queue(self, fresh: Iterator[Sample]) -> Iterator[Sample]:
        for place in self.shard.prompt_indices:
            for index in range(self.shard.group_size):
                stored = self.finished.get(f"{self.shard.prompts[place].uid}/s{index}")
                yield replace(next(fresh) if stored is None else stored, group_id=place)
        for _ in fresh:
            assert not self.shard.host_prompts


class SampleCounter:
    """Counts samples, their tokens, and truncated samples as they pass through."""

    def __init__(self) -> None:
        self.counts = np.zeros(3, np.int64)

    def count(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yields the samples and counts them."""
        for sample in samples:
            self.counts += (1, len(sample.completion_ids), sample.finish_reason == "length")
            yield sample

    def metrics_over_hosts(self, finished: Mapping[str, Sample], seconds: float) -> dict[str, Any]:
        """Returns the counts of all hosts' samples, and the speed at which those not yet finished were generated."""
        before = [len(finished), sum(len(sample.completion_ids) for sample in finished.values())]
        samples, tokens, truncated, num_before, tokens_before = sum_over_hosts(
            np.asarray([*self.counts, *before])
        ).tolist()
        return {
            "samples": samples,
            "completion tokens": tokens,
            "mean length": round(tokens / max(samples, 1), 1),
            "truncated": truncated,
            "seconds": round(seconds, 2),
            "tokens per second": round((tokens - tokens_before) / seconds, 1),
            **({"sampled before": f"{num_before} samples, {tokens_before} tokens"} if num_before else {}),
        }
