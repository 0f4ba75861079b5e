"""Writes run directories like those of `grpo train`, without training."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.records.jsonl import write_jsonl
from settings import load

QUICKSTART = Path(__file__).with_name("quickstart_metrics.jsonl")
"""Metrics of a healthy run: the quickstart, 100 steps on two CPU cores, rounded to four digits."""
SMALL_HISTORY = [{"step": 1, "reward/mean": 0.5}]
"""Metrics of a step that make a single plot, which saves time."""


@functools.cache
def _quickstart() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for line in QUICKSTART.read_text().splitlines())


def quickstart_history() -> list[dict[str, Any]]:
    return [dict(record) for record in _quickstart()]


def step_record(step: int, **metrics: float | None) -> dict[str, Any]:
    """Returns the line of a healthy step, with some metrics replaced (`__` stands for `/`)."""
    healthy = _quickstart()[1 + step % 50]
    return healthy | {"step": step} | {name.replace("__", "/"): value for name, value in metrics.items()}


def sample_record(uid: str, completion: str = "12", **fields: Any) -> dict[str, Any]:
    return {
        **{"uid": uid, "group_id": 0, "sample_index": int(uid.rpartition("/s")[2])},
        **{"prompt": "5 + 7 = ?", "completion": completion, "answer": "12", "finish_reason": "stop"},
        **{"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "behavior_logprobs": [-0.5, -0.25]},
        **{"policy_version": 0, "advantages": [1.0, 1.0], "rewards": {"arithmetic": 1.0}, "reward": 1.0},
        **fields,
    }


def write_run(
    path: Path,
    history: Sequence[Mapping[str, Any]],
    *,
    rollouts: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
    evaluations: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
    settings: Sequence[str] = (),
) -> Path:
    path.mkdir(parents=True)
    overrides = [f"run.dir={path.parent}", f"run.name={path.name}", *settings]
    (path / "settings.yaml").write_text(load(None, overrides, {}).to_yaml())
    write_jsonl(path / "metrics.jsonl", history)
    for folder, files in (("rollouts", rollouts or {}), ("eval", evaluations or {})):
        for step, records in files.items():
            (path / folder).mkdir(exist_ok=True)
            write_jsonl(path / folder / f"step_{step:06d}.jsonl", records)
    return path
