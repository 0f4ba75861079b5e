"""`grpo score --role reward`: what training would give the samples of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from app.distributed.collectives import bytes_to_first_host
from app.distributed.host_consistency import agree
from app.distributed.lockstep import host_run, lines_to_first_host, samples_to_first_host, together
from app.distributed.watchdog import WAIT
from app.mesh import topology
from app.records.jsonl import read_jsonl, write_jsonl
from app.records.sample import Sample
from app.records.sample_json import sample_from_record, sample_to_record
from app.reward.aggregate import Scored, Tally, joined
from app.reward.plugin import Moment
from app.reward.reward_functions import Rewards
from app.reward.reward_outcome import Outcome
from app.reward.tasks import check_answers
from app.runtime.host_group import joined_hosts, unwatched, wait_for_others
from app.runtime.inputs import data_columns, overlong_penalty
from app.runtime.reward_model import RewardModel, RewardModelInput, read_reward_model
from app.runtime.session import open_mesh
from app.stages.sample_reader import digest_of
from app.tracking.metrics import host_counts
from settings import Resolved, Settings
from settings.errors import InputError


def score_rewards(resolved: Resolved, *, input: Path, out: Path) -> dict[str, Any] | None:
    """Adds rewards to every sample of `input`. Devices are started for a reward model, and for several hosts.

    On one host the functions see the whole file in one call; several share its groups out, whose samples may stand
    anywhere in it.

    Raises:
        InputError: settings, model, samples or output file that cannot be used.
        RuntimeError: a reward function that could not be called any more, or whose failure is to raise.
    """
    settings = resolved.settings
    samples = [sample_from_record(record, where=f"{input}:{line}") for line, record in read_jsonl(input)]
    if not samples:
        raise InputError(f"--input: {input} holds no samples")
    prompts = [s.prompt for s in samples]
    check_answers(prompts, [function.name for function in settings.reward.functions])
    model = read_reward_model(settings)
    if model is not None:
        model.check_prompt(prompts[0])
    columns, penalty = data_columns(settings, prompts), overlong_penalty(settings)
    with ExitStack() as stack:
        rewards = stack.enter_context(Rewards(settings.reward, columns, overlong=penalty))
        hosts, entered = [range(len(samples))], unwatched
        if model is not None or topology.joins_others(settings.mesh):
            entered = stack.enter_context(joined_hosts(settings, out=out))
            agree(resolved, {"--input": f"{len(samples)} samples, {digest_of(input)}"})
            hosts = groups_of_hosts(samples)
        number = jax.process_index() if len(hosts) > 1 else 0
        if number == 0:
            _say(rewards.reports)
        own = [samples[i] for i in hosts[number]]
        entered("score")
        of_model = None if model is None else _asked(settings, model, own)
        # No limit: each call of a function has its own, and a host's whole share is one phase.
        entered(WAIT)
        scored = rewards.score(own, Moment(), of_model=of_model)
        if len(hosts) > 1:
            wait_for_others(entered)
            entered("save")
            scored = _of_all(scored, hosts)
        if number == 0:
            _say(scored.notices)
        if scored.problem is not None:
            raise RuntimeError(scored.problem)
        if len(hosts) == 1:
            write_jsonl(out, map(sample_to_record, scored.samples))
        else:
            with together():
                if number == 0:
                    write_jsonl(out, map(sample_to_record, scored.samples))
    if number > 0:
        return None
    return {"samples": len(samples), **_reward_figures(scored, rewards.names), "written to": str(out)}


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def groups_of_hosts(samples: Sequence[Sample]) -> list[Sequence[int]]:
    """Of each host the samples that it asks about, by their places in the file: whole groups, about as many each."""
    groups: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(place)
    members = list(groups.values())
    runs = [host_run(len(members), host=host) for host in range(jax.process_count())]
    return [sorted(place for group in run for place in members[group]) for run in runs]


def _asked(settings: Settings, model: RewardModelInput, samples: Sequence[Sample]) -> list[Outcome]:
    """What the reward model says of each sample of this host."""
    outcomes, _ = RewardModel.load(settings, model, open_mesh(settings)).outcomes(samples)
    return outcomes


def _of_all(own: Scored, hosts: Sequence[Sequence[int]]) -> Scored:
    """On the first host the whole file, in its order; on the others what they have.

    Raises:
        RuntimeError: on every host what stops one of them.
    """
    with together():
        if own.problem is not None:
            raise RuntimeError(own.problem)
    told = {name: asdict(tally) for name, tally in own.tallies.items()}
    sent = bytes_to_first_host(json.dumps([told, own.num_without_reward]).encode())
    notices = lines_to_first_host(own.notices)
    samples = samples_to_first_host(own.samples)
    if jax.process_index() > 0:
        return own
    parts = []
    for tallies, num_without_reward in map(json.loads, sent):
        of_host = {name: Tally(**tally) for name, tally in tallies.items()}
        parts.append(Scored([], of_host, num_without_reward, (), None))
    in_order = sorted(zip((place for places in hosts for place in places), samples, strict=True), key=itemgetter(0))
    return replace(joined(parts), samples=[sample for _, sample in in_order], notices=tuple(notices))


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
