"""Checks of the files that settings name, in the time of a look at the disk: before JAX is loaded.

Only a host alone checks them here: several check theirs together, once they have joined.
"""

from __future__ import annotations

from pathlib import Path

from app.prompts.dataset import find_files
from app.records.jsonl import read_jsonl_tolerant
from app.records.run_directory import Resume, RunDirectory, check_run_directory
from app.report.metrics_history import History
from settings import InputError, Settings
from settings.checks.unused_settings import WITH_SPLITS


def check_train_files(settings: Settings, *, resume: Resume, is_replay: bool) -> None:
    """Checks the run directory, and what `check_named_files` checks unless samples are replayed.

    Raises:
        InputError: a run cannot start there, or a file does not exist.
    """
    if settings.mesh.coordinator_address is None:
        check_run_directory(RunDirectory.from_settings(settings.run), resume)
    if not is_replay:
        check_named_files(settings)


def finished_history(settings: Settings) -> History | None:
    """Returns the metrics of a run that has saved and measured its last step; None if something is left to do."""
    run, last = RunDirectory.from_settings(settings.run), settings.run.steps
    if settings.mesh.coordinator_address is not None or max(run.checkpoint_steps, default=0) < last:
        return None
    lines = read_jsonl_tolerant(run.metrics_path) if run.metrics_path.is_file() else ()
    history = [record for _, record in lines if not isinstance(record, InputError)]
    # The line of a step is written after its evaluation.
    return history if history and history[-1].get("step", 0) >= last else None


def check_named_files(settings: Settings) -> None:
    """Checks that the files of the model, data, reward functions, environments and tools exist.

    Raises:
        InputError: one does not exist.
    """
    if settings.mesh.coordinator_address is not None:
        return
    model = settings.model.path
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().exists():
        raise InputError(f"model.path: {model!r} is neither an existing directory or file nor a hub id")
    evaluated = settings.data.eval_source if settings.eval.every_steps else None
    for source in (*(one.source for one in settings.data.sources), evaluated):
        if source and not source.startswith(WITH_SPLITS):
            find_files(source)
    named = [("reward.functions", one.function) for one in settings.reward.functions]
    named += [("env.source", settings.env.source), *(("env.tools", tool) for tool in settings.env.tools)]
    for place, plug_in in named:
        file = Path((plug_in or "").rpartition(":")[0])
        if file.suffix == ".py" and not file.is_file():
            raise InputError(f"{place}: {plug_in}: no such file: {file.absolute()}")
