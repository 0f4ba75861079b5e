"""`grpo evaluate`: evaluates a model or a checkpoint on held-out prompts, exactly as training does."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from app.checkpoint.policy_weights import PolicySource, read_policy_source
from app.checkpoint.saved_policy import PolicyCheckpoint
from app.distributed.collective_files import (
    gather_lines_to_first_host,
    host_slice,
    sample_json_lines,
    write_collectively,
)
from app.distributed.collectives import max_over_hosts
from app.distributed.error_barrier import error_barrier
from app.distributed.host_consistency import check_hosts_agree
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
from app.evaluation.printed_summary import EvaluationSummary
from app.evaluation.results_file import (
    EvaluationPrompts,
    SamplesByPrompt,
    check_results_file,
    drawn_samples,
    open_part_file,
    read_results,
)
from app.prompts.encode import EncodeReport
from app.records.identity import plugin_file_digests, prompts_digest
from app.records.jsonl import check_output_path
from app.records.partial_samples import PartFile, remove_parts
from app.records.sample import Prompt, Sample
from app.reward.builtin_tasks import is_task_reward
from app.reward.plugin import StepInfo
from app.reward.reward_functions import RewardFunctions, accuracy_function_name
from app.runtime.environments import environment_facts
from app.runtime.health_checks import check_rewards
from app.runtime.host_supervision import PhaseCallback, iterate_in_phase, join_hosts, wait_for_other_hosts
from app.runtime.inputs import eval_columns, make_environment_reward, read_eval_prompts
from app.runtime.model_spec import ModelSpec
from app.runtime.session import Session
from app.tracking.rollout_progress import RolloutProgress
from settings import Resolved, Settings
from settings.loading.fields import value_of


@dataclass(frozen=True)
class EvaluationInput:
    """Everything an evaluation reads, checked before any device is used."""

    source: PolicySource
    prompts: Sequence[Prompt]
    encoding: EncodeReport
    metadata: EvaluationMetadata

    @property
    def settings(self) -> Settings:
        return self.source.settings

    @property
    def evaluation_prompts(self) -> EvaluationPrompts:
        return EvaluationPrompts(self.prompts, self.settings.eval.num_samples)


def evaluate_model(resolved: Resolved, *, checkpoint: Path | None, out: Path | None) -> EvaluationSummary | None:
    """Generates answers to the held-out prompts, judges them and writes them to `out`.

    Several hosts share the prompts; the first one writes the file and is the only one to return a summary. A killed
    evaluation continues from the files next to `out`; the results of a finished one are only read.

    Raises:
        InputError: settings, model, checkpoint, prompts or output file cannot be used.
        RuntimeError: the judge failed and `reward.on_error` is `raise`.
    """
    if out is not None:
        check_output_path(out)
    inputs = read_evaluation_input(resolved.settings, checkpoint)
    if out is not None:
        check_results_file(out, inputs.metadata)
    with ExitStack() as stack:
        enter_phase = stack.enter_context(join_hosts(inputs.settings, out=out or Path("evaluation")))
        # If only some hosts wrote, they and the others would wait for each other.
        check_hosts_agree(resolved, {**inputs.metadata.facts, "--out": "not given" if out is None else "given"})
        start = time.perf_counter()
        samples = _load_finished_samples(inputs, out)
        if samples is None:
            samples = _generate_and_judge(inputs, out, stack, enter_phase)
        metrics = evaluation_estimates(samples, inputs.settings)
    if jax.process_index() > 0:
        return None
    return EvaluationSummary(
        inputs.metadata,
        num_prompts=len(inputs.prompts),
        num_dropped=inputs.encoding.dropped,
        num_samples=inputs.settings.eval.num_samples,
        metrics=metrics,
        seconds=time.perf_counter() - start,
        out=out,
    )


def read_evaluation_input(settings: Settings, checkpoint: Path | None) -> EvaluationInput:
    """Reads the checkpoint, model and held-out prompts. Raises InputError if one of them cannot be used."""
    source = read_policy_source(settings, checkpoint)
    prompts, encoding = read_eval_prompts(source.settings, source.model.tokenizer)
    return EvaluationInput(source, prompts, encoding, _build_metadata(*source, prompts))


def _build_metadata(
    settings: Settings, model: ModelSpec, saved_policy: PolicyCheckpoint | None, prompts: Sequence[Prompt]
) -> EvaluationMetadata:
    data, evaluation, env = settings.data, settings.eval, settings.env
    judge = next(iter(settings.reward.functions), None)
    path = env.source if judge is None else judge.function
    # A plug-in in a file is identified by its name and the file's content, one in a module by its full name.
    module, _, function = (path or "").rpartition(":")
    judge_settings = () if judge is None or is_task_reward(judge.name) else JUDGE_SETTINGS
    facts = {
        MODEL: model.files.fingerprint,
        "the tokenizer": model.tokenizer.fingerprint,
        CHECKPOINT: "none" if saved_policy is None else saved_policy.describe(),
        PROMPTS: prompts_digest(prompts),
        JUDGE: accuracy_function_name(settings.reward),
        JUDGE_FUNCTION: function if module.endswith(".py") else path,
        JUDGE_FILE: next(iter(plugin_file_digests("reward.functions", [path]).values()), None),
        **{name: str(value_of(settings, name)) for name in judge_settings},
        "eval.num_samples": evaluation.num_samples,
        "eval.temperature": evaluation.temperature,
        # Greedy decoding does not depend on the seed.
        **({"run.seed": settings.run.seed} if evaluation.temperature else {}),
        "rollout.max_new_tokens": settings.rollout.max_new_tokens,
        **({"rollout.stop": list(settings.rollout.stop)} if settings.rollout.stop else {}),
        "model.dtype": settings.model.dtype,
        **settings.rollout.rounding,
        **environment_facts(env),
    }
    source = data.eval_source or data.sources[0].source
    dataset = f"{source} ({data.eval_split})" if source.startswith(("builtin:", "hf:")) else source
    return EvaluationMetadata(settings.model.path, None if saved_policy is None else saved_policy.step, dataset, facts)


def _load_finished_samples(inputs: EvaluationInput, out: Path | None) -> Sequence[Sample] | None:
    """Returns the stored samples on the first host and none on other hosts; None without a complete file."""
    samples: Sequence[Sample] = ()
    is_complete = False
    with error_barrier():
        if out is not None and jax.process_index() == 0:
            stored, is_complete = read_results(out, inputs.metadata, inputs.evaluation_prompts)
            samples = [sample for place in sorted(stored) for sample in stored[place]]
    if not max_over_hosts(np.asarray(is_complete)):
        return None
    if out is not None:
        # The program may have been killed after it wrote the results and before it removed the parts.
        with error_barrier():
            remove_parts(out)
    return samples


def _generate_and_judge(
    inputs: EvaluationInput, out: Path | None, stack: ExitStack, enter_phase: PhaseCallback
) -> Sequence[Sample]:
    """Returns the judged samples of this host's prompts, after writing those of all hosts to the results file.

    `stack` closes whatever is opened here.
    """
    shard, settings = host_slice(len(inputs.prompts)), inputs.settings
    with error_barrier():
        previous: SamplesByPrompt = {}
        if out is not None:
            drawn = drawn_samples(out, inputs.metadata).read(inputs.prompts, num_samples=settings.eval.num_samples)
            # Samples of a killed evaluation, and those of a results file that is incomplete or to be judged again.
            previous = {
                **inputs.evaluation_prompts.complete_samples(drawn.values()),
                **read_results(out, inputs.metadata, inputs.evaluation_prompts).samples,
            }
        columns = eval_columns(settings, inputs.prompts)
        # Training adds up all reward functions; only the first one judges.
        judge = settings.reward.model_copy(update={"functions": settings.reward.functions[:1]})
        environment = make_environment_reward(settings)
        rewards = stack.enter_context(
            RewardFunctions(judge, settings.plugins, columns, columns, environment=environment)
        )
        part = None if out is None else stack.enter_context(open_part_file(out, inputs.metadata))
    missing = [place for place in shard if place not in previous]
    generated = _generate_missing_samples(inputs, missing, part, stack, enter_phase)
    samples = [sample for place in shard for sample in (previous.get(place) or generated[place])]
    # This phase has no time limit: a host judges its whole shard in it, and each call of a function has its own limit.
    enter_phase(WAIT_PHASE)
    judged = rewards.grade_held_out(samples, StepInfo(inputs.metadata.step or 0, settings.run.steps))
    for line in gather_lines_to_first_host((*rewards.plug_in_summaries, *judged.notices)):
        print(line, file=sys.stderr)
    check_rewards(judged)
    if out is not None:
        wait_for_other_hosts(enter_phase)
        enter_phase("save")
        with error_barrier():
            if jax.process_index() == 0:
                # Written before the results: a results file without metadata would be refused as another evaluation's.
                write_metadata(out, inputs.metadata)
        write_collectively(out, [sample_json_lines(judged.samples, path=out)])
        with error_barrier():
            remove_parts(out)
    return judged.samples


def _generate_missing_samples(
    inputs: EvaluationInput,
    missing_prompts: Sequence[int],
    part_file: PartFile | None,
    stack: ExitStack,
    enter_phase: PhaseCallback,
) -> SamplesByPrompt:
    """Generates the samples that this host lacks; loads no model if no host lacks any."""
    settings, num_prompts = inputs.settings, len(host_slice(len(inputs.prompts)))
    if not max_over_hosts(np.asarray(len(missing_prompts))):
        return {}
    session = stack.enter_context(closing(Session.open(settings, inputs.source.model, generates="evaluations")))
    session.open_generators()
    weights = inputs.source.load_decode_weights(session)
    session.compile_evaluation()
    generated: dict[int, list[Sample]] = {}
    num_samples = len(missing_prompts) * settings.eval.num_samples
    with RolloutProgress(num_samples=num_samples, enabled=jax.process_index() == 0) as progress:
        for note in session.generation_notes:
            progress.print_line(note)
        if len(missing_prompts) < num_prompts:
            progress.print_line(f"continuing: {num_prompts - len(missing_prompts)} of {num_prompts} prompts are done")
        fresh = progress.track(generate_samples(session, weights, inputs.prompts, prompt_indices=missing_prompts))
        for sample in iterate_in_phase(part_file.write_through(fresh) if part_file else fresh, "evaluate", enter_phase):
            generated.setdefault(sample.group_id, []).append(sample)
    return generated
