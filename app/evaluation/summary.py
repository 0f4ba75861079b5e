"""What `grpo evaluate` says at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.evaluation.comparison_report import interval_text, is_told
from app.evaluation.metadata import JUDGE, Subject
from app.evaluation.metrics import MAJORITY_OF, PASS_AT, drawn_counts
from app.report.before_after import figure_text
from app.report.confidence_intervals import Measured
from app.reward.tasks import is_task_reward


@dataclass(frozen=True)
class EvaluationReport:
    subject: Subject
    num_prompts: int
    num_dropped: int
    """Prompts that are longer than `data.max_prompt_length`."""
    num_samples: int
    """Of each prompt."""
    figures: Mapping[str, Measured]
    seconds: float
    out: Path | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.subject.model,
            "step": self.subject.step,
            "data": self.subject.data,
            "judge": self.subject.facts[JUDGE],
            "prompts": self.num_prompts,
            "dropped prompts": self.num_dropped,
            "samples per prompt": self.num_samples,
            "temperature": self.subject.facts["eval.temperature"],
            "metrics": {name: figure.value for name, figure in self.figures.items()},
            "intervals": {name: figure.interval for name, figure in self.figures.items() if figure.interval},
            "not measured": self.unmeasured,
            "seconds": round(self.seconds, 2),
            "written to": None if self.out is None else str(self.out),
        }

    @property
    def unmeasured(self) -> list[str]:
        """What several samples of a prompt would tell, were the judge another; and why not."""
        judge, names = self.subject.facts[JUDGE], [n for n in self.figures if n.startswith(PASS_AT)]
        lines = []
        if any(self.figures[name].value is None for name in names):
            lines.append(f"pass@k: {judge} gives other values than 0 and 1")
        if drawn_counts(self.num_samples) and not is_task_reward(judge):
            lines.append(f"{MAJORITY_OF.removeprefix('eval/')}k: {judge} does not say which answer it reads")
        return lines

    def to_text(self) -> str:
        temperature = self.subject.facts["eval.temperature"]
        how = "greedy" if temperature == 0 else f"{self.num_samples} samples each at temperature {temperature:g}"
        dropped = f" ({self.num_dropped} longer ones dropped)" if self.num_dropped else ""
        judge = self.subject.facts[JUDGE]
        by_plug_in = not is_task_reward(judge)
        prompts = f"{self.num_prompts} prompts{dropped} of {self.subject.data}"
        lines = [
            f"{self.subject.label}: {prompts}, {how}, judged by {judge}",
            f"{'':<24}{'':>10}   95 % interval",
        ]
        for name, figure in self.figures.items():
            if is_told(name, figure):
                value = figure_text(name, figure.value, by_plug_in=by_plug_in)
                interval = interval_text(name, figure.interval, by_plug_in=by_plug_in)
                lines.append(f"{name.removeprefix('eval/'):<24}{value:>10}   {interval}".rstrip())
        lines += [f"not measured: {line}" for line in self.unmeasured]
        kept = f"samples in {self.out}" if self.out else "no --out, nothing is kept"
        return "\n".join([*lines, f"{self.seconds:.1f} s; {kept}"])
