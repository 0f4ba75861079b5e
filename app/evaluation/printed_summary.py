"""The result that `grpo evaluate` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.evaluation.metadata import JUDGE, EvaluationMetadata
from app.evaluation.prompt_metrics import PASS_AT_PREFIX, pass_at_k_sizes
from app.records.text_format import format_interval, format_table
from app.report.before_after import format_metric
from app.report.confidence_intervals import MetricEstimate
from app.reward.builtin_tasks import is_task_reward


@dataclass(frozen=True)
class EvaluationSummary:
    """The metrics of an evaluation, and a description of what was evaluated."""

    metadata: EvaluationMetadata
    num_prompts: int
    num_dropped: int
    """Number of prompts dropped because they exceed `data.max_prompt_length`."""
    num_samples: int
    """Samples per prompt."""
    metrics: Mapping[str, MetricEstimate]
    seconds: float
    out: Path | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.metadata.model,
            "step": self.metadata.step,
            "data": self.metadata.data,
            "judge": self.metadata.facts[JUDGE],
            "prompts": self.num_prompts,
            "dropped prompts": self.num_dropped,
            "samples per prompt": self.num_samples,
            "temperature": self.metadata.facts["eval.temperature"],
            "metrics": {name: estimate.value for name, estimate in self.metrics.items()},
            "intervals": {name: estimate.interval for name, estimate in self.metrics.items() if estimate.interval},
            "not measured": self.unmeasured_metrics,
            "seconds": round(self.seconds, 2),
            "written to": None if self.out is None else str(self.out),
        }

    @property
    def unmeasured_metrics(self) -> list[str]:
        """One line for each metric over several samples that this judge cannot measure, with the reason."""
        judge, lines = self.metadata.facts[JUDGE], []
        if any(name.startswith(PASS_AT_PREFIX) and one.value is None for name, one in self.metrics.items()):
            lines.append(f"pass@k: {judge} gives values other than 0 and 1")
        if pass_at_k_sizes(self.num_samples) and not is_task_reward(judge):
            lines.append(f"maj@k: {judge} does not report which answer it extracts")
        return lines

    def to_text(self) -> str:
        temperature, judge = self.metadata.facts["eval.temperature"], self.metadata.facts[JUDGE]
        sampling = "greedy" if temperature == 0 else f"{self.num_samples} samples each at temperature {temperature:g}"
        dropped = f" ({self.num_dropped} longer ones dropped)" if self.num_dropped else ""
        prompts = f"{self.num_prompts} prompts{dropped} of {self.metadata.data}"
        rows = [
            (name.removeprefix("eval/"), *format_estimate(name, estimate, not is_task_reward(judge)))
            for name, estimate in self.metrics.items()
            if is_shown(name, estimate)
        ]
        lines = [
            f"{self.metadata.label}: {prompts}, {sampling}, graded by {judge}",
            format_table(rows, header=("", "", "95 % interval")),
            *(f"not measured: {line}" for line in self.unmeasured_metrics),
            f"{self.seconds:.1f} s; " + (f"samples in {self.out}" if self.out else "not saved: no --out was given"),
            *(["to compare two such files: grpo evaluate --compare BEFORE AFTER"] if self.out else []),
        ]
        return "\n".join(lines)


def format_estimate(name: str, estimate: MetricEstimate, has_plugin_judge: bool) -> tuple[str, str]:
    """Returns a metric's value and its interval as text; the interval is empty if there is none."""

    def format_value(value: float | None) -> str:
        return format_metric(name, value, by_plug_in=has_plugin_judge)

    return format_value(estimate.value), format_interval(estimate.interval, format_value)


def is_shown(name: str, measured: MetricEstimate) -> bool:
    """Returns whether a metric gets a row: it must have a value, and counts of errors must not be 0."""
    return measured.value is not None and (not name.endswith("_count") or measured.value > 0)
