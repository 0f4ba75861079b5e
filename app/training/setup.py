"""What a launch checks before it writes, loads or compiles anything; `--dry-run` checks the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import jax

from app.distributed.host_consistency import agree, check_shared, newest_checkpoint, plug_in_digests, prompts_digest
from app.distributed.lockstep import together
from app.distributed.status_board import Bulletin
from app.distributed.watchdog import Watchdog
from app.mesh import topology
from app.mesh.placement import num_row_shards
from app.mesh.topology import num_hosts
from app.records.run_directory import Resume, RunDirectory, check_claim
from app.reward.reward_functions import Rewards
from app.runtime.advantages import saved_crediting
from app.runtime.batch_checks import check_host_memory, check_rows
from app.runtime.generators import check_runs_ahead
from app.runtime.host_group import guarded
from app.runtime.mesh_checks import whole_dims
from app.runtime.model_spec import adapter_lines
from app.runtime.pinned_revisions import pinned
from app.runtime.placement_notes import placement_lines
from app.runtime.session import Session
from app.training.inputs import TrainingInput, read_training_input
from app.training.learner import Learning, wire_learning
from app.training.replay import Asked, known_run
from settings import Resolved, Settings


@dataclass(frozen=True)
class Launch:
    """A run that nothing known beforehand stands in the way of. Nothing on disk has changed."""

    resolved: Resolved
    run: RunDirectory
    input: TrainingInput
    rewards: Rewards
    """Open: workers are running."""
    session: Session
    bulletin: Bulletin
    watchdog: Watchdog
    notes: tuple[str, ...]
    """What a person should know of the mesh."""

    def learning(self) -> Learning:
        """Credit and updates under the settings; of a replay, with what the samples bring."""
        learning, replay = wire_learning(self.resolved.settings, self.session), self.input.replay
        if replay is None:
            return learning
        credit = saved_crediting(learning.credit) if replay.takes_credit else learning.credit
        return dataclasses.replace(learning, credit=credit, max_rounds=1)

    @property
    def steps(self) -> range:
        """Of the run, from the first on; a replay begins after its checkpoint, and ends with its samples."""
        replay, last = self.input.replay, self.resolved.settings.run.steps
        return range(1, last + 1) if replay is None else range(min(replay.files), max(replay.files) + 1)


@contextmanager
def prepared(resolved: Resolved, *, resume: Resume, asked: Asked | None = None) -> Iterator[Launch]:
    """Joins the other hosts, then looks at run directory, model, tokenizer, data, reward functions and mesh in turn.

    Args:
        asked: to learn from samples of files.

    Raises:
        InputError: for the first that cannot be used, on this host or another; for what hosts differ in.
    """
    settings, run = resolved.settings, RunDirectory.of(resolved.settings.run)
    with ExitStack() as stack:
        topology.start(settings.mesh)
        bulletin, watchdog = stack.enter_context(guarded(settings, run.crash))
        with together():
            read = _read(settings, run, resume, asked)
            rewards = stack.enter_context(read.rewards(settings))
            facts = _facts(settings, run, read)
        agree(resolved, facts)
        check_shared(run)
        session = Session.open(settings, read.model, read.critic, generates=_generates(settings, read))
        stack.enter_context(closing(session))
        check_session(settings, session)
        notes = launch_notes(settings, session)
        yield Launch(resolved, run, read, rewards, session, bulletin=bulletin, watchdog=watchdog, notes=notes)


def _read(settings: Settings, run: RunDirectory, resume: Resume, asked: Asked | None) -> TrainingInput:
    check_claim(run, resume)
    # A hub model is at the commit that the run had, or the one that it replays.
    known = None if asked is None or run.model.is_file() else known_run(asked)
    return read_training_input(pinned(settings, known or run), asked)


def _generates(settings: Settings, read: TrainingInput) -> bool:
    """Whether slots or workers are needed. A replay only evaluates, and beside workers that run ahead not with them."""
    return read.replay is None or (bool(read.held_out) and settings.rollout.max_staleness == 0)


def check_session(settings: Settings, session: Session) -> None:
    """Raises InputError where the mesh of a session cannot train under the settings."""
    check_rows(settings, session)
    if session.workers is not None and session.runs_ahead:
        check_runs_ahead(session.workers)
    if settings.offloads_reference:
        check_host_memory(session.mesh)


def _facts(settings: Settings, run: RunDirectory, read: TrainingInput) -> dict[str, str]:
    """What hosts must have in common beside their settings."""
    if jax.process_count() == 1:
        return {}
    return {
        **read.fingerprints,
        "the evaluation prompts": prompts_digest(read.held_out),
        **facts_of_files(settings, run),
    }


def facts_of_files(settings: Settings, run: RunDirectory) -> dict[str, str]:
    """Those that need no model and no data."""
    return {
        **plug_in_digests(settings.reward.functions),
        f"the newest checkpoint in {run.path}": newest_checkpoint(run),
    }


def launch_notes(settings: Settings, session: Session) -> tuple[str, ...]:
    """The arithmetic of a step over several hosts, weights that tp leaves whole, and what moves them at every token."""
    mesh, rollout = session.mesh, settings.rollout
    notes = (
        *adapter_lines(session.input, has_critic=settings.has_critic),
        *whole_dims(mesh, session.input.architecture),
        *placement_lines(settings, session.engine.definition, mesh),
    )
    if num_hosts(mesh) == 1:
        return notes
    prompts = rollout.prompts_per_step * num_hosts(mesh)
    samples = prompts * rollout.group_size
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return (
        f"{num_hosts(mesh)} hosts, {mesh.size} devices ({axes}): {rollout.prompts_per_step} prompts x "
        f"{rollout.group_size} samples x {num_hosts(mesh)} hosts = {samples} samples a step, "
        f"{samples / num_row_shards(mesh):g} a {'device' if mesh.shape['tp'] == 1 else 'group of tp devices'}; "
        f"{settings.updates_per_step} optimizer step{'s' if settings.updates_per_step > 1 else ''} of "
        f"{samples // settings.num_mini_batches} samples each",
        *notes,
    )
