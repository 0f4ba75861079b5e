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
from app.distributed.host_consistency import agree
from app.distributed.lockstep import as_lines, of_host, together, write_together
from app.model.kv_cache import DecodeWeights
from app.prompts.data_sources import load_training_data
from app.prompts.dataset import load_dataset
from app.prompts.encode import EncodeReport
from app.records.jsonl import check_distinct, check_output
from app.records.sample import Prompt, Sample
from app.report.timeline import check_timeline, write_timeline
from app.rollout.scheduling.event_log import EventLog
from app.rollout.scheduling.sample_states import Ledger
from app.runtime.host_group import Entered, getting_on, joined_hosts, wait_for_others
from app.runtime.inputs import encode_rows
from app.runtime.model_spec import ModelInput, check_context, read_model_input
from app.runtime.session import Session
from app.stages.prompt_shards import Work
from app.stages.rollout_resume import Past, open_log, run_facts
from app.stages.simulate import panel, recorded_table
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
    check_distinct({"--prompts": prompts, "--out": out, "--timeline": timeline, "--log": log})
    check_output(out)
    _check_only_scheduled("--timeline draws", timeline, settings)
    _check_only_scheduled("--log keeps", log, settings)
    if timeline is not None:
        check_timeline(timeline)
    model = read_model_input(settings).bare
    check_context(model.architecture, settings, path=settings.model.path)
    questions, report = _read_prompts(settings, model, prompts, limit=limit)
    with ExitStack() as stack:
        entered = stack.enter_context(joined_hosts(settings, out=out))
        agree(resolved, {name: str(value) for name, value in run_facts(settings, model, questions).items()})
        work = Work.of(questions, settings)
        with together():
            written = (
                stack.enter_context(open_log(out, settings, model, work.own)) if settings.rollout.has_workers else None
            )
        past = Past.of(written)
        session = stack.enter_context(closing(Session.open(settings, model)))
        weights = session.engine.weights(session.load_params())
        counter = SampleCounter()
        session.compile_rollout()
        start = time.perf_counter()
        with RolloutProgress(num_samples=work.num_samples, shown=jax.process_index() == 0) as progress:
            if past is not None:
                progress.say(past.to_text())
            samples = _sampled(session, weights, work, progress=progress, log=written, entered=entered)
            _write(out, work, getting_on(counter.count(samples), "rollout", entered), entered)
        seconds = time.perf_counter() - start
        scheduled = _scheduled(session, timeline and of_host(timeline), was_killed=past is not None)
        if written is not None:
            written.finish(keep=log and of_host(log))
        drawn = _drawn(counter.over_hosts(), past, seconds)
    if jax.process_index() > 0:
        return None
    return {
        "prompts": len(questions),
        "dropped prompts": report.dropped,
        **({} if jax.process_count() == 1 else {"hosts": jax.process_count()}),
        **drawn,
        **scheduled,
        "written to": str(out),
        **({} if log is None else {"log": str(of_host(log))}),
    }


def _write(out: Path, work: Work, samples: Iterator[Sample], entered: Entered) -> None:
    """Several hosts keep theirs in files without names: they wait for each other only when all have them."""
    lines = as_lines(samples, path=out)
    if jax.process_count() == 1:
        write_together(out, work.in_rounds(lines))
        return
    with tempfile.TemporaryFile(dir=out.absolute().parent) as file:
        file.writelines(lines)
        file.seek(0)
        wait_for_others(entered)
        entered("save")
        write_together(out, work.in_rounds(file))


def _drawn(total: SampleCounter, past: Past | None, seconds: float) -> dict[str, Any]:
    """Samples of all hosts, and how fast those were drawn that a rollout that was killed had not drawn before."""
    own = (past.num_done, past.num_tokens) if past else (0, 0)
    num_done, num_tokens = sum_over_hosts(np.asarray(own)).tolist()
    return {
        **total.figures(),
        "seconds": round(seconds, 2),
        "tokens per second": round((total.num_tokens - num_tokens) / seconds, 1),
        **({"sampled before": f"{num_done} samples, {num_tokens} tokens"} if num_done or past else {}),
    }


def _read_prompts(
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
    return encode_rows(settings, dataset.rows[:limit], model.tokenizer)


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
    """How good the schedule was, in words; nothing where nothing was scheduled. Draws this host's."""
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


def _sampled(
    session: Session,
    weights: DecodeWeights,
    work: Work,
    *,
    progress: RolloutProgress,
    log: EventLog | None,
    entered: Entered,
) -> Iterator[Sample]:
    """This host's, round after round; with slots or workers a queue of all."""

    def watch(ledger: Ledger) -> None:
        progress.watch(ledger)
        # The first sample in order may be the last that is drawn.
        entered("rollout")

    if session.workers is not None:
        session.workers.log, session.workers.watch = log, watch
        yield from _in_a_queue(session, weights, work)
    elif session.slots is not None:
        yield from progress.count(_in_a_queue(session, weights, work))
    else:
        yield from progress.count(_in_rounds(session, weights, work))


def _in_a_queue(session: Session, weights: DecodeWeights, work: Work) -> Iterator[Sample]:
    # A host without a prompt samples one all the same, and drops it: its queue is no special case.
    prompts = work.own or work.prompts[:1]
    samples = session.stream(weights, prompts, group_size=work.group_size, rules=session.rules)
    places = (place for place in work.places for _ in range(work.group_size))
    for place, sample in zip(places, samples, strict=False):
        yield replace(sample, group_id=place)
    for _ in samples:
        assert not work.own


def _in_rounds(session: Session, weights: DecodeWeights, work: Work) -> Iterator[Sample]:
    for one in work.rounds:
        samples = session.sample(weights, work.asked(one), policy_version=0, first_group_id=one.own.start)
        yield from samples[: len(one.own) * work.group_size]


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

    def over_hosts(self) -> SampleCounter:
        """The same of all hosts."""
        total, own = SampleCounter(), (self.num_samples, self.num_tokens, self.num_truncated)
        total.num_samples, total.num_tokens, total.num_truncated = sum_over_hosts(np.asarray(own)).tolist()
        return total

    def figures(self) -> dict[str, Any]:
        return {
            "samples": self.num_samples,
            "completion tokens": self.num_tokens,
            "mean length": round(self.num_tokens / max(self.num_samples, 1), 1),
            "truncated": self.num_truncated,
        }
