"""`grpo evaluate`: a model, or a checkpoint of one, on held-out prompts, as training evaluates it."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from app.checkpoint.policy_checkpoint import SavedPolicy
from app.checkpoint.policy_weights import load_policy
from app.distributed.collectives import max_over_hosts
from app.distributed.host_consistency import agree, plug_in_digests, prompts_digest
from app.distributed.lockstep import as_lines, host_run, lines_to_first_host, together, write_together
from app.distributed.watchdog import WAIT
from app.evaluation.evaluator import evaluation_figures, sampled
from app.evaluation.metadata import (
    CHECKPOINT,
    JUDGE,
    JUDGES_FILE,
    JUDGES_FUNCTION,
    JUDGES_VIEW,
    MODEL,
    PROMPTS,
    Subject,
    write_subject,
)
from app.evaluation.results_file import OfPlaces, PartFile, Questions, check_out, read_parts, read_result, remove_parts
from app.evaluation.summary import EvaluationReport
from app.model.kv_cache import DecodeWeights
from app.prompts.encode import EncodeReport
from app.records.jsonl import check_output
from app.records.sample import Prompt, Sample
from app.reward.plugin import Moment
from app.reward.reward_functions import Rewards, judge_of
from app.reward.tasks import is_task_reward
from app.runtime.health_checks import check_rewards
from app.runtime.host_group import Entered, getting_on, joined_hosts, wait_for_others
from app.runtime.inputs import held_out_columns, read_held_out
from app.runtime.model_spec import ModelInput, check_context, read_model_input
from app.runtime.pinned_revisions import pinned
from app.runtime.session import Session
from app.tracking.rollout_progress import RolloutProgress
from settings import Resolved, Settings
from settings.loading.fields import value_of
from settings.schema.reward import RewardFunction


@dataclass(frozen=True)
class EvaluationInput:
    """Everything an evaluation reads, checked before any device is touched."""

    settings: Settings
    model: ModelInput
    saved: SavedPolicy | None
    """Whose weights are evaluated; None: those of `model.path`."""
    prompts: Sequence[Prompt]
    encoding: EncodeReport
    subject: Subject

    @property
    def questions(self) -> Questions:
        return Questions(self.prompts, self.settings.eval.num_samples)


def evaluate_model(resolved: Resolved, *, checkpoint: Path | None, out: Path | None) -> EvaluationReport | None:
    """Samples the held-out prompts, judges the samples and writes them to `out`.

    Several hosts share the prompts; the first of them writes the file, and alone returns what came of it. An evaluation
    that was killed goes on from what it has left beside `out`, and one that is done is only read.

    Raises:
        InputError: settings, model, checkpoint, prompts or output file that cannot be used.
        RuntimeError: a judge that fails, where failures are to raise.
    """
    if out is not None:
        check_output(out)
    read = read_evaluation_input(resolved.settings, checkpoint)
    if out is not None:
        check_out(out, read.subject)
    with ExitStack() as stack:
        entered = stack.enter_context(joined_hosts(read.settings, out=out or Path("evaluation")))
        facts = {name: str(value) for name, value in read.subject.facts.items()}
        # Only those that write meet in what writing takes.
        agree(resolved, {**facts, "--out": "not given" if out is None else "given"})
        start = time.perf_counter()
        judged = _already_judged(read, out)
        if judged is None:
            judged = _judged(read, out, stack, entered)
        figures = evaluation_figures(judged, read.settings)
    if jax.process_index() > 0:
        return None
    return EvaluationReport(
        read.subject,
        num_prompts=len(read.prompts),
        num_dropped=read.encoding.dropped,
        num_samples=read.settings.eval.num_samples,
        figures=figures,
        seconds=time.perf_counter() - start,
        out=out,
    )


def read_evaluation_input(settings: Settings, checkpoint: Path | None) -> EvaluationInput:
    """Checkpoint, model and held-out prompts.

    Raises:
        InputError: for whatever about them cannot be used.
    """
    saved = None
    if checkpoint is not None:
        saved = SavedPolicy.open(checkpoint)
        settings = pinned(settings, saved.run)
    model = read_model_input(settings)
    if saved is None:
        model = model.bare
    else:
        saved.check(model)
    check_context(model.architecture, settings, path=settings.model.path)
    prompts, encoding = read_held_out(settings, model.tokenizer)
    return EvaluationInput(settings, model, saved, prompts, encoding, _subject_of(settings, model, saved, prompts))


def _subject_of(settings: Settings, model: ModelInput, saved: SavedPolicy | None, prompts: Sequence[Prompt]) -> Subject:
    data, evaluation = settings.data, settings.eval
    judge = settings.reward.functions[0]
    digests = plug_in_digests([judge])
    facts = {
        MODEL: model.files.fingerprint,
        "the tokenizer": model.tokenizer.fingerprint,
        CHECKPOINT: "none" if saved is None else f"step {saved.step}, {_digest(saved)}",
        PROMPTS: prompts_digest(prompts),
        JUDGE: judge_of(settings.reward),
        JUDGES_FUNCTION: _name_of(judge),
        JUDGES_FILE: next(iter(digests.values()), None),
        **({} if is_task_reward(judge.name) else {name: str(value_of(settings, name)) for name in JUDGES_VIEW}),
        "eval.num_samples": evaluation.num_samples,
        "eval.temperature": evaluation.temperature,
        # Greedy samples take no noise.
        **({"run.seed": settings.run.seed} if evaluation.temperature else {}),
        "rollout.max_new_tokens": settings.rollout.max_new_tokens,
        "model.dtype": settings.model.dtype,
    }
    source = data.eval_source or data.source
    where = f"{source} ({data.eval_split})" if source.startswith(("builtin:", "hf:")) else source
    return Subject(settings.model.path, None if saved is None else saved.step, where, facts)


def _name_of(judge: RewardFunction) -> str | None:
    """Of a plug-in's function: in its file, whose content is another fact, or with the module. None: it is built in."""
    place, _, function = (judge.function or "").rpartition(":")
    return function if place.endswith(".py") else judge.function


def _digest(saved: SavedPolicy) -> str:
    """Of its weights, wherever they lie."""
    return hashlib.sha256(json.dumps(dict(saved.checksums), sort_keys=True).encode()).hexdigest()[:16]


def _already_judged(read: EvaluationInput, out: Path | None) -> Sequence[Sample] | None:
    """On the first host the samples of its file, where that holds them all; nothing on the others. Else None."""
    samples: Sequence[Sample] = ()
    is_whole = False
    with together():
        if out is not None and jax.process_index() == 0:
            found, is_whole = read_result(out, read.subject, read.questions)
            samples = [sample for place in sorted(found) for sample in found[place]]
    if not max_over_hosts(np.asarray(is_whole)):
        return None
    if out is not None:
        # What a kill between the last two steps of `_write` leaves.
        with together():
            remove_parts(out)
    return samples


def _judged(read: EvaluationInput, out: Path | None, stack: ExitStack, entered: Entered) -> Sequence[Sample]:
    """This host's samples; those of all hosts are in the file by then.

    What it opens, `stack` closes.
    """
    own, settings = host_run(len(read.prompts)), read.settings
    with together():
        known = {} if out is None else _known(read, out)
        columns = held_out_columns(settings, read.prompts)
        # Of the functions that training adds up, the first alone judges.
        judge = settings.reward.model_copy(update={"functions": settings.reward.functions[:1]})
        rewards = stack.enter_context(Rewards(judge, columns, columns))
        part = None if out is None else stack.enter_context(closing(PartFile(out, read.subject)))
    missing = [place for place in own if place not in known]
    drawn = _drawn(read, missing, part, stack, entered)
    samples = [sample for place in own for sample in (known.get(place) or drawn[place])]
    # No limit: each call of a function has its own, and a host's whole share is one phase.
    entered(WAIT)
    step = read.subject.step or 0
    judged = rewards.judge(samples, Moment(step, settings.run.steps))
    for line in lines_to_first_host((*rewards.reports, *judged.notices)):
        print(line, file=sys.stderr)
    check_rewards(judged)
    if out is not None:
        wait_for_others(entered)
        entered("save")
        _write(out, read.subject, judged.samples)
    return judged.samples


def _known(read: EvaluationInput, out: Path) -> OfPlaces:
    """What this host sees of a killed evaluation, and of a file that is not as it should be, to be judged anew."""
    return {**read_parts(out, read.subject, read.questions), **read_result(out, read.subject, read.questions).samples}


def _drawn(
    read: EvaluationInput, missing: Sequence[int], part: PartFile | None, stack: ExitStack, entered: Entered
) -> OfPlaces:
    """The samples that this host lacks; nothing is loaded where no host lacks any."""
    settings, num_asked = read.settings, len(host_run(len(read.prompts)))
    if not max_over_hosts(np.asarray(len(missing))):
        return {}
    session = stack.enter_context(closing(Session.open(settings, read.model)))
    weights = decode_weights(read, session)
    session.compile_evaluation()
    drawn: dict[int, list[Sample]] = {}
    num_samples = settings.eval.num_samples
    with RolloutProgress(num_samples=len(missing) * num_samples, shown=jax.process_index() == 0) as progress:
        if len(missing) < num_asked:
            progress.say(f"going on: {num_asked - len(missing)} of {num_asked} prompts are done")
        fresh = progress.count(sampled(session, weights, read.prompts, asked=missing))
        for sample in getting_on(part.keeping(fresh) if part else fresh, "evaluate", entered):
            drawn.setdefault(sample.group_id, []).append(sample)
    return drawn


def decode_weights(read: EvaluationInput, session: Session) -> DecodeWeights:
    """What samples are drawn with; nothing else of the model stays on the devices. All hosts call it together."""
    params = session.load_params() if read.saved is None else load_policy(read.saved, session)
    weights = session.engine.weights(params)
    session.drop_frozen()
    return weights


def _write(out: Path, subject: Subject, samples: Sequence[Sample]) -> None:
    """What it is of comes first: a file without that is taken for somebody else's."""
    with together():
        if jax.process_index() == 0:
            write_subject(out, subject)
    write_together(out, [as_lines(samples, path=out)])
    with together():
        remove_parts(out)
