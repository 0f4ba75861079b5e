"""Metrics of a step's episodes, over all hosts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from app.distributed.collectives import gather_bytes_over_hosts
from app.records.sample import EPISODE_ENDS, Sample

TOOL_COUNTS = ("tool_calls", "tool_errors")
"""Numbers of a turn that are added up over the sample."""
MAX_NAMES = 32
"""Most scores, and most numbers of its own, that are recorded of an environment."""


def episode_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns metrics over the samples with an episode, dropped ones included; empty if there are none on any host.

    Scores are means over the samples that have them, and the environment's own numbers over the turns that have them.
    This is a collective call.
    """
    local = [
        {
            "end": sample.episode.end,
            "tokens": len(sample.completion_ids),
            "seconds": sample.elapsed_s,
            "written": sum(turn.end - turn.start for turn in sample.episode.turns),
            "scores": dict(sample.episode.scores),
            "turns": [{**turn.metrics, "seconds": turn.seconds} for turn in sample.episode.turns],
        }
        for sample in samples
        if sample.episode is not None
    ]
    gathered = gather_bytes_over_hosts(json.dumps(local).encode())
    episodes = [episode for host in gathered for episode in json.loads(host)]
    if not episodes:
        return {}
    num_turns = [len(episode["turns"]) for episode in episodes]
    tokens, written = (np.array([episode[name] for episode in episodes]) for name in ("tokens", "written"))
    turns = [turn for episode in episodes for turn in episode["turns"]]
    metrics = {
        "episode/turns_mean": np.mean(num_turns),
        "episode/turns_p90": np.percentile(num_turns, 90),
        **{f"episode/end/{end}": np.mean([one["end"] == end for one in episodes]) for end in EPISODE_ENDS},
        "episode/written_tokens_mean": written.mean(),
        "episode/observed_tokens_mean": (tokens - written).mean(),
        **{f"episode/{name}_mean": sum(turn.pop(name, 0.0) for turn in turns) / len(episodes) for name in TOOL_COUNTS},
    }
    if seconds := [turn.pop("seconds") for turn in turns]:
        metrics |= {f"time/env_turn_p{p}_s": np.percentile(seconds, p) for p in (50, 99)}
        if elapsed_s := sum(episode["seconds"] for episode in episodes):
            metrics["perf/rollout/acting_share"] = sum(seconds) / elapsed_s
    metrics |= _means(turns, "env/") | _means([episode["scores"] for episode in episodes], "env/score/")
    return {name: float(value) for name, value in metrics.items()}


def _means(rows: Iterable[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Returns the mean of each number over the rows that have it, of the first names in alphabetical order."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if "/" not in name:  # would be part of a path
                values.setdefault(name, []).append(value)
    return {f"{prefix}{name}": float(np.mean(values[name])) for name in sorted(values)[:MAX_NAMES]}
