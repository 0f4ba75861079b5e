"""`grpo score --role reward`: computes the rewards of the samples in a file as training would."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from app.distributed.collective_files import gather_lines_to_first_host, gather_samples_to_first_host
from app.distributed.collectives import gather_bytes_to_first_host
from app.distributed.error_barrier import error_barrier
from app.distributed.host_consistency import check_hosts_agree
from app.distributed.host_shards import host_shard
from app.distributed.watchdog import WAIT_PHASE
from app.mesh import jax_startup
from app.records.jsonl import check_output_path, write_jsonl
from app.records.sample import Sample
from app.records.sample_json import TOKEN_IDS, LocatedSample, SampleRecord, sample_for_scoring, sample_to_record
from app.reward.aggregate import RewardedSamples, RewardFunctionCounts, merge_rewarded
from app.reward.builtin_tasks import check_answers
from app.reward.plugin import StepInfo
from app.reward.reward_functions import RewardFunctions
from app.reward.reward_outcome import RewardOutcome
from app.runtime.host_supervision import ignore_phase, join_hosts, wait_for_other_hosts
from app.runtime.inputs import data_columns, make_overlong_penalty
from app.runtime.reward_model import RewardModel, RewardModelSpec, read_reward_model_spec
from app.runtime.scoring import open_mesh
from app.stages.sample_reader import file_digest, read_records
from app.stages.sample_text import read_texts
from app.tracking.metrics import local_reward_counts
from settings import Resolved, Settings
from settings.errors import InputError


def score_rewards(resolved: Resolved, *, input: Path, out: Path) -> dict[str, Any] | None:
    """Adds rewards to every sample of `input`. Devices are started only for a reward model or several hosts.

    A single host scores the whole file at once; several hosts share its groups, whose samples may be anywhere in the
    file.

    Raises:
        InputError: the settings, model, samples or output file cannot be used.
        RuntimeError: a plug-in cannot be restarted, or a function failed while `reward.on_error` is `raise`.
    """
    check_output_path(out)
    settings = resolved.settings
    located = _read_located(input, settings)
    samples = [one.sample for one in located]
    if not samples:
        raise InputError(f"--input: {input} holds no samples")
    prompts = [s.prompt for s in samples]
    check_answers(prompts, [function.name for function in settings.reward.functions])
    model = read_reward_model_spec(settings)
    if model is not None:
        model.check_prompt(prompts[0])
    columns, penalty = data_columns(settings, prompts), make_overlong_penalty(settings)
    with ExitStack() as stack:
        rewards = stack.enter_context(RewardFunctions(settings.reward, columns, overlong=penalty))
        hosts, entered = [range(len(samples))], ignore_phase
        if model is not None or jax_startup.expects_other_hosts(settings.mesh):
            entered = stack.enter_context(join_hosts(settings, out=out))
            check_hosts_agree(resolved, {"--input": f"{len(samples)} samples, {file_digest(input)}"})
            hosts = sample_indices_by_host(samples)
        number = jax.process_index() if len(hosts) > 1 else 0
        if number == 0:
            _print_lines(rewards.plug_in_summaries)
        local_samples = [samples[i] for i in hosts[number]]
        entered("score")
        model_outcomes = None if model is None else _score_with_reward_model(settings, model, local_samples)
        # No time limit: each call of a function has its own, and this phase covers the host's whole share.
        entered(WAIT_PHASE)
        scored = rewards.compute_rewards(local_samples, StepInfo(), model_outcomes=model_outcomes)
        if len(hosts) > 1:
            wait_for_other_hosts(entered)
            entered("save")
            scored = _gather_scored(scored, hosts)
        if number == 0:
            _print_lines(scored.notices)
        if scored.fatal_error is not None:
            raise RuntimeError(scored.fatal_error)
        if len(hosts) == 1:
            write_jsonl(out, map(_scored_record, located, scored.samples))
        else:
            with error_barrier():
                if number == 0:
                    write_jsonl(out, map(_scored_record, located, scored.samples))
    if number > 0:
        return None
    return {"samples": len(samples), **_reward_metrics(scored, rewards.reward_names), "written to": str(out)}


def _read_located(input: Path, settings: Settings) -> list[LocatedSample]:
    """Reads all samples of a file, each with the texts that some reward reads; built-in ones read no prompt."""
    reward, located = settings.reward, list[LocatedSample]()
    reads_prompt = reward.model is not None or any(function.function for function in reward.functions)
    needed = {
        "completion": "a reward is of its text",
        **({"prompt": "plug-ins and reward models read it"} if reads_prompt else {}),
        **({TOKEN_IDS: "reward.overlong_buffer counts them"} if reward.overlong_buffer is not None else {}),
    }
    for index, (where, record) in enumerate(read_records(input)):
        texts = read_texts(record, where=where)
        for name, reason in needed.items():
            if texts.get(name) is None:
                raise InputError(f"{where}: missing {name}; {reason}; add the field or remove the line")
        sample = sample_for_scoring(texts, where=where, index=index, names=SampleRecord.model_fields)
        located.append(LocatedSample(where, record, sample))
    return located


def _scored_record(one: LocatedSample, scored: Sample) -> Mapping[str, Any]:
    """Returns the record as it was read, but for the fields that scoring has added, changed or removed."""
    before, after = sample_to_record(one.sample), sample_to_record(scored)
    changed = {name: value for name, value in after.items() if name not in before or before[name] != value}
    kept = {name: value for name, value in one.record.items() if name in after or name not in before}
    return kept | changed


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def sample_indices_by_host(samples: Sequence[Sample]) -> list[Sequence[int]]:
    """Returns the indices of each host's samples in the file: whole groups, about the same number on each host."""
    groups: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(place)
    members = list(groups.values())
    runs = [host_shard(len(members), host=host) for host in range(jax.process_count())]
    return [sorted(place for group in run for place in members[group]) for run in runs]


def _score_with_reward_model(
    settings: Settings, model: RewardModelSpec, samples: Sequence[Sample]
) -> list[RewardOutcome]:
    """Returns the reward model's outcomes for this host's samples."""
    outcomes, _ = RewardModel.load(settings, model, open_mesh(settings)).score(samples)
    return outcomes


def _gather_scored(local: RewardedSamples, hosts: Sequence[Sequence[int]]) -> RewardedSamples:
    """Returns all samples on the first host, in the order of the file, and only the local ones on the others.

    Raises:
        RuntimeError: some host failed. Every host raises it.
    """
    with error_barrier():
        if local.fatal_error is not None:
            raise RuntimeError(local.fatal_error)
    counts = {name: asdict(count) for name, count in local.function_counts.items()}
    sent = gather_bytes_to_first_host(json.dumps([counts, local.num_without_reward]).encode())
    notices = gather_lines_to_first_host(local.notices)
    samples = gather_samples_to_first_host(local.samples)
    if jax.process_index() > 0:
        return local
    parts = []
    for host_counts, num_without_reward in map(json.loads, sent):
        function_counts = {name: RewardFunctionCounts(**count) for name, count in host_counts.items()}
        parts.append(RewardedSamples([], function_counts, num_without_reward, (), None))
    in_order = sorted(zip((place for places in hosts for place in places), samples, strict=True), key=itemgetter(0))
    return replace(merge_rewarded(parts), samples=[sample for _, sample in in_order], notices=tuple(notices))


def _reward_metrics(scored: RewardedSamples, names: Sequence[str]) -> dict[str, Any]:
    """Returns means over the samples with a value, None if there is none, and the same counts as in training."""

    def mean(values: Sequence[float]) -> float | None:
        return float(np.mean(values)) if values else None

    kept = [s for s in scored.samples if s.reward is not None]
    values = {name: [s.rewards[name] for s in kept if s.rewards and name in s.rewards] for name in names}
    counts, extras = local_reward_counts(scored)
    figures: dict[str, Any] = {
        **{f"reward/{name}/mean": mean(function_values) for name, function_values in values.items()},
        "reward/mean": mean([s.reward or 0.0 for s in kept]),
        **{name: total / count for name, (total, count) in extras.items()},
        **counts,
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
