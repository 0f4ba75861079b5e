"""What a launch checks before it writes, loads or compiles anything; `--dry-run` checks the same."""

from __future__ import annotations

from dataclasses import dataclass

from app.mesh import topology
from app.training.run_directory import Resume, RunDirectory, check_claim
from app.training.session import Session
from app.training.training_input import TrainingInput, read_training_input
from app.training.wiring import check_rows
from settings import Resolved


@dataclass(frozen=True)
class Launch:
    """A run that nothing known beforehand stands in the way of. Nothing on disk has changed."""

    resolved: Resolved
    run: RunDirectory
    input: TrainingInput
    session: Session


def prepare(resolved: Resolved, *, resume: Resume) -> Launch:
    """Looks at the run directory, model, tokenizer, data and mesh, in that order.

    Raises:
        InputError: for the first that cannot be used.
    """
    settings = resolved.settings
    run = RunDirectory.of(settings.run)
    check_claim(run, resume)
    training_input = read_training_input(settings)
    topology.start(settings.mesh)
    session = Session.open(settings, training_input.model)
    check_rows(settings, session)
    return Launch(resolved, run, training_input, session)
