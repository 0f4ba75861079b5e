"""`grpo inspect-mesh --plan`: how a file of samples would be cut into micro-batches, from their lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from app.batching.micro_batch_plan import (
    MicroBatch,
    MicroBatchPlan,
    PackedRow,
    SequenceCost,
    SequenceLengths,
    bucketed_row_shape,
    plan_fixed_rows,
)
from app.batching.micro_batcher import FixedRowBatcher, PackedRowBatcher
from app.batching.packing_stats import packing_stats
from app.mesh import topology
from app.mesh.placement import check_rows_per_host, num_local_row_shards
from app.mesh.topology import make_mesh
from app.model.architecture import Architecture
from app.model.flops import forward_flops
from app.records.atomic_write import write_atomic
from app.records.jsonl import check_output_path, read_jsonl
from app.records.sample_json import token_ids_from_record
from app.report.packing_plots import PlottedRow, TokenSpan, format_rows, render_rows
from app.runtime.micro_batching import MaxLengths, make_score_batcher, make_update_batcher, num_bootstrap_tokens
from app.runtime.model_spec import read_critic_spec, read_model_spec
from app.stages.sample_reader import check_token_ids, check_token_quota
from settings import Resolved, Settings
from settings.checks.commands import check_for_plan
from settings.errors import InputError
from settings.schema.settings import ScoredRole

PassRole = Literal["update"] | ScoredRole
"""Whose micro-batches."""


@dataclass(frozen=True)
class MicroBatchStats:
    rows_per_device: int
    tokens_per_row: int
    num_samples: int
    real_tokens: int
    """Positions that hold a token; a shared prompt counts once."""
    fill: float
    flops_imbalance: float
    """Work of the fullest device over the mean."""
    rows: tuple[PackedRow, ...]
    """Numbers of the samples in the file, from 0, that stand behind one prompt; of every row, device after device."""


@dataclass(frozen=True)
class PaddedPlan:
    """The same samples one a row, padded to the longest, as many rows at once as the quota holds."""

    rows_per_device: int
    num_micro_batches: int
    computed_tokens: int
    fill: float


@dataclass(frozen=True)
class PackingReport:
    """One pass over all samples of a file: an optimizer step, or the scoring of a role."""

    file: str
    role: PassRole
    mesh: dict[str, int]
    num_devices: int
    """That hold different rows."""
    max_tokens_per_device: int | None
    """None: fixed rows."""
    num_samples: int
    num_tokens: int
    """Prompts count once for each of their samples."""
    micro_batches: tuple[MicroBatchStats, ...]
    figures: dict[str, float]
    """See `app.batching.packing_stats.plan_figures`."""
    padded: PaddedPlan | None
    """None where that is what the plan does."""
    rows: tuple[PlottedRow, ...]

    @property
    def title(self) -> str:
        full = self.micro_batches[0]
        count = f"{len(self.micro_batches)} micro-batch{'es' if len(self.micro_batches) > 1 else ''}"
        shape = f"{full.rows_per_device} x {full.tokens_per_row:,}"
        devices = "a device" if self.num_devices == 1 else f"each of {self.num_devices} devices"
        return (
            f"fill {self.figures['fill']:.1%}: {self.num_samples:,} samples in {count} of at most {shape} tokens on "
            f"{devices}"
        )

    def to_dict(self) -> dict[str, Any]:
        report = asdict(self)
        del report["rows"]  # the same rows, as pieces to draw
        return report

    def to_text(self) -> str:
        return "\n".join([*self._heading(), "", *self._table(), "", *self._totals(), "", format_rows(self.rows)])

    def _heading(self) -> list[str]:
        what = "an optimizer step" if self.role == "update" else f"one pass of score.{self.role}"
        quota = self.max_tokens_per_device
        how = f"packed rows, at most {quota:,} tokens a device" if quota else "fixed rows of one sample"
        axes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        return [f"{self.file} as {what}: {how}; mesh {axes}", self.title]

    def _table(self) -> list[str]:
        head = ("micro-batch", "rows a device", "tokens a row", "samples", "real tokens", "fill", "fullest device")
        table = [head]
        table += [
            (
                *(f"{n:,}" for n in (number, one.rows_per_device, one.tokens_per_row, one.num_samples)),
                *(f"{one.real_tokens:,}", f"{one.fill:.1%}", f"{one.flops_imbalance:.2f} x mean work"),
            )
            for number, one in enumerate(self.micro_batches, start=1)
        ]
        all_of_it = self.figures
        totals = f"{all_of_it['real_tokens']:,}", f"{all_of_it['fill']:.1%}"
        table.append(
            ("all", "", "", f"{self.num_samples:,}", *totals, f"{all_of_it['flops_imbalance']:.2f} x mean work")
        )
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in table]

    def _totals(self) -> list[str]:
        f = self.figures
        saved = self.num_tokens - f["real_tokens"]
        lines = [
            f"shared prompts save {saved:,} of {self.num_tokens:,} tokens ({saved / self.num_tokens:.1%})",
            f"{f['num_dummy_rows']} of {f['num_rows']} rows are empty, {f['over_quota']} over the quota",
            f"tokens a device: {f['seqlen_min']:,} to {f['seqlen_max']:,} in the order of the file, "
            f"{f['seqlen_balanced_min']:,} to {f['seqlen_balanced_max']:,} as planned; mean {f['seqlen_mean']:,.0f}",
        ]
        if self.padded is not None:
            ratio = self.padded.computed_tokens / f["computed_tokens"]
            lines.append(
                f"padded instead, {self.padded.rows_per_device} rows a device: {self.padded.num_micro_batches} "
                f"micro-batches, {self.padded.computed_tokens:,} tokens computed for {f['computed_tokens']:,} "
                f"({ratio:.2f} x)"
            )
        return lines


def inspect_plan(resolved: Resolved, *, file: Path, role: PassRole, plot_path: Path | None) -> PackingReport:
    """How the samples of `file` would be cut, the update in one optimizer step; drawn to `picture`. Loads no weights.

    Rows are as long as in a run: those of the update follow from the longest sample that the settings allow, those of a
    role from the longest of the file, as in `grpo score`.

    Raises:
        InputError: settings, model, samples or picture that cannot be used.
    """
    if plot_path is not None:
        check_plot_path(plot_path)
    if role == "update":
        check_for_plan(resolved)
    settings = resolved.settings
    model = read_model_spec(settings)
    architecture = (read_critic_spec(settings, model) if role == "critic" else model).architecture
    lengths, were_cut, longest_at = read_lengths(file, architecture)
    longest = int(lengths.totals.max())
    if role == "update":
        check_token_quota(resolved, "algorithm", longest, where=longest_at)
        run = MaxLengths.from_settings(settings)
        cut = make_update_batcher(
            settings, settings.algorithm, architecture, run._replace(sample=max(longest, run.sample))
        )
    else:
        behind = num_bootstrap_tokens(settings, role)
        check_token_quota(resolved, f"score.{role}", longest + behind, where=longest_at)
        cut = make_score_batcher(settings, role, architecture, MaxLengths(longest))
        lengths = replace(lengths, completions=lengths.completions + behind * were_cut)
    _start_on_one_host(settings)
    mesh = make_mesh(settings.mesh)
    check_rows_per_host(mesh)
    report = build_packing_report(cut, lengths, forward_flops(architecture), mesh, file=str(file), role=role)
    if plot_path is not None:
        kind = "svg" if plot_path.suffix == ".svg" else "png"
        write_atomic(plot_path, render_rows(report.rows, title=report.title, kind=kind))
    return report


def _start_on_one_host(settings: Settings) -> None:
    """Raises InputError where other hosts have joined."""
    topology.initialize_distributed(settings.mesh)
    if jax.process_count() > 1:
        raise InputError(
            f"--plan: a file is cut for one host, and {jax.process_count()} have joined; leave "
            "mesh.coordinator_address null and run it on a machine outside the slice, with as many devices as a host "
            "has (mesh.cpu_devices)"
        )


def check_plot_path(path: Path) -> None:
    """Raises InputError where no picture could be written to `path`."""
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"--picture: expected a name that ends in .png or .svg, got {path}")
    check_output_path(path)


def read_lengths(path: Path, architecture: Architecture) -> tuple[SequenceLengths, Bool[np.ndarray, "N"], str]:
    """Lengths of the samples of a file, which of them were cut short, and the line of the longest.

    Only token ids are asked for; a sample without a finish reason was not cut.

    Raises:
        InputError: a line without them, or with ids that cannot be this model's; or a file without samples.
    """
    prompts: list[int] = []
    completions: list[int] = []
    numbers: dict[bytes, int] = {}
    prompt_numbers: list[int] = []
    were_cut: list[bool] = []
    places: list[str] = []
    for line, record in read_jsonl(path):
        places.append(f"{path}:{line}")
        prompt_ids, completion_ids = token_ids_from_record(record, where=places[-1])
        check_token_ids(prompt_ids, completion_ids, architecture, where=places[-1])
        prompts.append(len(prompt_ids))
        completions.append(len(completion_ids))
        were_cut.append(record.get("finish_reason") == "length")
        prompt_numbers.append(numbers.setdefault(prompt_ids.tobytes(), len(numbers)))
    if not places:
        raise InputError(f"--plan: {path} holds no samples")
    lengths = SequenceLengths(*(np.asarray(column, np.int64) for column in (prompts, completions, prompt_numbers)))
    return lengths, np.asarray(were_cut), places[int(lengths.totals.argmax())]


def build_packing_report(
    micro_batcher: FixedRowBatcher | PackedRowBatcher,
    lengths: SequenceLengths,
    work: SequenceCost,
    mesh: Mesh,
    *,
    file: str,
    role: PassRole,
) -> PackingReport:
    """The plan of one host that has all samples. `work` weighs devices against each other."""
    num_devices = num_local_row_shards(mesh)
    (plan,) = micro_batcher.plan([lengths], devices_per_host=num_devices)
    quota = micro_batcher.max_tokens_per_device
    return PackingReport(
        file=file,
        role=role,
        mesh=dict(mesh.shape),
        num_devices=num_devices,
        max_tokens_per_device=quota,
        num_samples=len(lengths.prompts),
        num_tokens=int(lengths.totals.sum()),
        micro_batches=tuple(_micro_batch_stats(one, lengths, work, num_devices) for one in plan.micro_batches),
        figures=_plan_metrics(plan, lengths, work, num_devices, quota),
        padded=None if quota is None else _padded_plan(lengths, work, num_devices, quota),
        rows=tuple(_drawn_rows(plan, lengths, num_devices)),
    )


def _plan_metrics(
    plan: MicroBatchPlan, lengths: SequenceLengths, work: SequenceCost, num_devices: int, quota: int | None
) -> dict[str, float]:
    return packing_stats([plan], [lengths], work, devices_per_host=num_devices, max_tokens_per_device=quota)


def _padded_plan(lengths: SequenceLengths, work: SequenceCost, num_devices: int, quota: int) -> PaddedPlan:
    shape = bucketed_row_shape(int(lengths.totals.max()), int(lengths.completions.max()))
    rows = max(1, quota // shape.num_tokens)
    (plan,) = plan_fixed_rows([lengths], rows_per_device=rows, devices_per_host=num_devices, trim_tail=True)
    figures = _plan_metrics(plan, lengths, work, num_devices, None)
    held = len(plan.micro_batches[0].rows) // num_devices
    return PaddedPlan(held, plan.num_micro_batches, int(figures["computed_tokens"]), figures["fill"])


def _micro_batch_stats(
    micro_batch: MicroBatch, lengths: SequenceLengths, work: SequenceCost, num_devices: int
) -> MicroBatchStats:
    figures = _plan_metrics(MicroBatchPlan((micro_batch,)), lengths, work, num_devices, None)
    return MicroBatchStats(
        rows_per_device=len(micro_batch.rows) // num_devices,
        tokens_per_row=micro_batch.shape.num_tokens,
        num_samples=sum(len(segment) for row in micro_batch.rows for segment in row),
        real_tokens=int(figures["real_tokens"]),
        fill=figures["fill"],
        flops_imbalance=figures["flops_imbalance"],
        rows=micro_batch.rows,
    )


def _drawn_rows(plan: MicroBatchPlan, lengths: SequenceLengths, num_devices: int) -> Sequence[PlottedRow]:
    return [
        PlottedRow(number, i * num_devices // len(one.rows), one.shape.num_tokens, _pieces(row, lengths))
        for number, one in enumerate(plan.micro_batches, start=1)
        for i, row in enumerate(one.rows)
    ]


def _pieces(row: PackedRow, lengths: SequenceLengths) -> tuple[TokenSpan, ...]:
    return tuple(
        piece
        for number, segment in enumerate(row)
        for piece in (
            TokenSpan(number, True, int(lengths.prompts[segment[0]])),
            *(TokenSpan(number, False, int(lengths.completions[i])) for i in segment),
        )
    )
