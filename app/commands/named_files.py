"""Quick checks, before JAX is loaded, that the files named in settings exist.

Only a single host checks them here; several hosts check together, after they have joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from app.commands.command_support import runs_alone
from app.prompts.dataset import find_files
from app.records.jsonl import read_jsonl_tolerant
from app.records.run_directory import Resume, RunDirectory, check_run_directory, is_address
from app.report.metrics_history import History
from settings import InputError, Settings
from settings.checks.unused_settings import WITH_SPLITS
from settings.errors import renamed_in_errors


def check_train_files(settings: Settings, *, resume: Resume, is_replay: bool) -> None:
    """Checks the run directory and, unless samples are replayed, the files of `check_named_files`.

    Raises:
        InputError: the run cannot start in its directory, or a file does not exist.
    """
    if runs_alone(settings.mesh):
        run, is_mirrored = RunDirectory.from_settings(settings.run), is_address(settings.run.dir)
        if is_mirrored:
            from app.tracking.bucket import bucket_of

            bucket_of(settings.run).check(resume, run)
        check_run_directory(run, resume, is_mirrored=is_mirrored)
        check_model_path("reference.path", settings.reference.path if settings.has_teacher else None)
        check_model_path("critic.path", settings.critic.path if settings.has_critic else None)
        check_model_path("reward.model", settings.reward.model)
    if not is_replay:
        evaluated = settings.data.eval_source if settings.eval.every_steps else None
        sources = [*(("data.source", one.source) for one in settings.data.sources), ("data.eval_source", evaluated)]
        judges = [one.function for one in settings.reward.functions]
        check_named_files(settings, sources, judges=judges, estimator=settings.algorithm.estimator)


def finished_history(settings: Settings) -> History | None:
    """Returns the metrics of a finished run; None for any other run, and with several hosts or a bucket."""
    run, last = RunDirectory.from_settings(settings.run), settings.run.steps
    if not runs_alone(settings.mesh) or max(run.checkpoint_steps, default=0) < last:
        return None
    if is_address(settings.run.dir):  # Its copy in the bucket may still lack files, which a start completes.
        return None
    lines = read_jsonl_tolerant(run.metrics_path) if run.metrics_path.is_file() else ()
    history = [record for _, record in lines if not isinstance(record, InputError)]
    # A step's line is written after its evaluation.
    return history if history and history[-1].get("step", 0) >= last else None


def check_named_files(
    settings: Settings,
    sources: Sequence[tuple[str, str | None]],
    *,
    judges: Sequence[str | None] = (),
    estimator: str | None = None,
) -> None:
    """Checks that the files of models, data, reward functions, environments and tools exist.

    Args:
        sources: (setting or option, source) of the data that the command reads.
        judges: the reward functions that the command calls.
        estimator: the advantage estimator that the command calls.

    Raises:
        InputError: a file does not exist.
    """
    if not runs_alone(settings.mesh):
        return
    check_model_path("model.path", settings.model.path)
    for setting, source in sources:
        if source and not source.startswith(WITH_SPLITS):
            with renamed_in_errors("data.source", to=setting):
                find_files(source)
    named = [("algorithm.estimator", estimator), *(("reward.functions", judge) for judge in judges)]
    named += [("env.source", settings.env.source), *(("env.tools", tool) for tool in settings.env.tools)]
    for place, plug_in in named:
        file = Path((plug_in or "").rpartition(":")[0])
        if file.suffix == ".py" and not file.is_file():
            raise InputError(f"{place}: {plug_in}: no such file: {file.absolute()}; correct the path")


def check_model_path(setting: str, path: str | None) -> None:
    """Raises InputError if a model path that cannot be a hub id does not exist."""
    if path and (path.startswith(("/", ".", "~")) or path.endswith(".gguf")) and not Path(path).expanduser().exists():
        raise InputError(
            f"{setting}: {path!r} is neither an existing directory or file nor a hub id; correct the path, or give a "
            "hub id such as Qwen/Qwen3-0.6B"
        )
