"""`grpo rollout`: generates samples for prompts and writes them to a file."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic_core import to_jsonable_python

from app.checkpoint.saved_policy import PolicySource, read_policy_source
from app.distributed.collective_files import host_slice, per_host_path, sample_json_lines, write_collectively
from app.distributed.collectives import error_barrier, gather_bytes_to_process_0, is_process_0, sum_over_hosts
from app.distributed.host_consistency import check_hosts_agree
from app.model.decode_weights import DecodeWeights
from app.prompts.data_sources import load_training_data
from app.prompts.encode import EncodeReport, encode_prompts
from app.records.atomic_write import remove_partial_files, write_atomic
from app.records.identity import Identity
from app.records.jsonl import check_distinct_paths, check_output_path
from app.records.partial_samples import PartFile, PartialSamples, part_path, remove_parts
from app.records.sample import DROPPED_PREFIX, Prompt, Sample
from app.records.text_format import format_count
from app.report.matplotlib_figures import check_picture_path
from app.rollout.scheduling.sample_states import SampleTable
from app.rollout.sequence import RolloutSequence
from app.runtime.host_supervision import PhaseCallback, iterate_in_phase, join_hosts, wait_for_other_hosts
from app.runtime.inputs import warn_of_misread_prompts
from app.runtime.model_spec import ModelSpec
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from app.tracking.console import RolloutProgress
from app.tracking.performance import schedule_performance
from app.tracking.rollout_timeline import SUPPORTED_SUFFIXES, Timeline, timeline_file
from settings import Resolved, Settings
from settings.errors import InputError, renamed_in_errors
from settings.loading.fields import FIELDS, value_of

FREE = (
    *("rollout.kv_blocks", "rollout.ray.address", "rollout.devices", "rollout.max_staleness"),
    "rollout.max_length_total",
)
"""Settings that may differ when a rollout is continued, because they change samples by rounding at most."""
FREE_IN_FAST_MODE = ("rollout.slots", "rollout.workers.", "rollout.ray.", "rollout.prompts_per_step")
"""Prefixes of further settings that may differ if `rollout.mode` is `fast`, where they change only rounding."""


def rollout(
    resolved: Resolved,
    *,
    prompts: Path | None,
    limit: int | None,
    out: Path,
    timeline: Path | None = None,
    checkpoint: Path | None = None,
) -> dict[str, Any] | None:
    """Generates `rollout.group_size` samples for each of the first `limit` prompts and writes them to `out`.

    The prompts are divided over the hosts. Only process 0 writes the file and returns the summary. A killed rollout
    continues from the samples in its part files; unfinished samples are generated again. So are all samples of a host
    that does not see the folder of `out`.

    Args:
        prompts: file of prompts; None = `data.source`.
        limit: number of prompts; None = all.
        timeline: file for a plot of the workers' activity.
        checkpoint: folder of a run or of one of its checkpoints, for its policy; None = `model.path`.

    Raises:
        InputError: the settings, the model, the checkpoint, the prompts or a file cannot be used.
    """
    settings = resolved.settings
    with error_barrier():
        if is_process_0():
            check_distinct_paths({"--prompts": prompts, "--out": out, "--timeline": timeline})
            _check_outputs(settings, out, timeline)
        source = read_policy_source(settings, checkpoint)
        settings, model, saved = source
        questions, report = _read_prompts(settings, model, prompts, limit=limit)
    with ExitStack() as stack:
        enter_phase = stack.enter_context(join_hosts(settings, out=out))
        identity = rollout_identity(source, questions)
        check_hosts_agree(resolved, identity)
        shard = PromptShard.from_prompts(questions, settings)
        with error_barrier():
            here, folder = out, out.absolute().parent
            if not is_process_0() and not (folder.is_dir() and os.access(folder, os.W_OK)):
                here = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-"))) / out.name
            partial = PartialSamples(here, identity)
            finished = partial.read(shard.host_prompts, num_samples=shard.group_size)
            part_file = stack.enter_context(PartFile(per_host_path(part_path(here)), header=partial.header))
            remove_partial_files(here)
        session = stack.enter_context(closing(Session.open(ScoringSession.open(few_slots(settings, questions), model))))
        # Generators report only the samples generated now.
        num_shown = shard.num_samples - len(finished)
        with RolloutProgress(num_samples=num_shown, enabled=jax.process_index() == 0) as progress:
            weights = source.load_decode_weights(session)
            session.compile_rollout()
            start = time.perf_counter()
            progress.follow(session)
            if finished:
                progress.print_line(f"continuing: {len(finished)} of {shard.num_samples} samples are done")
            samples = _generate(
                *(session, weights, shard, finished, part_file),
                policy_version=saved.step if saved else 0,
                progress=progress,
                enter_phase=enter_phase,
            )
            samples = iterate_in_phase(samples, "rollout", enter_phase)
            counts = _write_samples(out, shard, samples, enter_phase, folder=here.absolute().parent)
        seconds = time.perf_counter() - start
        with error_barrier():
            remove_parts(here)
        schedule = _schedule_metrics(session, timeline)
        sampling = _sampling_metrics(counts, finished, seconds)
    if jax.process_index() > 0:
        return None
    return {
        "prompts": len(questions),
        "dropped prompts": report.num_dropped,
        **({} if jax.process_count() == 1 else {"hosts": jax.process_count()}),
        **sampling,
        **schedule,
        "written to": str(out),
    }


def _check_outputs(settings: Settings, out: Path, timeline: Path | None) -> None:
    check_output_path(out, "--out")
    if timeline is None:
        return
    if not settings.rollout.has_workers:
        raise InputError(
            "--timeline plots the activity of scheduled workers, but rollout.scheduler is null or rollout.placement "
            "is global; set rollout.scheduler: adaptive and rollout.placement: island, or omit --timeline"
        )
    check_picture_path(timeline, "--timeline", SUPPORTED_SUFFIXES)


def _write_samples(
    out: Path, shard: PromptShard, samples: Iterator[Sample], enter_phase: PhaseCallback, *, folder: Path
) -> np.ndarray:
    """Writes the output; returns this host's counts of samples, tokens, truncated samples and dropped samples.

    With several hosts, each keeps its lines in a temporary file in `folder` until all hosts have finished.
    """
    counts = np.zeros(4, np.int64)

    def counted() -> Iterator[Sample]:
        for sample in samples:
            end = sample.finish_reason
            counts[:] += (1, len(sample.completion_ids), end == "length", end.startswith(DROPPED_PREFIX))
            yield sample

    lines = sample_json_lines(counted(), path=out)
    if jax.process_count() == 1:
        write_collectively(out, shard.split_by_round(lines))
        return counts
    with tempfile.TemporaryFile(dir=folder) as file:
        file.writelines(lines)
        file.seek(0)
        wait_for_other_hosts(enter_phase)
        enter_phase("save")
        write_collectively(out, shard.split_by_round(file))
    return counts


def _read_prompts(
    settings: Settings, model: ModelSpec, prompts: Path | None, *, limit: int | None
) -> tuple[Sequence[Prompt], EncodeReport]:
    """Returns the first `limit` prompts of the file `prompts` (`data.source` if it is None), and a report on them."""
    data = settings.data if prompts is None else settings.data.model_copy(update={"source": str(prompts)})
    with renamed_in_errors("data.source", to="data.source" if prompts is None else "--prompts"):
        dataset = load_training_data(data, seed=settings.run.seed)
    rows = dataset.rows[:limit]
    warn_of_misread_prompts(settings, rows, model.tokenizer)
    return encode_prompts(rows, model.tokenizer, settings.data)


def few_slots(settings: Settings, prompts: Sequence[Prompt]) -> Settings:
    """Limits `rollout.slots: auto` to the samples of `prompts`, except in exact mode, where slots change samples."""
    rollout, per_host = settings.rollout, -(-len(prompts) // jax.process_count())
    few = rollout.prompts_per_step if rollout.mode == "exact" else min(rollout.prompts_per_step, per_host)
    return settings.model_copy(update={"rollout": rollout.model_copy(update={"prompts_per_step": few})})


def _schedule_metrics(session: Session, timeline: Path | None) -> dict[str, Any]:
    """Returns the schedule metrics over all hosts, and plots each host's schedule; empty without workers."""
    if session.workers is None:
        return {}
    (metrics,) = schedules = session.take_schedule_metrics()
    schedule = session.workers.schedule
    if timeline is not None:
        model, records = session.settings.model.path, session.workers.records
        plot = Timeline.from_records(records, metrics, heading=model, schedule=schedule)
        for host, content in enumerate(gather_bytes_to_process_0(timeline_file(plot, suffix=timeline.suffix))):
            write_atomic(per_host_path(timeline, host=host), content)
    return {
        "scheduler": schedule.policy,
        **schedule_performance(schedules),
        **({} if timeline is None else {"timeline": str(per_host_path(timeline))}),
    }


def _generate(
    session: Session,
    weights: DecodeWeights,
    shard: PromptShard,
    finished: Mapping[str, Sample],
    part_file: PartFile,
    *,
    policy_version: int,
    progress: RolloutProgress,
    enter_phase: PhaseCallback,
) -> Iterator[Sample]:
    """Yields this host's samples in prompt order, and appends each new one to the part file when it finishes.

    Args:
        finished: maps uids to the samples of an earlier, killed rollout, which are not generated again.
        policy_version: the training step of the weights, on which the random numbers of sampling depend.
    """
    # A host without prompts still samples one and drops the results, to avoid a special case of an empty queue.
    prompts = shard.host_prompts or shard.prompts[:1]
    request = session.rollout_request(policy_version=policy_version)
    fresh = session.generator.stream(weights, prompts, request, skipped_uids=finished.keys())
    workers = session.workers
    if workers is None:
        return _in_order(part_file.write_through(fresh), shard, finished)

    def report(table: SampleTable) -> None:
        progress.update_rollout(table)
        # Restarts the watchdog's limit, because the first sample in order may be the last to finish.
        enter_phase("rollout")

    def append(sequence: RolloutSequence) -> None:
        part_file.append(workers.to_sample(sequence, 0, session.rollout_request()))

    workers.on_progress, workers.on_sample_done = report, append
    return _in_order(fresh, shard, finished)


def _in_order(fresh: Iterator[Sample], shard: PromptShard, finished: Mapping[str, Sample]) -> Iterator[Sample]:
    """Yields newly generated samples and samples of an earlier, killed rollout in prompt order."""
    for place in shard.prompt_indices:
        for index in range(shard.group_size):
            stored = finished.get(f"{shard.prompts[place].uid}/s{index}")
            yield replace(next(fresh) if stored is None else stored, group_id=place)
    for _ in fresh:
        assert not shard.host_prompts


def _sampling_metrics(counts: np.ndarray, finished: Mapping[str, Sample], seconds: float) -> dict[str, Any]:
    """Returns counts over the samples of all hosts, and the tokens per second of newly generated samples.

    Raises:
        RuntimeError: all samples were dropped; raised on every host.
    """
    before = [len(finished), sum(len(sample.completion_ids) for sample in finished.values())]
    samples, tokens, truncated, dropped, *earlier = sum_over_hosts([*counts, *before]).tolist()
    num_before, tokens_before = earlier
    if samples and dropped == samples:
        raise RuntimeError(f"all {samples} samples were dropped; their finish_reason and the log say what to fix")
    return {
        "samples": samples,
        "completion tokens": tokens,
        "mean length": round(tokens / max(samples, 1), 1),
        "truncated": truncated,
        "dropped samples": dropped,
        "seconds": round(seconds, 2),
        "tokens per second": round((tokens - tokens_before) / seconds, 1),
        **(
            {"sampled before": f"{format_count(num_before, 'sample')}, {format_count(tokens_before, 'token')}"}
            if num_before
            else {}
        ),
    }


@dataclass(frozen=True)
class PromptShard:
    """The prompts assigned to this host: a contiguous part of every round."""

    prompts: Sequence[Prompt]
    rounds: Sequence[range]
    """Indices of this host's prompts in each round. A round has `rollout.prompts_per_step` prompts per host, as in
    training; the last may have fewer."""
    group_size: int

    @classmethod
    def from_prompts(cls, prompts: Sequence[Prompt], settings: Settings) -> PromptShard:
        size = settings.rollout.prompts_per_step * jax.process_count()
        rounds = []
        for first in range(0, len(prompts), size):
            count = min(size, len(prompts) - first)
            run = host_slice(count)
            rounds.append(range(first + run.start, first + run.stop))
        return cls(prompts, rounds, settings.rollout.group_size)

    @property
    def prompt_indices(self) -> list[int]:
        """Indices into `prompts` of this host's prompts."""
        return [place for one in self.rounds for place in one]

    @property
    def host_prompts(self) -> list[Prompt]:
        return [self.prompts[place] for place in self.prompt_indices]

    @property
    def num_samples(self) -> int:
        """Number of samples that this host generates."""
        return len(self.prompt_indices) * self.group_size

    def split_by_round(self, lines: Iterator[bytes]) -> Iterator[Iterator[bytes]]:
        """Yields an iterator over the lines of each round, one line per sample; exhaust it before the next round."""
        for one in self.rounds:
            yield islice(lines, len(one) * self.group_size)
        # Resume the generator of the lines once more, because it finishes its work after the last line.
        assert next(lines, None) is None


def rollout_identity(source: PolicySource, prompts: Sequence[Prompt]) -> Identity:
    """Returns named values of everything that determines the samples. The devices must be started."""
    settings = source.settings
    exact = settings.rollout.mode == "exact"
    free = FREE if exact else (*FREE, *FREE_IN_FAST_MODE)
    kept = [name for name in FIELDS if name.startswith("rollout.") and not name.startswith(free)]
    devices = f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"
    placed = {
        "mesh.shape": settings.mesh.shape,
        "the devices": devices,
        "whether workers are Ray actors": settings.rollout.uses_ray,
    }
    return {
        **source.identity(prompts),
        "run.seed": settings.run.seed,
        "data.max_prompt_length": settings.data.max_prompt_length,
        **{name: to_jsonable_python(value_of(settings, name)) for name in kept},
        **(placed if exact else {}),
    }
