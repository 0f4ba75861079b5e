"""`grpo evaluate`: evaluates a model or a checkpoint on held-out prompts, exactly as training does."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import jax

from app.checkpoint.saved_policy import PolicySource, read_policy_source
from app.distributed.collective_files import (
    gather_lines_to_process_0,
    host_slice,
    sample_json_lines,
    write_collectively,
)
from app.distributed.collectives import error_barrier, is_process_0
from app.distributed.host_consistency import check_hosts_agree
from app.distributed.watchdog import WAIT_PHASE
from app.evaluation.evaluator import evaluation_estimates, generate_samples
from app.evaluation.metadata import (
    JUDGE,
    JUDGE_FILE,
    JUDGE_FUNCTION,
    JUDGE_SETTINGS,
    EvaluationMetadata,
    write_metadata,
)
from app.evaluation.printed_summary import EvaluationSummary
from app.records.identity import plugin_file_digests
from app.records.jsonl import check_output_path
from app.records.sample import Prompt, Sample
from app.reward.builtin_tasks import is_task_reward
from app.reward.plugin import StepInfo
from app.reward.reward_functions import accuracy_function_name
from app.runtime.health_checks import check_rewards
from app.runtime.host_supervision import PhaseCallback, iterate_in_phase, join_hosts, wait_for_other_hosts
from app.runtime.inputs import eval_columns, make_rewards, read_eval_prompts
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from app.tracking.console import RolloutProgress
from settings import Resolved
from settings.loading.fields import value_of


def evaluate_model(resolved: Resolved, *, checkpoint: Path | None, out: Path | None) -> EvaluationSummary | None:
    """Generates answers to the held-out prompts, grades them, and writes them to `out` unless that is None.

    Several hosts share the prompts; process 0 writes the file and is the only one to return a summary.

    Raises:
        InputError: settings, model, checkpoint, prompts or output file cannot be used.
        RuntimeError: the judge failed and `reward.on_error` is `raise`.
    """
    with error_barrier():
        if out is not None and is_process_0():
            check_output_path(out, "--out")
        source = read_policy_source(resolved.settings, checkpoint)
        settings = source.settings
        prompts, encoding = read_eval_prompts(settings, source.model.tokenizer)
        metadata = _build_metadata(source, prompts)
    with ExitStack() as stack:
        enter_phase = stack.enter_context(join_hosts(settings, out=out or Path("evaluation")))
        # If only some hosts wrote, they and the others would wait for each other.
        check_hosts_agree(resolved, {**metadata.facts, "--out": "not given" if out is None else "given"})
        start = time.perf_counter()
        with error_barrier():
            columns = eval_columns(settings, prompts)
            # Training sums all reward functions, but only the first one grades evaluations.
            judge = settings.reward.model_copy(update={"functions": settings.reward.functions[:1]})
            of_judge = settings.model_copy(update={"reward": judge})
            rewards = stack.enter_context(make_rewards(of_judge, columns, columns))
        samples = _generate(source, prompts, enter_phase)
        # This phase has no time limit: a host grades its whole shard in it, and each call has its own limit.
        enter_phase(WAIT_PHASE)
        judged = rewards.grade_held_out(samples, StepInfo(metadata.step or 0, settings.run.steps))
        for line in gather_lines_to_process_0((*rewards.plug_in_summaries, *judged.notices)):
            print(line, file=sys.stderr)
        check_rewards(judged)
        if out is not None:
            wait_for_other_hosts(enter_phase)
            enter_phase("save")
            with error_barrier():
                if jax.process_index() == 0:
                    # Written before the samples, which could not be identified without it.
                    write_metadata(out, metadata)
            write_collectively(out, [sample_json_lines(judged.samples, path=out)])
        metrics = evaluation_estimates(judged.samples, settings)
    if jax.process_index() > 0:
        return None
    return EvaluationSummary(
        metadata,
        num_prompts=len(prompts),
        num_dropped=encoding.num_dropped,
        num_samples=settings.eval.num_samples,
        metrics=metrics,
        seconds=time.perf_counter() - start,
        out=out,
    )


def _generate(source: PolicySource, prompts: Sequence[Prompt], enter_phase: PhaseCallback) -> list[Sample]:
    """Returns the samples of this host's prompts, and frees the model's device memory."""
    scoring = ScoringSession.open(source.settings, source.model)
    with closing(Session.open(scoring, generates="evaluations")) as session:
        num_samples = len(host_slice(len(prompts))) * source.settings.eval.num_samples
        with RolloutProgress(num_samples=num_samples, enabled=jax.process_index() == 0) as progress:
            weights = source.load_decode_weights(session)
            session.compile_evaluation()
            progress.follow(session)
            samples = generate_samples(session, weights, prompts)
            return [*iterate_in_phase(samples, "evaluate", enter_phase)]


def _build_metadata(source: PolicySource, prompts: Sequence[Prompt]) -> EvaluationMetadata:
    settings, saved = source.settings, source.saved_policy
    data, evaluation = settings.data, settings.eval
    judge = next(iter(settings.reward.functions), None)
    path = settings.env.source if judge is None else judge.function
    # A plug-in in a file is identified by its name and the file's content, one in a module by its full name.
    module, _, function = (path or "").rpartition(":")
    judge_settings = () if judge is None or is_task_reward(judge.name) else JUDGE_SETTINGS
    facts = {
        **source.identity(prompts),
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
        **settings.rollout.rounding,
    }
    name = data.eval_source or data.sources[0].source
    dataset = f"{name} ({data.eval_split})" if name.startswith(("builtin:", "hf:")) else name
    return EvaluationMetadata(settings.model.path, None if saved is None else saved.step, dataset, facts)
