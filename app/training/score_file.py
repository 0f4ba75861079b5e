"""`grpo score`: adds one role's field to every sample of a file."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from app.batching.micro_batches import Cut, EqualShapes, FixedRows, PackedRows
from app.batching.plan import fixed_shape
from app.flow import Sample
from app.jsonl import check_output, read_jsonl, write_jsonl
from app.mesh.placement import to_device_memory, to_host_memory
from app.policy.architecture import Architecture
from app.policy.decoder import Params
from app.reward.outcome import Outcome
from app.reward.plugin import Moment
from app.reward.rewards import Rewards
from app.reward.tasks import check_answers
from app.reward.weighing import Scored
from app.sample_records import sample_from_record, sample_to_record
from app.training.cutting import Longest, num_tokens_behind, wire_role
from app.training.metrics import CompilationCounter, host_counts, peak_memory_bytes
from app.training.packing_check import check_packing
from app.training.reward_role import RewardModel, RewardModelInput, read_reward_model
from app.training.sample_file import WINDOW, Extent, SampleFile, check_quota
from app.training.session import (
    Session,
    open_mesh,
    open_on_one_host,
    read_critic_input,
    read_model_input,
    start_on_one_host,
)
from app.training.training_input import data_columns, overlong_penalty
from app.training.wiring import check_host_memory
from settings import Resolved, Settings
from settings.errors import InputError
from settings.schema import ScoredRole

NUM_PACKED = 3
"""Samples of the file that `--check-packing` puts into one row."""


def score(
    resolved: Resolved, *, input: Path, out: Path, role: ScoredRole | Literal["reward"], checks_packing: bool = False
) -> dict[str, Any]:
    """Adds one role's field to every sample of `input`, and returns the figures to be shown.

    Args:
        checks_packing: first see whether samples of the file score in a shared row as they do alone.

    Raises:
        InputError: settings, model, samples or output file that cannot be used.
        RuntimeError: samples of a row that see each other, or a reward function that could not be called any more.
    """
    check_output(out)
    if role != "reward":
        return score_logprobs(resolved, input=input, out=out, role=role, checks_packing=checks_packing)
    if checks_packing:
        raise InputError("--check-packing asks the model, and --role reward runs none; leave one of them out")
    return score_rewards(resolved, input=input, out=out)


def score_logprobs(
    resolved: Resolved, *, input: Path, out: Path, role: ScoredRole, checks_packing: bool, window: int = WINDOW
) -> dict[str, Any]:
    """As `score`, of logprobs or values. The file is read twice, first to check every line before any device work.

    Then it goes window by window. Shapes follow from the longest sample of the file and the model's context alone;
    `rollout.temperature` is the sampler's.

    Args:
        window: samples in memory at once.
    """
    settings = resolved.settings
    if checks_packing and role == "critic":
        raise InputError("--check-packing compares logprobs, and --role critic has none; take --role policy for it")
    model = read_model_input(settings)
    critic = read_critic_input(settings, model) if role == "critic" else None
    architecture = (critic or model).architecture
    file = SampleFile(input, architecture)
    extent, drawn = file.check(num_drawn=NUM_PACKED if checks_packing else 0, seed=settings.run.seed)
    check_quota(resolved, f"score.{role}", extent.longest + num_tokens_behind(settings, role), where=extent.longest_at)
    session = open_on_one_host(settings, model, critic)
    start = time.perf_counter()
    params = session.critic.load_params(session.mesh) if session.critic else session.load_params()
    params = jax.block_until_ready(params)
    figures: dict[str, Any] = {"samples": extent.num_samples, "loading seconds": round(time.perf_counter() - start, 2)}
    if drawn:
        # Of a file with fewer samples than a row is to hold, some stand in it twice.
        packed = (drawn * NUM_PACKED)[:NUM_PACKED]
        figures["max |packed - alone|"] = check_packing(session, params, packed)
    passes = Passes(session, params, role, cut=_cut(settings, role, architecture, extent))
    del params
    with closing(CompilationCounter()) as compilations:
        scored = passes.scored(file.windows(window), num_samples=extent.num_samples)
        write_jsonl(out, map(sample_to_record, scored))
        figures |= passes.figures(compilations)
    return {**figures, "written to": str(out)}


def _cut(settings: Settings, role: ScoredRole, architecture: Architecture, extent: Extent) -> FixedRows | PackedRows:
    """The same rows for every window."""
    cut = wire_role(settings, role, architecture, Longest(extent.longest))
    if isinstance(cut, FixedRows):
        behind = num_tokens_behind(settings, role)
        return replace(cut, shape=fixed_shape(extent.longest + behind, extent.longest_completion + behind))
    return cut


class Passes:
    """Scores a file window by window, and keeps count of what that takes."""

    def __init__(self, session: Session, params: Params, role: ScoredRole, *, cut: FixedRows | PackedRows) -> None:
        self._session = session
        self._role: ScoredRole = role
        self._cut = cut
        # A role that waits for its turn gives way; here it only waits for the next window.
        waits_outside = role == "reference" and session.settings.score.reference.offload
        if waits_outside:
            check_host_memory(session.settings, session.mesh)
        self._params = to_host_memory(params) if waits_outside else params
        self._shapes: set[tuple[int, ...]] = set()
        self._totals: defaultdict[str, float] = defaultdict(int)
        self._seconds = self._largest = 0.0

    def scored(self, windows: Iterable[Sequence[Sample]], *, num_samples: int) -> Iterator[Sample]:
        """The samples of all windows, in order, with the role's logprobs."""
        done = 0
        for samples in windows:
            done += len(samples)
            cut = self._cut if done == num_samples else EqualShapes(self._cut)
            start = time.perf_counter()
            scored, pieces = self._session.score(to_device_memory(self._params), samples, self._role, cut=cut)
            self._seconds += time.perf_counter() - start
            self._count(scored, pieces)
            yield from scored
            if len(samples) < num_samples:
                print(f"scored {done:,} of {num_samples:,} samples", file=sys.stderr)

    def _count(self, scored: Sequence[Sample], cut: Cut) -> None:
        if self._role != "critic":
            differences = np.abs(np.concatenate([self._logprobs(s) - s.behavior_logprobs for s in scored]))
            self._largest = max(self._largest, float(differences.max(initial=0.0)))
            self._totals["differences"] += differences.size
            self._totals["difference"] += float(differences.sum(dtype=np.float64))
        figures = cut.figures()
        for name, count in {
            "tokens": sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in scored),
            "real tokens": figures["real_tokens"],
            "computed tokens": figures["computed_tokens"],
            "micro-batches": figures["num_micro_batches"],
        }.items():
            self._totals[name] += count
        plan = cut.own
        scanned = (plan.num_micro_batches,) if self._session.settings.score.of(self._role).strategy == "scan" else ()
        self._shapes |= {(len(one.rows), *astuple(one.shape), *scanned) for one in plan.micro_batches}

    def _logprobs(self, sample: Sample) -> np.ndarray:
        return getattr(sample, f"{self._role}_logprobs")

    def figures(self, compilations: CompilationCounter) -> dict[str, Any]:
        """Tokens, shapes and seconds of all passes. Speed leaves compilation out."""
        total = self._totals
        real, computed = total["real tokens"], total["computed tokens"]
        seconds = self._seconds - compilations.seconds
        return {
            "tokens": total["tokens"],
            "real tokens": real,
            "padded tokens": computed - real,
            "fill": round(real / computed, 4),
            "micro-batches": total["micro-batches"],
            "shapes compiled": len(self._shapes),
            "compilations": compilations.take(),
            "compiling seconds": round(compilations.seconds, 2),
            "seconds": round(seconds, 3),
            "tokens/s": round(total["tokens"] / seconds, 1),
            "peak memory MiB": round(peak_memory_bytes() / 2**20, 1),
            **self._against_the_sampler(),
        }

    def _against_the_sampler(self) -> dict[str, float]:
        if self._role == "critic":
            return {}
        return {
            "mean |logprob - behavior|": self._totals["difference"] / max(self._totals["differences"], 1),
            "max |logprob - behavior|": self._largest,
        }


def score_rewards(resolved: Resolved, *, input: Path, out: Path) -> dict[str, Any]:
    """As `score`. The functions see the whole file in one call, since a group's samples may stand anywhere in it."""
    settings = resolved.settings
    samples = [sample_from_record(record, where=f"{input}:{line}") for line, record in read_jsonl(input)]
    if not samples:
        raise InputError(f"--input: {input} holds no samples")
    prompts = [s.prompt for s in samples]
    check_answers(prompts, [function.name for function in settings.reward.functions])
    model = read_reward_model(settings)
    if model is not None:
        model.check_prompt(prompts[0])
    with Rewards(settings.reward, data_columns(settings, prompts), overlong=overlong_penalty(settings)) as rewards:
        for report in rewards.reports:
            print(report, file=sys.stderr)
        of_model = None if model is None else _asked(settings, model, samples)
        scored = rewards.score(samples, Moment(), of_model=of_model)
        for notice in scored.notices:
            print(notice, file=sys.stderr)
    if scored.problem is not None:
        raise RuntimeError(scored.problem)
    write_jsonl(out, map(sample_to_record, scored.samples))
    return {"samples": len(samples), **_reward_figures(scored, rewards.names), "written to": str(out)}


def _asked(settings: Settings, model: RewardModelInput, samples: Sequence[Sample]) -> list[Outcome]:
    """What the reward model says of each sample. Starts the devices."""
    start_on_one_host(settings)
    outcomes, _ = RewardModel.load(settings, model, open_mesh(settings)).outcomes(samples)
    return outcomes


def _reward_figures(scored: Scored, names: Sequence[str]) -> dict[str, Any]:
    """Means over the samples that have a value, None where none has, and what training counts. Starts no device."""

    def mean(values: Sequence[float]) -> float | None:
        return float(np.mean(values)) if values else None

    kept = [s for s in scored.samples if s.reward is not None]
    values = {name: [s.rewards[name] for s in kept if s.rewards and name in s.rewards] for name in names}
    counts, extras = host_counts(scored)
    figures: dict[str, Any] = {
        **{f"reward/{name}/mean": mean(of_function) for name, of_function in values.items()},
        "reward/mean": mean([s.reward or 0.0 for s in kept]),
        **{name: total / count for name, (total, count) in extras.items()},
        **counts,
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
