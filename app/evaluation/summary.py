"""What `grpo evaluate` says at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.evaluation.comparison_report import format_interval, is_shown
from app.evaluation.metadata import JUDGE, EvaluationMetadata
from app.evaluation.metrics import MAJORITY_PREFIX, PASS_AT_PREFIX, pass_at_k_sizes
from app.report.before_after import format_metric
from app.report.confidence_intervals import MetricEstimate
from app.reward.tasks import is_task_reward


@dataclass(frozen=True)
class EvaluationSummary:
    metadata: EvaluationMetadata
    num_prompts: int
    num_dropped: int
    """Prompts that are longer than `data.max_prompt_length`."""
    num_samples: int
    """Of each prompt."""
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
            "metrics": {name: figure.value for name, figure in self.metrics.items()},
            "intervals": {name: figure.interval for name, figure in self.metrics.items() if figure.interval},
            "not measured": self.unmeasured_metrics,
            "seconds": round(self.seconds, 2),
            "written to": None if self.out is None else str(self.out),
        }

    @property
    def unmeasured_metrics(self) -> list[str]:
        """What several samples of a prompt would tell, were the judge another; and why not."""
        judge, names = self.metadata.facts[JUDGE], [n for n in self.metrics if n.startswith(PASS_AT_PREFIX)]
        lines = []
        if any(self.metrics[name].value is None for name in names):
            lines.append(f"pass@k: {judge} gives other values than 0 and 1")
        if pass_at_k_sizes(self.num_samples) and not is_task_reward(judge):
            lines.append(f"{MAJORITY_PREFIX.removeprefix('eval/')}k: {judge} does not say which answer it reads")
        return lines

    def to_text(self) -> str:
        temperature = self.metadata.facts["eval.temperature"]
        how = "greedy" if temperature == 0 else f"{self.num_samples} samples each at temperature {temperature:g}"
        dropped = f" ({self.num_dropped} longer ones dropped)" if self.num_dropped else ""
        judge = self.metadata.facts[JUDGE]
        by_plug_in = not is_task_reward(judge)
        prompts = f"{self.num_prompts} prompts{dropped} of {self.metadata.data}"
        lines = [
            f"{self.metadata.label}: {prompts}, {how}, judged by {judge}",
            f"{'':<24}{'':>10}   95 % interval",
        ]
        for name, figure in self.metrics.items():
            if is_shown(name, figure):
                value = format_metric(name, figure.value, by_plug_in=by_plug_in)
                interval = format_interval(name, figure.interval, has_plugin_judge=by_plug_in)
                lines.append(f"{name.removeprefix('eval/'):<24}{value:>10}   {interval}".rstrip())
        lines += [f"not measured: {line}" for line in self.unmeasured_metrics]
        kept = f"samples in {self.out}" if self.out else "no --out, nothing is kept"
        return "\n".join([*lines, f"{self.seconds:.1f} s; {kept}"])
