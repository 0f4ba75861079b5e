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

from app.checkpoint.policy_checkpoint import PolicyCheckpoint
from app.checkpoint.policy_weights import load_policy_params
from app.distributed.collectives import max_over_hosts
from app.distributed.host_consistency import check_hosts_agree, describe_prompts, plugin_file_digests
from app.distributed.lockstep import (
    error_barrier,
    gather_lines_to_first_host,
    host_shard,
    sample_json_lines,
    write_collectively,
)
from app.distributed.watchdog import WAIT_PHASE
from app.evaluation.evaluator import evaluation_estimates, generate_samples
from app.evaluation.metadata import (
    CHECKPOINT,
    JUDGE,
    JUDGE_FILE,
    JUDGE_FUNCTION,
    JUDGE_SETTINGS,
    MODEL,
    PROMPTS,
    EvaluationMetadata,
    write_metadata,
)
from app.evaluation.results_file import (
    EvaluationPrompts,
    SamplesByPrompt,
    check_results_file,
    open_part_file,
    read_drawn_samples,
    read_results,
)
from app.evaluation.summary import EvaluationSummary
from app.model.kv_cache import DecodeWeights
from app.prompts.encode import EncodeReport
from app.records.jsonl import check_output_path
from app.records.part_file import PartFile, remove_parts
from app.records.sample import Prompt, Sample
from app.reward.plugin import StepInfo
from app.reward.reward_functions import RewardFunctions, accuracy_function_name
from app.reward.tasks import is_task_reward
from app.runtime.health_checks import check_rewards
from app.runtime.host_group import PhaseCallback, iterate_in_phase, join_hosts, wait_for_other_hosts
from app.runtime.inputs import eval_columns, read_eval_prompts
from app.runtime.model_spec import ModelSpec, check_context_length, read_model_spec
from app.runtime.pinned_revisions import pin_revisions
from app.runtime.session import Session
from app.tracking.rollout_progress import RolloutProgress
from settings import Resolved, Settings
from settings.loading.fields import value_of
from settings.schema.reward import RewardFunctionSettings


@dataclass(frozen=True)
class EvaluationInput:
    """Everything an evaluation reads, checked before any device is touched."""

    settings: Settings
    model: ModelSpec
    saved_policy: PolicyCheckpoint | None
    """Whose weights are evaluated; None: those of `model.path`."""
    prompts: Sequence[Prompt]
    encoding: EncodeReport
    metadata: EvaluationMetadata

    @property
    def evaluation_prompts(self) -> EvaluationPrompts:
        return EvaluationPrompts(self.prompts, self.settings.eval.num_samples)


def evaluate_model(resolved: Resolved, *, checkpoint: Path | None, out: Path | None) -> EvaluationSummary | None:
    """Samples the held-out prompts, judges the samples and writes them to `out`.

    Several hosts share the prompts; the first of them writes the file, and alone returns what came of it. An evaluation
    that was killed goes on from what it has left beside `out`, and one that is done is only read.

    Raises:
        InputError: settings, model, checkpoint, prompts or output file that cannot be used.
        RuntimeError: a judge that fails, where failures are to raise.
    """
    if out is not None:
        check_output_path(out)
    read = read_evaluation_input(resolved.settings, checkpoint)
    if out is not None:
        check_results_file(out, read.metadata)
    with ExitStack() as stack:
        entered = stack.enter_context(join_hosts(read.settings, out=out or Path("evaluation")))
        facts = {name: str(value) for name, value in read.metadata.facts.items()}
        # Only those that write meet in what writing takes.
        check_hosts_agree(resolved, {**facts, "--out": "not given" if out is None else "given"})
        start = time.perf_counter()
        judged = _load_finished_samples(read, out)
        if judged is None:
            judged = _generate_and_judge(read, out, stack, entered)
        figures = evaluation_estimates(judged, read.settings)
    if jax.process_index() > 0:
        return None
    return EvaluationSummary(
        read.metadata,
        num_prompts=len(read.prompts),
        num_dropped=read.encoding.dropped,
        num_samples=read.settings.eval.num_samples,
        metrics=figures,
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
        saved = PolicyCheckpoint.open(checkpoint)
        settings = pin_revisions(settings, saved.run)
    model = read_model_spec(settings)
    if saved is None:
        model = model.without_adapters
    else:
        saved.check_compatible(model)
    check_context_length(model.architecture, settings, path=settings.model.path)
    prompts, encoding = read_eval_prompts(settings, model.tokenizer)
    return EvaluationInput(settings, model, saved, prompts, encoding, _build_metadata(settings, model, saved, prompts))


def _build_metadata(
    settings: Settings, model: ModelSpec, saved_policy: PolicyCheckpoint | None, prompts: Sequence[Prompt]
) -> EvaluationMetadata:
    data, evaluation = settings.data, settings.eval
    judge = settings.reward.functions[0]
    digests = plugin_file_digests([judge])
    facts = {
        MODEL: model.files.fingerprint,
        "the tokenizer": model.tokenizer.fingerprint,
        CHECKPOINT: "none" if saved_policy is None else f"step {saved_policy.step}, {_checkpoint_digest(saved_policy)}",
        PROMPTS: describe_prompts(prompts),
        JUDGE: accuracy_function_name(settings.reward),
        JUDGE_FUNCTION: _judge_function_name(judge),
        JUDGE_FILE: next(iter(digests.values()), None),
        **({} if is_task_reward(judge.name) else {name: str(value_of(settings, name)) for name in JUDGE_SETTINGS}),
        "eval.num_samples": evaluation.num_samples,
        "eval.temperature": evaluation.temperature,
        # Greedy samples take no noise.
        **({"run.seed": settings.run.seed} if evaluation.temperature else {}),
        "rollout.max_new_tokens": settings.rollout.max_new_tokens,
        "model.dtype": settings.model.dtype,
    }
    source = data.eval_source or data.source
    where = f"{source} ({data.eval_split})" if source.startswith(("builtin:", "hf:")) else source
    return EvaluationMetadata(settings.model.path, None if saved_policy is None else saved_policy.step, where, facts)


def _judge_function_name(judge: RewardFunctionSettings) -> str | None:
    """Of a plug-in's function: in its file, whose content is another fact, or with the module. None: it is built in."""
    place, _, function = (judge.function or "").rpartition(":")
    return function if place.endswith(".py") else judge.function


def _checkpoint_digest(saved_policy: PolicyCheckpoint) -> str:
    """Of its weights, wherever they lie."""
    return hashlib.sha256(json.dumps(dict(saved_policy.checksums), sort_keys=True).encode()).hexdigest()[:16]


def _load_finished_samples(inputs: EvaluationInput, out: Path | None) -> Sequence[Sample] | None:
    """On the first host the samples of its file, where that holds them all; nothing on the others. Else None."""
    samples: Sequence[Sample] = ()
    is_whole = False
    with error_barrier():
        if out is not None and jax.process_index() == 0:
            found, is_whole = read_results(out, inputs.metadata, inputs.evaluation_prompts)
            samples = [sample for place in sorted(found) for sample in found[place]]
    if not max_over_hosts(np.asarray(is_whole)):
        return None
    if out is not None:
        # What a kill between the last two steps of `_write` leaves.
        with error_barrier():
            remove_parts(out)
    return samples


def _generate_and_judge(
    inputs: EvaluationInput, out: Path | None, stack: ExitStack, enter_phase: PhaseCallback
) -> Sequence[Sample]:
    """This host's samples; those of all hosts are in the file by then.

    What it opens, `stack` closes.
    """
    own, settings = host_shard(len(inputs.prompts)), inputs.settings
    with error_barrier():
        known = {} if out is None else _read_previous_samples(inputs, out)
        columns = eval_columns(settings, inputs.prompts)
        # Of the functions that training adds up, the first alone judges.
        judge = settings.reward.model_copy(update={"functions": settings.reward.functions[:1]})
        rewards = stack.enter_context(RewardFunctions(judge, columns, columns))
        part = None if out is None else stack.enter_context(open_part_file(out, inputs.metadata))
    missing = [place for place in own if place not in known]
    drawn = _generate_missing_samples(inputs, missing, part, stack, enter_phase)
    samples = [sample for place in own for sample in (known.get(place) or drawn[place])]
    # No limit: each call of a function has its own, and a host's whole share is one phase.
    enter_phase(WAIT_PHASE)
    step = inputs.metadata.step or 0
    judged = rewards.grade_held_out(samples, StepInfo(step, settings.run.steps))
    for line in gather_lines_to_first_host((*rewards.plug_in_summaries, *judged.notices)):
        print(line, file=sys.stderr)
    check_rewards(judged)
    if out is not None:
        wait_for_other_hosts(enter_phase)
        enter_phase("save")
        _write_results(out, inputs.metadata, judged.samples)
    return judged.samples


def _read_previous_samples(inputs: EvaluationInput, out: Path) -> SamplesByPrompt:
    """What this host sees of a killed evaluation, and of a file that is not as it should be, to be judged anew."""
    return {
        **read_drawn_samples(out, inputs.metadata, inputs.evaluation_prompts),
        **read_results(out, inputs.metadata, inputs.evaluation_prompts).samples,
    }


def _generate_missing_samples(
    inputs: EvaluationInput,
    missing_prompts: Sequence[int],
    part_file: PartFile | None,
    stack: ExitStack,
    enter_phase: PhaseCallback,
) -> SamplesByPrompt:
    """The samples that this host lacks; nothing is loaded where no host lacks any."""
    settings, num_asked = inputs.settings, len(host_shard(len(inputs.prompts)))
    if not max_over_hosts(np.asarray(len(missing_prompts))):
        return {}
    session = stack.enter_context(closing(Session.open(settings, inputs.model)))
    weights = load_decode_weights(inputs, session)
    session.compile_evaluation()
    drawn: dict[int, list[Sample]] = {}
    num_samples = settings.eval.num_samples
    with RolloutProgress(num_samples=len(missing_prompts) * num_samples, enabled=jax.process_index() == 0) as progress:
        if len(missing_prompts) < num_asked:
            progress.print_line(f"going on: {num_asked - len(missing_prompts)} of {num_asked} prompts are done")
        fresh = progress.track(generate_samples(session, weights, inputs.prompts, prompt_indices=missing_prompts))
        for sample in iterate_in_phase(part_file.write_through(fresh) if part_file else fresh, "evaluate", enter_phase):
            drawn.setdefault(sample.group_id, []).append(sample)
    return drawn


def load_decode_weights(inputs: EvaluationInput, session: Session) -> DecodeWeights:
    """What samples are drawn with; nothing else of the model stays on the devices. All hosts call it together."""
    params = session.load_params() if inputs.saved_policy is None else load_policy_params(inputs.saved_policy, session)
    weights = session.engine.to_decode_weights(params)
    session.free_frozen_params()
    return weights


def _write_results(out: Path, metadata: EvaluationMetadata, samples: Sequence[Sample]) -> None:
    """What it is of comes first: a file without that is taken for somebody else's."""
    with error_barrier():
        if jax.process_index() == 0:
            write_metadata(out, metadata)
    write_collectively(out, [sample_json_lines(samples, path=out)])
    with error_barrier():
        remove_parts(out)
