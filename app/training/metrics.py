"""A step's samples -> the numbers of `metrics.jsonl`, over all hosts."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from app.advantage.group import zero_variance_fraction
from app.flow import Sample
from app.mesh.placement import gather_over_hosts


def over_hosts(values: Sequence[float]) -> np.ndarray:
    """Every host's values, host after host. Hosts hold equally many samples."""
    return gather_over_hosts(np.asarray(values, np.float64)).reshape(-1)


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards, lengths and advantages. Population statistics (ddof = 0) over samples, tokens for advantages."""
    rewards = over_hosts([s.reward or 0.0 for s in samples])
    lengths = over_hosts([len(s.completion_ids) for s in samples])
    truncated = over_hosts([s.finish_reason == "length" for s in samples])
    group_ids = over_hosts([s.group_id for s in samples])
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/zero_variance_fraction": zero_variance_fraction(rewards, group_ids),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/truncated_fraction": truncated.mean(),
    }
    for name in samples[0].rewards or {}:
        metrics[f"reward/{name}/mean"] = over_hosts([(s.rewards or {})[name] for s in samples]).mean()
    # Each sample's advantage is one number on all its tokens: weight it by how many there are.
    tokens = over_hosts([s.mask.sum() for s in samples])
    means = over_hosts([_mean_advantage(s) for s in samples])
    mean = float((means * tokens).sum() / max(tokens.sum(), 1))
    metrics["advantage/mean"] = mean
    metrics["advantage/std"] = float(np.sqrt((tokens * (means - mean) ** 2).sum() / max(tokens.sum(), 1)))
    return {name: float(value) for name, value in metrics.items()}


def _mean_advantage(sample: Sample) -> float:
    assert sample.advantages is not None
    return float(sample.advantages[sample.mask].mean()) if sample.mask.any() else 0.0


PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
"""Dense bfloat16 peak of one device, by the start of its kind's name. Source: the vendors' data sheets."""


@dataclass(frozen=True, slots=True)
class Work:
    """What each token of a step goes through, for counting FLOPs."""

    num_parameters: int
    group_size: int
    """A prompt is prefilled once for so many samples."""
    scoring_passes: int
    epochs: int

    def flops(self, *, prompt_tokens: int, completion_tokens: int) -> float:
        """2 N a token forward, 6 N forward and backward. Source: Chowdhery et al. 2022 (PaLM), appendix B."""
        tokens = prompt_tokens + completion_tokens
        sampled = completion_tokens + prompt_tokens / self.group_size
        return self.num_parameters * (2 * (sampled + tokens * self.scoring_passes) + 6 * tokens * self.epochs)


def step_performance(samples: Sequence[Sample], work: Work, *, seconds: float) -> dict[str, float | int | None]:
    """Speed over the whole step and peak memory, under `perf/`. `perf/mfu` is None where the peak is not known."""
    completion_tokens = int(over_hosts([len(s.completion_ids) for s in samples]).sum())
    prompt_tokens = int(over_hosts([len(s.prompt.token_ids) for s in samples]).sum())
    kind = jax.devices()[0].device_kind
    peak = next((flops for start, flops in PEAK_FLOPS.items() if kind.startswith(start)), None)
    flops = work.flops(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    return {
        "perf/tokens_per_s": completion_tokens / seconds,
        "perf/mfu": None if peak is None else flops / (seconds * peak * jax.device_count()),
        "perf/peak_memory_bytes": peak_memory_bytes(),
    }


def peak_memory_bytes() -> int:
    """Of the fullest local device; of the whole process where devices do not count (the CPU)."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stats):
        return max(s["peak_bytes_in_use"] for s in stats)
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_memory_bytes() -> int | None:
    """What a local device may use; on a CPU its share of the host's memory; None where it is not told."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_limit" in s for s in stats):
        return min(s["bytes_limit"] for s in stats)
    if jax.local_devices()[0].platform != "cpu":
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()


class CompilationCounter:
    """Counts XLA compilations of this process from the moment it is made until it is closed."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: object) -> None:
        self._count += event == self.EVENT

    def take(self) -> int:
        """Compilations since the last call."""
        count, self._count = self._count, 0
        return count

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
