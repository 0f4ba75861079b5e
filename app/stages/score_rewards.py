"""`grpo score --role reward`: computes the rewards of the samples in a file as training would."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from app.distributed.collective_files import gather_lines_to_process_0, gather_samples_to_process_0, host_slice
from app.distributed.collectives import error_barrier, gather_bytes_to_process_0
from app.distributed.host_consistency import check_hosts_agree
from app.distributed.watchdog import WAIT_PHASE
from app.mesh import jax_startup
from app.records.jsonl import check_output_path, write_jsonl
from app.records.sample import Sample
from app.records.sample_json import REWARD_FIELDS, TOKEN_IDS, LocatedSample, sample_for_scoring, sample_to_record
from app.reward.aggregate import NO_REWARD_FINISH_REASON, RewardedSamples, RewardFunctionCounts, merge_rewarded
from app.reward.builtin_tasks import check_answers
from app.reward.plugin import StepInfo
from app.runtime.host_supervision import join_hosts, wait_for_other_hosts
from app.runtime.inputs import data_columns, make_rewards
from app.runtime.reward_model import RewardModel, read_reward_model_spec
from app.runtime.scoring import open_mesh
from app.stages.sample_reader import file_digest, read_records
from app.stages.sample_text import VERL_NAMES, read_text
from app.tracking.sample_metrics import local_reward_counts
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
    without_ids = next((one.where for one in located if one.record.get(TOKEN_IDS) is None), None)
    columns = replace(data_columns(settings, prompts), without_token_ids=without_ids)
    with ExitStack() as stack:
        rewards = stack.enter_context(make_rewards(settings, columns))
        hosts, entered = [range(len(samples))], lambda phase: None
        if model is not None or jax_startup.expects_other_hosts(settings.mesh):
            entered = stack.enter_context(join_hosts(settings, out=out))
            check_hosts_agree(resolved, {"--input": f"{len(samples)} samples, {file_digest(input)}"})
            hosts = sample_indices_by_host(samples)
        number = jax.process_index() if len(hosts) > 1 else 0
        if number == 0:
            _print_lines(rewards.plug_in_summaries)
        local_samples = [samples[i] for i in hosts[number]]
        entered("score")
        judge = None if model is None else RewardModel.load(settings, model, open_mesh(settings))
        model_outcomes = judge and judge.score(local_samples)[0]
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
        with error_barrier() if len(hosts) > 1 else nullcontext():
            if number == 0:
                write_jsonl(out, map(_scored_record, located, scored.samples))
    if number > 0:
        return None
    return {"samples": len(samples), **_reward_metrics(scored, rewards.reward_names), "written to": str(out)}


def _read_located(input: Path, settings: Settings) -> list[LocatedSample]:
    """Reads all samples of a file, each with what some reward reads; built-in ones read no prompt and no token ids."""
    reward, located, groups = settings.reward, list[LocatedSample](), dict[str, int]()
    has_plug_ins = any(function.function for function in reward.functions)
    needed = {
        "completion": "a reward is of its text",
        **({"prompt": "plug-ins and reward models read it"} if has_plug_ins or reward.model is not None else {}),
        **({TOKEN_IDS: "reward.overlong_buffer counts them"} if reward.overlong_buffer is not None else {}),
    }
    if settings.env.source is not None:
        needed["episode"] = f"env.source: {settings.env.source} rewards it"
    names = (*needed, *REWARD_FIELDS, *((TOKEN_IDS, "episode") if has_plug_ins else ()))
    for index, (where, record) in enumerate(read_records(input)):
        texts = {name: read_text(record, name, where=where)[1] for name in VERL_NAMES if name in needed}
        fields = {**record, **texts, **_read_reference(record)}
        for name, reason in needed.items():
            if fields.get(name) is None:
                raise InputError(f"{where}: missing {name}; {reason}; add the field or remove the line")
        # Without a reward it was masked, which a reward undoes.
        was_dropped = record.get("finish_reason") == NO_REWARD_FINISH_REASON
        has_episode = "episode" in names and record.get("episode") is not None
        read = (*names, TOKEN_IDS, "loss_mask") if was_dropped or has_episode else names
        sample = sample_for_scoring(fields, where=where, index=index, names=read)
        if (group := record.get("group_id")) is not None:
            # Whatever names the group, its number is the index of its first sample.
            sample = replace(sample, group_id=groups.setdefault(json.dumps(group), index))
        located.append(LocatedSample(where, record, sample))
    return located


def _read_reference(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns answer and columns, with verl's `gts` of any type as `ground_truth`, since an answer is text."""
    columns, answer, reference = record.get("columns"), record.get("answer"), record.get("gts")
    columns = columns if isinstance(columns, dict) else {}
    if answer is not None or reference is None:
        return {"answer": answer, "columns": columns}
    answer = reference if isinstance(reference, str) else None
    return {"answer": answer, "columns": {"ground_truth": reference, **columns}}


def _scored_record(one: LocatedSample, scored: Sample) -> Mapping[str, Any]:
    """Returns the record as it was read, but for the fields that scoring has added, changed or removed."""
    before, after = sample_to_record(one.sample), sample_to_record(scored)
    changed = {name: value for name, value in after.items() if name not in before or before[name] != value}
    removed = {"rewards", "reward", *(before.keys() - after.keys())}
    if one.record.get("episode") is not None:
        removed.add("token_rewards")
    return {name: value for name, value in one.record.items() if name not in removed} | changed


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def sample_indices_by_host(samples: Sequence[Sample]) -> list[Sequence[int]]:
    """Returns the indices of each host's samples in the file: whole groups, about the same number on each host."""
    groups: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(place)
    members = list(groups.values())
    runs = [host_slice(len(members), host=host) for host in range(jax.process_count())]
    return [sorted(place for group in run for place in members[group]) for run in runs]


def _gather_scored(local: RewardedSamples, hosts: Sequence[Sequence[int]]) -> RewardedSamples:
    """Returns all samples on process 0, in the order of the file, and only the local ones on the others.

    Raises:
        RuntimeError: some host failed. Every host raises it.
    """
    with error_barrier():
        if local.fatal_error is not None:
            raise RuntimeError(local.fatal_error)
    counts = {name: asdict(count) for name, count in local.function_counts.items()}
    sent = gather_bytes_to_process_0(json.dumps([counts, local.num_without_reward]).encode())
    notices = gather_lines_to_process_0(local.notices)
    samples = gather_samples_to_process_0(local.samples)
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
