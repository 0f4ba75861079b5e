"""One room at a time: what `grpo rollout`, `grpo score` and `grpo inspect-mesh` do."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from app.flow import Prompt, Sample
from app.jsonl import check_output, read_jsonl, write_jsonl
from app.mesh import topology
from app.mesh.inspect import MeshReport, mesh_report
from app.mesh.placement import num_row_shards
from app.policy.architecture import Architecture
from app.policy.decoder import by_path
from app.policy.kv_cache import DecodeWeights
from app.prompts.dataset import load_dataset
from app.prompts.encode import encode_prompts
from app.prompts.source import load_training_data
from app.reward.plugin import Moment
from app.reward.rewards import Rewards
from app.reward.tasks import check_answers
from app.reward.weighing import Scored
from app.sample_records import sample_from_record, sample_to_record
from app.training.cutting import wire_role
from app.training.metrics import host_counts
from app.training.session import ModelInput, Session, check_context, read_model_input
from app.training.training_input import data_columns
from settings import Resolved, Settings
from settings.errors import InputError
from settings.schema import ScoredRole


def rollout(resolved: Resolved, *, prompts: Path | None, limit: int | None, out: Path) -> dict[str, Any]:
    """Samples every prompt (the first `limit`) `rollout.group_size` times and writes the records to `out`.

    Raises:
        InputError: settings, model, prompts or output file that cannot be used.
    """
    settings = resolved.settings
    check_output(out)
    model = read_model_input(settings)
    check_context(model.architecture, settings)
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
    session = _open_on_one_host(settings, model)
    weights = session.engine.weights(session.load_params())
    counter = SampleCounter()
    start = time.perf_counter()
    write_jsonl(out, (sample_to_record(s) for s in counter.count(_sampled(session, weights, encoded))))
    seconds = time.perf_counter() - start
    return {
        "prompts": len(encoded),
        "dropped prompts": report.dropped,
        **counter.figures(),
        "seconds": round(seconds, 2),
        "tokens per second": round(counter.num_tokens / seconds, 1),
        "written to": str(out),
    }


def _sampled(session: Session, weights: DecodeWeights, prompts: Sequence[Prompt]) -> Iterator[Sample]:
    """Batches of `rollout.prompts_per_step` prompts, one after another."""
    size = session.settings.rollout.prompts_per_step
    for first in range(0, len(prompts), size):
        start = time.perf_counter()
        samples = session.sample(weights, prompts[first : first + size], policy_version=0, first_group_id=first)
        seconds = time.perf_counter() - start
        yield from (replace(s, elapsed_s=seconds) for s in samples)


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


def score(resolved: Resolved, *, input: Path, out: Path, role: ScoredRole | Literal["reward"]) -> dict[str, Any]:
    """Adds one role's field to every sample of a file: `policy_logprobs`, `reference_logprobs` or rewards.

    Shapes follow from the file and the model's context alone; `rollout.temperature` is the sampler's.

    Raises:
        InputError: settings, model or samples that cannot be used.
    """
    check_output(out)
    samples = [sample_from_record(record, where=f"{input}:{line}") for line, record in read_jsonl(input)]
    if not samples:
        raise InputError(f"--input: {input} holds no samples")
    scored, figures = _with_rewards(resolved, samples) if role == "reward" else _with_logprobs(resolved, samples, role)
    write_jsonl(out, map(sample_to_record, scored))
    return {"samples": len(scored), **figures, "written to": str(out)}


def _with_rewards(resolved: Resolved, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, Any]]:
    settings = resolved.settings
    prompts = [s.prompt for s in samples]
    check_answers(prompts, [function.name for function in settings.reward.functions])
    with Rewards(settings.reward, data_columns(settings, prompts)) as rewards:
        for report in rewards.reports:
            print(report, file=sys.stderr)
        scored = rewards.score(samples, Moment())
        for notice in scored.notices:
            print(notice, file=sys.stderr)
    if scored.problem is not None:
        raise RuntimeError(scored.problem)
    return scored.samples, _reward_figures(scored)


def _reward_figures(scored: Scored) -> dict[str, Any]:
    """Means over the samples that have a value, None where none has, and what training counts. Starts no device."""

    def mean(values: Sequence[float]) -> float | None:
        return float(np.mean(values)) if values else None

    kept = [s for s in scored.samples if s.reward is not None]
    values = {name: [s.rewards[name] for s in kept if s.rewards and name in s.rewards] for name in scored.tallies}
    counts, extras = host_counts(scored)
    figures: dict[str, Any] = {
        **{f"reward/{name}/mean": mean(of_function) for name, of_function in values.items()},
        "reward/mean": mean([s.reward or 0.0 for s in kept]),
        **{name: total / count for name, (total, count) in extras.items()},
        **counts,
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def _with_logprobs(
    resolved: Resolved, samples: Sequence[Sample], role: ScoredRole
) -> tuple[list[Sample], dict[str, Any]]:
    settings = resolved.settings
    model = read_model_input(settings)
    check_samples(samples, model.architecture)
    session = _open_on_one_host(settings, model)
    longest = max(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
    cut = wire_role(settings, role, model.architecture, longest=longest)
    scored, _ = session.score(session.load_params(), samples, role, cut=cut)
    differences = np.abs(np.concatenate([getattr(s, f"{role}_logprobs") - s.behavior_logprobs for s in scored]))
    return scored, {
        "tokens": int(differences.size),
        "mean |logprob - behavior|": float(differences.mean()) if differences.size else 0.0,
        "max |logprob - behavior|": float(differences.max(initial=0.0)),
    }


def check_samples(samples: Sequence[Sample], architecture: Architecture) -> None:
    """Raises InputError where a sample cannot have come from this model."""
    for sample in samples:
        ids = np.concatenate([sample.prompt.token_ids, sample.completion_ids])
        if len(ids) > architecture.max_positions:
            raise InputError(
                f"--input: sample {sample.uid} has {len(ids)} tokens, the model's context {architecture.max_positions}"
            )
        if ids.max(initial=0) >= architecture.vocab_size:
            raise InputError(
                f"--input: sample {sample.uid} holds token {ids.max()}, the model's vocabulary ends at "
                f"{architecture.vocab_size - 1}; was it sampled with another tokenizer?"
            )


def _open_on_one_host(settings: Settings, model: ModelInput) -> Session:
    topology.start(settings.mesh)
    if jax.process_count() > 1:
        raise InputError(
            f"mesh.num_processes: rollout and score work on one host, and {jax.process_count()} have joined; "
            "leave mesh.coordinator_address unset"
        )
    return Session.open(settings, model)


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
