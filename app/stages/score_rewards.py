"""`grpo score --role reward`: computes the rewards of the samples in a file as training would."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from app.distributed.collective_files import gather_lines_to_process_0, gather_samples_to_process_0, host_slice
from app.distributed.collectives import error_barrier, is_process_0
from app.distributed.host_consistency import check_hosts_agree
from app.distributed.watchdog import WAIT_PHASE
from app.mesh import jax_startup
from app.records.jsonl import check_output_path, write_jsonl
from app.records.sample import Sample, group_indices
from app.records.sample_json import REWARD_FIELDS, TOKEN_IDS, LocatedSample, sample_for_scoring, sample_to_record
from app.records.shared_rows import SharedRows
from app.reward.aggregate import NO_REWARD_FINISH_REASON
from app.reward.builtin_tasks import check_answers
from app.reward.plugin import StepInfo
from app.runtime.host_supervision import join_hosts, wait_for_other_hosts
from app.runtime.inputs import data_columns, make_rewards
from app.runtime.reward_model import RewardModel, read_reward_model_spec
from app.runtime.scoring import open_mesh
from app.stages.sample_reader import file_digest, read_records
from app.stages.sample_text import VERL_NAMES, read_text
from app.tracking.sample_metrics import reward_counts
from settings import Resolved, Settings
from settings.errors import InputError


def score_rewards(resolved: Resolved, *, input: Path, out: Path) -> dict[str, Any] | None:
    """Adds rewards to every sample of `input`; returns the summary to print, or None on processes other than 0.

    The groups are divided over the hosts and need not be contiguous in the file. Devices are started only if needed.

    Raises:
        InputError: the settings, model, samples or output file cannot be used.
        RuntimeError: a plug-in cannot be restarted, or a function failed while `reward.on_error` is `raise`.
    """
    settings = resolved.settings
    with ExitStack() as stack:
        with error_barrier():
            if is_process_0():
                check_output_path(out, "--out")
            located = _read_located(input, settings)
            samples = [one.sample for one in located]
            if not samples:
                raise InputError(f"--input: {input} contains no samples; give a file written by grpo rollout")
            prompts = [s.prompt for s in samples]
            check_answers(prompts, [function.name for function in settings.reward.functions])
            model = read_reward_model_spec(settings)
            if model is not None:
                model.check_prompt(prompts[0])
            without_ids = next((one.where for one in located if one.record.get(TOKEN_IDS) is None), None)
            columns = replace(data_columns(settings, prompts), without_token_ids=without_ids)
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
        wait_for_other_hosts(entered)
        entered("save")
        _print_lines(gather_lines_to_process_0(scored.notices))
        with error_barrier():
            if scored.fatal_error is not None:
                raise RuntimeError(scored.fatal_error)
        counts = reward_counts(scored)
        gathered = zip(chain.from_iterable(hosts), gather_samples_to_process_0(scored.samples), strict=number == 0)
        of_all = [sample for _, sample in sorted(gathered, key=itemgetter(0))]
        with error_barrier():
            if number == 0:
                write_jsonl(out, map(_scored_record, located, of_all))
    if number > 0:
        return None
    figures = {**_reward_means(of_all, rewards.reward_names), **counts}
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    return {"samples": len(samples), **rounded, "written to": str(out)}


def _read_located(input: Path, settings: Settings) -> list[LocatedSample]:
    """Reads all samples; only the fields that the configured rewards use must be present."""
    reward, located, groups = settings.reward, list[LocatedSample](), dict[str, int]()
    has_plug_ins = any(function.function for function in reward.functions)
    needed = {
        "completion": "rewards grade its text",
        **({"prompt": "plug-ins and reward models read it"} if has_plug_ins or reward.model is not None else {}),
        **({TOKEN_IDS: "reward.overlong_buffer counts them"} if reward.overlong_buffer is not None else {}),
    }
    if settings.env.source is not None:
        needed["episode"] = f"the rewards of env.source: {settings.env.source} are in it"
    names = (*needed, *REWARD_FIELDS, *((TOKEN_IDS, "episode") if has_plug_ins else ()))
    rows = SharedRows()
    for index, (where, record) in enumerate(read_records(input)):
        texts = {name: read_text(record, name, where=where)[1] for name in VERL_NAMES if name in needed}
        whole = rows.restore(record, where=where)
        fields = {**whole, **texts, **_read_reference(whole)}
        for name, reason in needed.items():
            if fields.get(name) is None:
                raise InputError(f"{where}: missing {name} ({reason}); add the field, or remove the line")
        # A sample without a reward was masked; now that it gets one, the mask is removed.
        was_dropped = record.get("finish_reason") == NO_REWARD_FINISH_REASON
        has_episode = "episode" in names and record.get("episode") is not None
        read = (*names, TOKEN_IDS, "loss_mask") if was_dropped or has_episode else names
        sample = sample_for_scoring(fields, where=where, index=index, names=read)
        if (group := record.get("group_id")) is not None:
            # A group's number is the index of its first sample, whatever its name.
            sample = replace(sample, group_id=groups.setdefault(json.dumps(group), index))
        located.append(LocatedSample(where, record, sample))
    return located


def _read_reference(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the reference answer, which verl's files name `gts`, and the columns."""
    columns, answer = record.get("columns"), record.get("answer")
    return {
        "answer": record.get("gts") if answer is None else answer,
        "columns": columns if isinstance(columns, dict) else {},
    }


def _scored_record(one: LocatedSample, scored: Sample) -> Mapping[str, Any]:
    """Returns the record as read from the file, with the changes that scoring has made to the sample."""
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
    """Returns for each host the file indices of its samples: about the same number of whole groups on each host."""
    members = group_indices(samples)
    runs = [host_slice(len(members), host=host) for host in range(jax.process_count())]
    return [sorted(place for group in run for place in members[group]) for run in runs]


def _reward_means(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, float | None]:
    kept = [s for s in samples if s.reward is not None]
    values = {name: [s.rewards[name] for s in kept if s.rewards and name in s.rewards] for name in names}
    columns = {f"reward/{name}/mean": column for name, column in values.items()}
    columns["reward/mean"] = [s.reward or 0.0 for s in kept]
    return {name: float(np.mean(column)) if column else None for name, column in columns.items()}
