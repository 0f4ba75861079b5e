from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.tracking.sample_metrics import MAX_NAMES, episode_metrics
from tests.episodes import with_turns
from tests.tiny import make_sample


def test_two_games_by_hand() -> None:
    calls = [{"tool_calls": 2.0, "tool_errors": 1.0, "distance": 4.0}, {"tool_calls": 1.0, "distance": 2.0}, {}]
    samples = [
        with_turns([(2, 3), (1, 1), (3, 0)], scores={"win": 1.0, "grace": 0.5}, metrics=calls, reward=1.5),
        with_turns([(2, 0)], scores={"win": 0.0}, end="turns", reward=0.5),
        replace(make_sample(np.zeros(100)), elapsed_s=100.0),
    ]
    samples[0] = replace(samples[0], elapsed_s=10.0)
    samples[1] = replace(samples[1], elapsed_s=4.0)
    assert episode_metrics(samples) == pytest.approx(
        {
            "episode/turns_mean": 2.0,
            "episode/turns_p90": 2.8,
            **{f"episode/end/{end}": 0.5 for end in ("terminated", "turns")},
            **{f"episode/end/{end}": 0.0 for end in ("truncated", "turn_tokens", "tokens", "observation", "dropped")},
            "episode/written_tokens_mean": 4.0,
            "episode/observed_tokens_mean": 2.0,
            "episode/tool_calls_mean": 1.5,
            "episode/tool_errors_mean": 0.5,
            "env/score/win": 0.5,
            "env/score/grace": 0.5,
            "env/distance": 3.0,
            "time/env_turn_p50_s": 1.5,
            "time/env_turn_p99_s": 2.97,
            "perf/rollout/acting_share": 0.5,
        }
    )


def test_without_episodes_there_are_no_metrics_of_them() -> None:
    assert episode_metrics([make_sample([1, 2])]) == episode_metrics([]) == {}


def test_a_dropped_sample_counts_among_the_ends() -> None:
    dropped = replace(with_turns([(1, 0)], end="dropped"), finish_reason="dropped:environment exit")
    metrics = episode_metrics([dropped, with_turns([(1, 0)], reward=1.0)])
    assert metrics["episode/end/dropped"] == 0.5


def test_an_environment_cannot_flood_the_metrics() -> None:
    many = {f"number_{i:03}": 1.0 for i in range(100)} | {"a/path": 1.0}
    names = [name for name in episode_metrics([with_turns([(1, 0)], metrics=[many])]) if name.startswith("env/")]
    assert names == [f"env/number_{i:03}" for i in range(MAX_NAMES)]
