"""What a launch checks before it writes, loads or compiles anything; `--dry-run` checks the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from app.mesh import topology
from app.reward.rewards import Rewards
from app.training.pinned_model import pinned
from app.training.queues import check_runs_ahead
from app.training.run_directory import Resume, RunDirectory, check_claim
from app.training.session import Session
from app.training.training_input import TrainingInput, read_training_input
from app.training.wiring import check_host_memory, check_rows
from settings import Resolved


@dataclass(frozen=True)
class Launch:
    """A run that nothing known beforehand stands in the way of. Nothing on disk has changed."""

    resolved: Resolved
    run: RunDirectory
    input: TrainingInput
    rewards: Rewards
    """Open: workers are running."""
    session: Session


@contextmanager
def prepared(resolved: Resolved, *, resume: Resume) -> Iterator[Launch]:
    """Looks at the run directory, model, tokenizer, data, reward functions and mesh, in that order.

    Raises:
        InputError: for the first that cannot be used.
    """
    settings = resolved.settings
    run = RunDirectory.of(settings.run)
    check_claim(run, resume)
    training_input = read_training_input(pinned(settings, run))
    with training_input.rewards(settings) as rewards, ExitStack() as stack:
        topology.start(settings.mesh)
        session = stack.enter_context(closing(Session.open(settings, training_input.model, training_input.critic)))
        check_rows(settings, session)
        if session.workers is not None and session.runs_ahead:
            check_runs_ahead(session.workers)
        if "reference" in settings.scored_roles:
            check_host_memory(settings, session.mesh)
        yield Launch(resolved, run, training_input, rewards, session)
