"""Metrics of a step's episodes, over all hosts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np

from app.distributed.collectives import gather_bytes_over_hosts
from app.distributed.tables import gather_table
from app.records.sample import EPISODE_ENDS, Sample
from app.tracking.metrics import mean_ignoring_nan

TOOL_COUNTS = ("tool_calls", "tool_errors", "malformed_calls")
"""Numbers of a turn that are added up over the sample."""
MAX_NAMES = 32
"""Most scores, and most numbers of its own, that are recorded of an environment."""
MAX_TURNS_APART = 8
"""Largest number of turns for which the mean reward is recorded separately."""


def episode_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns metrics over the samples with an episode, dropped ones included; empty if there are none on any host.

    Scores are means over the samples that have them, and the environment's own numbers over the turns that have them.
    This is a collective call.
    """
    played = [(sample, sample.episode) for sample in samples if sample.episode is not None]
    turns = [turn for _, episode in played for turn in episode.turns]
    scores = _names_over_hosts(name for _, episode in played for name in episode.scores)
    numbers = _names_over_hosts(name for turn in turns for name in turn.metrics if name not in TOOL_COUNTS)
    by_sample = gather_table(
        {
            "turns": [len(episode.turns) for _, episode in played],
            "end": [EPISODE_ENDS.index(episode.end) for _, episode in played],
            "tokens": [len(sample.completion_ids) for sample, _ in played],
            "written": [sum(turn.end - turn.start for turn in episode.turns) for _, episode in played],
            "reward": [np.nan if sample.reward is None else sample.reward for sample, _ in played],
            **{
                name: [sum(turn.metrics.get(name, 0.0) for turn in episode.turns) for _, episode in played]
                for name in TOOL_COUNTS
            },
            **{f"env/score/{name}": [episode.scores.get(name, np.nan) for _, episode in played] for name in scores},
        }
    )
    by_turn = gather_table(
        {
            "seconds": [turn.seconds for turn in turns],
            **{f"env/{name}": [turn.metrics.get(name, np.nan) for turn in turns] for name in numbers},
        }
    )
    num_turns, tokens, written = by_sample["turns"], by_sample["tokens"], by_sample["written"]
    if not len(num_turns):
        return {}
    metrics = {
        "episode/turns_mean": num_turns.mean(),
        "episode/turns_p90": np.percentile(num_turns, 90),
        **{f"episode/end/{end}": np.mean(by_sample["end"] == i) for i, end in enumerate(EPISODE_ENDS)},
        "episode/written_tokens_mean": written.mean(),
        "episode/observed_tokens_mean": (tokens - written).mean(),
        "episode/observed_fraction": 1 - written.sum() / max(tokens.sum(), 1),
        **{f"episode/{name}_mean": by_sample[name].mean() for name in TOOL_COUNTS},
        **{
            f"episode/reward/turns_{n}": mean_ignoring_nan(by_sample["reward"][num_turns == n])
            for n in range(1, MAX_TURNS_APART + 1)
            if n in num_turns
        },
        **{name: mean_ignoring_nan(x) for table in (by_sample, by_turn) for name, x in table.items() if "/" in name},
    }
    if len(seconds := by_turn["seconds"]):
        metrics |= {f"time/env_turn_p{p}_s": np.percentile(seconds, p) for p in (50, 99)}
    return {name: float(value) for name, value in metrics.items()}


def _names_over_hosts(names: Iterable[str]) -> list[str]:
    """Returns the first `MAX_NAMES` of the names of all hosts, in alphabetical order; a `/` would be part of a path."""
    local = sorted({name for name in names if "/" not in name})
    gathered = gather_bytes_over_hosts(json.dumps(local).encode())
    return sorted({name for host in gathered for name in json.loads(host)})[:MAX_NAMES]
