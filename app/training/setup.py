"""Makes all checks of a run before it writes files, loads weights or compiles; `--dry-run` makes the same checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import jax

from app.advantage.custom_estimator import CustomEstimator
from app.distributed.collectives import error_barrier
from app.distributed.host_consistency import check_hosts_agree
from app.distributed.watchdog import Watchdog
from app.mesh import jax_startup
from app.mesh.device_mesh import num_hosts
from app.mesh.devices import device_memory_bytes
from app.mesh.placement import check_host_memory, num_row_shards
from app.model.attention.packed import architecture_blocking
from app.records.identity import plugin_file_digests, prompts_digest
from app.records.run_directory import Resume, RunDirectory, check_run_directory, is_address
from app.records.settings_history import SettingsHistory
from app.records.text_format import format_bytes, format_count
from app.reward.reward_functions import RewardFunctions
from app.runtime.advantages import with_saved_advantages
from app.runtime.environments import try_episode
from app.runtime.generators import check_async_workers
from app.runtime.host_supervision import watch_hosts
from app.runtime.inputs import open_custom_estimator
from app.runtime.mesh_checks import check_experts, check_fixed_micro_batches, replicated_dim_notes
from app.runtime.model_spec import NetworkSpec, adapter_notes
from app.runtime.pinned_revisions import pin_revisions
from app.runtime.reward_model import reward_model_notes
from app.runtime.reward_trial import try_reward_functions
from app.runtime.scoring import ScoringSession, devices_set_aside, open_mesh
from app.runtime.session import Session
from app.training.inputs import TrainingInputs, read_training_inputs
from app.training.learner import LearnerGroup, longest_rows, make_learner_group
from app.training.network_memory import network_bytes, reference_bytes
from app.training.replay import NO_OPTIONS, StartRequest, find_model_run
from app.training.run_folder import RunFolder, take_run_directory
from settings import Resolved, Settings
from settings.checks.resumed_settings import changed_settings, check_allowed
from settings.errors import InputError
from settings.loading.printing import from_yaml


@dataclass(frozen=True)
class RunSetup:
    """A run that has passed all checks, before it writes any file."""

    resolved: Resolved
    folder: RunFolder
    inputs: TrainingInputs
    rewards: RewardFunctions
    """The reward functions, whose worker processes have been started."""
    session: Session
    learning: LearnerGroup
    """The advantage estimator and the learners; in a replay, the estimator may use saved advantages."""
    watchdog: Watchdog
    notes: tuple[str, ...]
    """Notes for users, for example about the mesh and the adapters."""
    allow_changed: Sequence[str] = ()
    """Settings and sections that a resumed run may change although they affect what it learns."""

    @property
    def run(self) -> RunDirectory:
        return self.folder.run

    @property
    def steps(self) -> range:
        """The steps of the run; a replay starts after its checkpoint and ends with its samples."""
        replay, last = self.inputs.replay, self.resolved.settings.run.steps
        return range(1, last + 1) if replay is None else range(min(replay.files), max(replay.files) + 1)


@contextmanager
def prepare_run(
    resolved: Resolved,
    *,
    resume: Resume,
    start_request: StartRequest = NO_OPTIONS,
    allow_changed: Sequence[str] = (),
    compiles: bool = False,
    writes: bool = False,
) -> Iterator[RunSetup]:
    """Joins the other hosts, then checks run directory, model, tokenizer, data, reward functions and mesh.

    `compiles` is explained in `initialize_distributed`, `writes` in `take_run_directory`, the rest in `train`.

    Raises:
        InputError: an input cannot be used on one of the hosts, or the inputs of the hosts differ.
    """
    with ExitStack() as stack:
        jax_startup.initialize_distributed(resolved.settings.mesh, compiles=compiles)
        check_mini_batch_alias(resolved, num_hosts=jax.process_count())
        crash_dir = RunDirectory.from_settings(resolved.settings.run).crash_dir
        watchdog = stack.enter_context(watch_hosts(resolved.settings, crash_dir))
        resolved, folder = stack.enter_context(take_run_directory(resolved, resume, writes=writes))
        settings, run = resolved.settings, folder.run
        with error_barrier():
            # First, because data and models take longer to read.
            check_fixed_micro_batches(settings, open_mesh(settings, set_aside=devices_set_aside(settings)))
            if folder.is_seen_by_all or jax.process_index() == 0:
                check_run_directory(run, resume, is_mirrored=is_address(settings.run.dir))
            changes = _check_changed_settings(resolved, run, allow_changed)
            # A hub model has the commit of this run, or of the run that it replays or starts from.
            known = None if run.model_path.is_file() else find_model_run(start_request)
            read = read_training_inputs(pin_revisions(settings, known or run), start_request)
            repeated = () if read.replay else repeated_prompts_notes(settings, num_prompts=len(read.prompts))
            rewards = stack.enter_context(read.make_rewards(settings))
            if read.judged_prompts and not (read.replay and read.replay.uses_saved_rewards):
                try_reward_functions(rewards, read.model.tokenizer, read.judged_prompts)
            custom = None
            if read.replay is None or not read.replay.uses_saved_advantages:
                custom = open_custom_estimator(settings, read.prompts, read.model.tokenizer, stack)
            if read.judged_prompts and read.replay is None and settings.env.is_used:
                try_episode(settings, read.model.tokenizer, read.judged_prompts[0])
            facts = dict[str, str]()
            if jax.process_count() > 1:
                facts = read.fingerprints | {"the evaluation prompts": prompts_digest(read.eval_prompts)}
                facts |= file_fingerprints(settings, run)
        check_hosts_agree(resolved, facts)
        scoring = ScoringSession.open(settings, read.model, read.critic, read.teacher, trains=True)
        given = {"custom": custom, "is_replay": read.replay is not None, "must_fit": writes}
        session, learning = open_session(scoring, read.reward_model, **given)
        stack.enter_context(closing(session))
        if read.replay is not None:
            learning = dataclasses.replace(learning, max_rounds=1)
            if read.replay.uses_saved_advantages:
                estimator = with_saved_advantages(learning.advantage_estimator)
                learning = dataclasses.replace(learning, estimator=estimator)
        notes = (
            *changes,
            *setup_notes(settings, session),
            *reward_model_notes(read.reward_model, read.model),
            *repeated,
        )
        if jax.process_count() > 1:
            writers = "all hosts see it, and each writes its part of a checkpoint"
            alone = "not all hosts see it, so process 0 keeps all files of the run"
            notes += (f"run.dir: {run.path}: {writers if folder.is_seen_by_all else alone}",)
        yield RunSetup(resolved, folder, read, rewards, session, learning, watchdog, notes, allow_changed)


def check_mini_batch_alias(resolved: Resolved, *, num_hosts: int) -> None:
    """Raises InputError if there are several hosts and `algorithm.mini_batch_prompts` is set by its name in verl."""
    field = "algorithm.mini_batch_prompts"
    alias, count = resolved.aliases.get(field), resolved.settings.algorithm.mini_batch_prompts
    if alias is not None and count is not None and num_hosts > 1:
        way_out = f"set {field}={count // num_hosts}"
        if count % num_hosts:
            way_out = f"choose a multiple of {num_hosts}, and set {field} to it divided by {num_hosts}"
        raise InputError(
            f"{alias}: {count} ({resolved.origin(field)}) counts the prompts of all {num_hosts} hosts in verl, but "
            f"{field} counts the prompts of one host; {way_out}"
        )


def _check_changed_settings(resolved: Resolved, run: RunDirectory, allowed: Sequence[str]) -> list[str]:
    """Returns a line for each setting that differs from the run's last session, after warnings about lost settings.

    Raises:
        InputError: a change affects what the run learns and is not in `allowed`.
    """
    if not run.has_checkpoint:
        return []
    current = from_yaml(resolved.to_yaml().encode(), name="settings")
    history = SettingsHistory.read(run)
    changes = changed_settings(history.periods[-1].settings, current)
    check_allowed(changes, allowed)
    texts = {change.name: change.to_text() for change in changes}
    schedule = resolved.settings.optimizer.schedule
    if "run.steps" in texts and schedule != "constant":
        reason = f"because the {schedule} schedule ends at the last one"
        texts["run.steps"] += f"; this changes the learning rate of the remaining steps, {reason}"
    return [*(f"warning: {gap}" for gap in history.gaps), *(f"changed: {text}" for text in texts.values())]


def open_session(
    scoring: ScoringSession,
    reward_model: NetworkSpec | None,
    *,
    custom: CustomEstimator | None = None,
    is_replay: bool = False,
    must_fit: bool = False,
) -> tuple[Session, LearnerGroup]:
    """Builds the learners of a run, and opens its generators in the remaining memory.

    If the samples are replayed or come from the data, only evaluations generate.

    Args:
        custom: the plug-in of `algorithm.estimator`; None without one.
        is_replay: whether samples are replayed.
        must_fit: whether to raise InputError for a teacher that does not fit in memory.

    Raises:
        InputError: the mesh cannot train under the settings.
    """
    settings, mesh = scoring.settings, scoring.mesh
    check_fixed_micro_batches(settings, mesh)
    if reward_model is not None:
        check_experts(mesh, reward_model.architecture, path=reward_model.files.name)
    if settings.offloads_reference:
        check_host_memory(mesh, "score.reference.offload")
    if settings.optimizer.offload:
        check_host_memory(mesh, "optimizer.offload")
    learning = make_learner_group(scoring, custom)
    with jax.set_mesh(mesh):
        # Raises InputError if `model.attention` needs a kernel that cannot hold the longest rows.
        for network, num_tokens in longest_rows(scoring, learning, reward_model):
            architecture_blocking(network, num_tokens, settings.model.dtype)
    networks = network_bytes(scoring, learning, reward_model)
    held_bytes = sum(networks.values())
    available, weights = device_memory_bytes(), sum(reference_bytes(scoring).values())
    beside = sum({**networks, "reference": 0}.values())
    if must_fit and scoring.teacher is not None and available is not None and weights + beside > available:
        raise InputError(
            f"reference.path: on each device, the teacher's weights ({format_bytes(weights)}) and the other "
            f"networks ({format_bytes(beside)}) exceed the available {format_bytes(available)}; set optimizer.offload: "
            "true, choose a smaller teacher, or split the weights over more devices with mesh.shape"
        )
    generates = "evaluations" if settings.eval.every_steps else None
    if not (is_replay or settings.is_supervised):
        generates = "rollouts"
    session = Session.open(scoring, generates=generates, held_bytes=held_bytes)
    if session.workers is not None and session.generates_async and not scoring.generation_devices:
        check_async_workers(session.workers)
    return session, learning


def file_fingerprints(settings: Settings, run: RunDirectory) -> dict[str, str]:
    """Returns the fingerprints of plug-in files and of the newest checkpoint, for comparing the hosts early."""
    return {
        **plugin_file_digests("reward.functions", [one.function for one in settings.reward.functions]),
        **plugin_file_digests("algorithm.estimator", [settings.algorithm.estimator]),
        **plugin_file_digests("env.source", [settings.env.source]),
        **plugin_file_digests("env.tools", settings.env.tools),
        "the newest checkpoint in run.dir": run.describe_newest_checkpoint(),
    }


def repeated_prompts_notes(settings: Settings, *, num_prompts: int) -> tuple[str, ...]:
    """Returns a note if a step has more prompts than the data; raises InputError if a curriculum chooses prompts."""
    step = settings.rollout.prompts_per_step * jax.process_count()
    if step <= num_prompts:
        return ()
    if settings.data.curriculum != "none":
        raise InputError(
            f"data.curriculum: the prompts of a step, {step:,}, must differ, but data.source has only {num_prompts:,}; "
            "lower rollout.prompts_per_step, add data, or set data.curriculum to none"
        )
    return (
        f"a step has {step:,} prompts and data.source only {num_prompts:,}, so each prompt occurs "
        f"{step / num_prompts:.3g} times in a step; lower rollout.prompts_per_step, or add data",
    )


def setup_notes(settings: Settings, session: Session) -> tuple[str, ...]:
    """Returns notes for users about hosts, adapters, teacher, replicated weights and generation."""
    mesh, rollout, of_teacher = session.mesh, settings.rollout, ()
    if (teacher := session.scoring.teacher) is not None:
        name, count = f"{teacher.files.name} ({teacher.architecture.family})", teacher.definition.num_parameters
        of_teacher = (f"reference.path: the teacher is {name}, with {count:,} own weights",)
    notes = (
        *adapter_notes(session.model_spec, has_critic=settings.has_critic),
        *of_teacher,
        *replicated_dim_notes(mesh, session.model_spec.architecture),
        *session.generation_notes,
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
        f"{format_count(settings.updates_per_step, 'optimizer step')} of "
        f"{samples // settings.num_mini_batches} samples each",
        *notes,
    )
