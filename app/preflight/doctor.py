"""`grpo doctor`: runs every check of a launch and reports all failures, not only the first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass

import jax

from app.distributed.collectives import any_host, error_barrier, gather_json_over_hosts
from app.distributed.host_consistency import check_hosts_agree
from app.evaluation.prompt_metrics import check_best_metric
from app.mesh.devices import device_memory_bytes, device_platform, global_devices, host_memory_bytes, unused_accelerator
from app.preflight.attention_check import check_attention
from app.preflight.check_results import CheckRecorder, CheckResult, DoctorReport
from app.preflight.environment_checks import (
    check_disk,
    check_hub_source,
    check_versions,
    check_wandb,
    hub_offline,
    hub_sources,
)
from app.preflight.gradient_check import check_gradients
from app.preflight.model_checks import (
    check_answer,
    check_chat_template,
    check_forward_pass,
    check_reward_functions,
    check_reward_model,
    too_large_reason,
)
from app.preflight.phase_memory import memory_by_phase, outline_step, peak_phase, state_bytes
from app.preflight.sample_file_size import estimate_sample_files
from app.prompts.dataset import Dataset
from app.prompts.encode import encode_prompts
from app.records.identity import prompts_digest
from app.records.run_directory import RunDirectory, check_run_directory, is_address
from app.records.sample import Prompt
from app.records.text_format import format_bytes, format_count
from app.records.versions import minimum_versions
from app.runtime.environments import prepare_turns, try_episode
from app.runtime.host_supervision import join_hosts
from app.runtime.inputs import (
    encode_train_data,
    open_custom_estimator,
    read_checked_reward_model,
    read_critic,
    read_eval_rows,
    read_policy,
    read_teacher,
    read_train_rows,
)
from app.runtime.model_spec import ModelSpec, NetworkSpec
from app.runtime.pinned_revisions import pin_revisions
from app.runtime.reward_model import RewardModelSpec
from app.runtime.reward_trial import make_trial_samples
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from app.tracking.bucket import bucket_of
from app.tracking.run_mirror import check_lease
from app.training.inputs import dataset_fingerprints, input_fingerprints
from app.training.learner import LearnerGroup
from app.training.network_memory import host_bytes, network_bytes
from app.training.run_folder import RunFolder, take_run_directory
from app.training.setup import file_fingerprints, open_session, setup_notes
from settings import Resolved, Settings
from settings.checks.commands import check_for_train
from settings.checks.unused_settings import launch_notices
from settings.errors import InputError

MAX_START_S = 20
"""Maximum number of seconds that the checks wait for the other hosts to join."""
NOT_CACHED = "it is not in this machine's cache"
NO_TOKENIZER = "prompts cannot be encoded without a tokenizer"


@dataclass
class PreflightInputs:
    """A run's models and data. Inputs that are not used or cannot be read are None or empty."""

    model: ModelSpec | None = None
    critic: NetworkSpec | None = None
    teacher: NetworkSpec | None = None
    reward_model: RewardModelSpec | None = None
    dataset: Dataset | None = None
    prompts: Sequence[Prompt] = ()
    held_out: Sequence[Prompt] = ()

    @property
    def weight_checks(self) -> tuple[str, ...]:
        """Names of the checks that load weights; `reward model` only if there is one and it could be read."""
        return ("forward", "answer", *(() if self.reward_model is None else ("reward model",)))


def run_doctor(resolved: Resolved) -> DoctorReport:
    """Runs all checks on all hosts together. Downloads nothing, and leaves neither files nor a run directory behind."""
    start, settings = time.perf_counter(), resolved.settings
    recorder, run = CheckRecorder(), RunDirectory.from_settings(settings.run)
    with suppress(InputError):
        # Uses the revisions of a resumed run. If their record is unreadable, the check of the run directory fails.
        settings = pin_revisions(settings, run)
    with ExitStack() as stack:
        has_devices = _start_devices(recorder, settings, run, stack)
        with recorder.run_check("settings"):
            check_for_train(resolved)
            recorder.ok("settings", "\n".join(launch_notices(resolved)) or "the settings are consistent")
        check_versions(recorder, minimum_versions())
        with recorder.run_check("run directory"):
            _check_run_directory(recorder, run, settings)
        if is_address(settings.run.dir) and not (has_devices and jax.process_index()):
            with recorder.run_check("bucket"):
                _check_bucket(recorder, settings)
        check_wandb(recorder, settings)
        inputs = _read_inputs(recorder, settings)
        checkpoint_bytes, folder = None, RunFolder(run, True, None)
        if has_devices:
            folder = _take_run_directory(recorder, resolved, folder, inputs, stack)
            opened = None if folder is None else _open_session(recorder, settings, inputs, stack)
            checkpoint_bytes = _check_memory(recorder, opened, inputs)
            _check_networks(recorder, opened, inputs)
        else:
            recorder.skip("mesh", "memory", "attention", *inputs.weight_checks, reason="there are no devices")
        with recorder.run_check("disk"):
            samples, gathers = None, folder is not None and not folder.is_seen_by_all
            if inputs.prompts:
                hosts = jax.process_count() if has_devices else 1
                samples = estimate_sample_files(settings, inputs.prompts, inputs.held_out, num_hosts=hosts)
            if not gathers or jax.process_index() == 0:
                check_disk(recorder, run.path, settings, checkpoint_bytes, samples, gathers=gathers)
        host = jax.process_index() if has_devices else 0
        results = _gather_results(recorder.results) if has_devices else recorder.results
    return DoctorReport(results, time.perf_counter() - start, host)


def _start_devices(recorder: CheckRecorder, settings: Settings, run: RunDirectory, stack: ExitStack) -> bool:
    """Joins the other hosts and returns whether the devices could be started."""
    with recorder.run_check("devices"):
        # A run may wait a long time for slow machines; a check should soon report which one is missing.
        timeout_s = min(settings.mesh.start_timeout_s, MAX_START_S)
        mesh = settings.mesh.model_copy(update={"start_timeout_s": timeout_s})
        crash_dir = run.path.with_name(f"{run.path.name}.doctor")
        stack.enter_context(join_hosts(settings.model_copy(update={"mesh": mesh}), out=crash_dir))
        devices, memory = global_devices(settings.mesh), device_memory_bytes()
        size = "memory unknown" if memory is None else f"{format_bytes(memory)} each"
        kind = f"{devices[0].device_kind} ({devices[0].platform})"
        found = f"{len(devices)} x {kind}, {size}, on {jax.process_count()} host(s)"
        if extra := unused_accelerator(settings.mesh, devices[0].platform):
            advice = f"pip install -e '.[{extra}]' in the checkout, or set mesh.platform: cpu"
            recorder.warn("devices", f"{found}, but this machine has an accelerator", advice)
        else:
            recorder.ok("devices", found)
        return True
    return False


def _check_run_directory(recorder: CheckRecorder, run: RunDirectory, settings: Settings) -> None:
    check_run_directory(run, "auto")
    pin_revisions(settings, run)
    if run.has_settings or run.has_checkpoint:
        steps = f"checkpoints of steps {', '.join(map(str, sorted(run.checkpoint_steps)))}" * run.has_checkpoint
        advice = "continue it with --resume auto, or choose another run.name"
        recorder.warn("run directory", f"{run.path} already holds a run, {steps or 'without a checkpoint'}", advice)
    else:
        recorder.ok("run directory", f"{run.path} can be written to")


def _check_bucket(recorder: CheckRecorder, settings: Settings) -> None:
    bucket = bucket_of(settings.run)
    bucket.check("auto", RunDirectory.from_settings(settings.run))
    check_lease(bucket)
    if bucket.has_run:
        advice = "continue it with --resume auto, or choose another run.name"
        recorder.warn("bucket", f"{bucket.address} already holds a run", advice)
    else:
        recorder.ok("bucket", f"{bucket.address} can be written to, and no other process writes there")


def _read_inputs(recorder: CheckRecorder, settings: Settings) -> PreflightInputs:
    """Reads all inputs of a launch from this machine only, and checks the chat template and the rewards."""
    inputs, sources = PreflightInputs(), hub_sources(settings)
    cached = {source.setting for source in sources if source.is_cached_model}
    with hub_offline(sources):
        _read_models(recorder, settings, inputs, {one.setting for one in sources if one.kind == "model"} - cached)
        _read_data(recorder, settings, inputs, [one.setting for one in sources if one.kind == "dataset"], cached)
    for source in sources:
        with recorder.run_check(f"hub: {source.setting}"):
            check_hub_source(recorder, source, is_cached=source.setting in cached)
    if inputs.model is None or not inputs.prompts:
        skipped = ("template", "reward", *(("environment",) if settings.env.is_used else ()))
        recorder.skip(*skipped, reason="there is no prompt")
        return inputs
    with recorder.run_check("template"):
        rows = () if inputs.dataset is None else inputs.dataset.rows
        check_chat_template(recorder, settings, inputs.model.tokenizer, inputs.prompts[0], rows)
    # Given completions get no rewards.
    judged = inputs.held_out if settings.is_supervised else inputs.prompts
    if not judged:
        recorder.skip("reward", reason="completions are given, and there is no evaluation")
        return inputs
    with recorder.run_check("reward"):
        samples = make_trial_samples(inputs.model.tokenizer, judged)
        check_reward_functions(recorder, settings, samples, judged, inputs.held_out)
        with ExitStack() as stack:
            if (custom := open_custom_estimator(settings, judged, inputs.model.tokenizer, stack)) is not None:
                recorder.ok("advantage", custom.plug_in.summary)
    if settings.env.is_used:
        with recorder.run_check("environment"):
            recorder.ok("environment", try_episode(settings, inputs.model.tokenizer, judged[0]))
    return inputs


def _read_models(recorder: CheckRecorder, settings: Settings, inputs: PreflightInputs, absent: set[str]) -> None:
    """Reads policy, critic, teacher and reward model, except for those whose settings are in `absent`."""
    if "model.path" in absent:
        recorder.skip("model", reason=NOT_CACHED)
    else:
        with recorder.run_check("model"):
            inputs.model = read_policy(settings)
            prepare_turns(settings, inputs.model.tokenizer)
            size, context = inputs.model.definition.num_parameters, inputs.model.architecture.max_positions
            tokens = f"a tokenizer with {inputs.model.tokenizer.vocab_size:,} tokens, a context of {context:,} tokens"
            family = inputs.model.architecture.family
            recorder.ok("model", f"{settings.model.path}: {family}, {size:,} parameters, {tokens}")
    of_critic, of_teacher = settings.critic.path or settings.model.path, settings.reference.source
    for name, setting, read, is_used, found in (
        ("critic", "critic.path", read_critic, settings.has_critic, f"{of_critic}: its tokenizer equals the policy's"),
        ("teacher", "reference.path", read_teacher, settings.has_teacher, f"{of_teacher}: its tokens are the policy's"),
    ):
        if is_used and (inputs.model is None or setting in absent):
            recorder.skip(name, reason=f"the {name} or the policy could not be read")
        elif is_used and inputs.model is not None:
            with recorder.run_check(name):
                setattr(inputs, name, read(settings, inputs.model))
                recorder.ok(name, found)
    if "reward.model" in absent:
        recorder.skip("reward model", reason=NOT_CACHED)
    else:
        with recorder.run_check("reward model"):
            inputs.reward_model = read_checked_reward_model(settings)


def _read_data(
    recorder: CheckRecorder, settings: Settings, inputs: PreflightInputs, hub_settings: Sequence[str], cached: set[str]
) -> None:
    """Reads prompts and held-out prompts; adds to `cached` the settings of the hub data sets that could be read."""

    @contextmanager
    def skip_uncached(check: str, setting: str) -> Iterator[None]:
        named = [name for name in hub_settings if name.startswith(setting)]
        try:
            yield
        except InputError as error:
            # `datasets` raises a ValueError for a missing configuration.
            absent = isinstance(error.__cause__, OSError) or "Couldn't find cache" in str(error.__cause__)
            if not named or not absent:
                raise
            recorder.skip(check, reason=NOT_CACHED)
        else:
            cached.update(named)

    tokenizer = None if inputs.model is None else inputs.model.tokenizer
    with recorder.run_check("data"), skip_uncached("data", "data.source"):
        inputs.dataset = read_train_rows(settings)
        found = f"{inputs.dataset.to_text()}; {NO_TOKENIZER}"
        if tokenizer is not None:
            inputs.prompts, _, found = encode_train_data(settings, inputs.dataset, tokenizer)
            if inputs.reward_model is not None:
                inputs.reward_model.check_prompt(inputs.prompts[0])
        recorder.ok("data", found)
    if not settings.eval.every_steps:
        return
    setting = "data.eval_source" if settings.data.eval_source else "data.source"
    source = settings.data.eval_source or settings.data.source
    with recorder.run_check("held-out data"), skip_uncached("held-out data", setting):
        rows = read_eval_rows(settings)
        found = f"{format_count(len(rows), 'row')} of {source}; {NO_TOKENIZER}"
        if tokenizer is not None:
            inputs.held_out, _ = encode_prompts(rows, tokenizer, settings.data)
            check_best_metric(settings, inputs.held_out)
            found = f"{format_count(len(inputs.held_out), 'prompt')} of {source}"
        recorder.ok("held-out data", found)


def _take_run_directory(
    recorder: CheckRecorder, resolved: Resolved, own: RunFolder, inputs: PreflightInputs, stack: ExitStack
) -> RunFolder | None:
    """Returns the run directory that all hosts use; None if hosts differ. All hosts must call it together."""
    if jax.process_count() == 1:
        return own
    with recorder.run_check("hosts"):
        resolved, folder = stack.enter_context(take_run_directory(resolved, "auto"))
        with error_barrier():
            facts = _host_facts(resolved.settings, folder.run, inputs)
        check_hosts_agree(resolved, facts)
        which = (
            "all can access run.dir"
            if folder.is_seen_by_all
            else "process 0 keeps the run, because not all hosts can access run.dir"
        )
        recorder.ok("hosts", f"all hosts have the same settings, code, packages and files; {which}")
        return folder
    # Different programs on different hosts would deadlock in their collectives.
    recorder.skip("mesh", reason="the hosts differ")
    return None


def _open_session(
    recorder: CheckRecorder, settings: Settings, inputs: PreflightInputs, stack: ExitStack
) -> tuple[Session, LearnerGroup] | None:
    """Opens the session of a launch; returns None if that fails. All hosts must call it together."""
    opened = None
    if inputs.model is None or not _has_other_networks(settings, inputs):
        recorder.skip("mesh", reason="the model could not be read")
        return None
    with recorder.run_check("mesh"):
        scoring = ScoringSession.open(settings, inputs.model, inputs.critic, inputs.teacher, trains=True)
        session, _ = opened = open_session(scoring, inputs.reward_model)
        stack.enter_context(closing(session))
        axes = ", ".join(f"{axis} {size}" for axis, size in session.mesh.shape.items())
        recorder.ok("mesh", "\n".join((axes, *setup_notes(settings, session))))
    return opened


def _host_facts(settings: Settings, run: RunDirectory, inputs: PreflightInputs) -> dict[str, str]:
    """Returns named fingerprints of the files and inputs on this host that must be equal on all hosts."""
    facts = file_fingerprints(settings, run)
    has_networks = _has_other_networks(settings, inputs)
    has_reward_model = inputs.reward_model is not None or settings.reward.model is None
    if inputs.model is not None and inputs.dataset is not None and has_networks and has_reward_model:
        data = dataset_fingerprints(settings, inputs.dataset)
        facts |= input_fingerprints(inputs.model, data, inputs.critic, inputs.reward_model, inputs.teacher)
        facts["the evaluation prompts"] = prompts_digest(inputs.held_out)
    return facts


def _has_other_networks(settings: Settings, inputs: PreflightInputs) -> bool:
    """Returns whether critic and teacher could be read, as far as the run uses them."""
    has_critic = inputs.critic is not None or not settings.has_critic
    return has_critic and (inputs.teacher is not None or not settings.has_teacher)


def _check_memory(
    recorder: CheckRecorder, opened: tuple[Session, LearnerGroup] | None, inputs: PreflightInputs
) -> int | None:
    """Checks that the arrays of each phase fit in memory; returns the bytes of a checkpoint, or None if unknown."""
    if opened is None:
        recorder.skip("memory", reason="there is no mesh")
        return None
    session, learning = opened
    checkpoint_bytes = None
    with recorder.run_check("memory"):
        checkpoint_bytes = state_bytes(learning)
        memory = {"update": network_bytes(session.scoring, learning, inputs.reward_model)}
        if inputs.prompts:
            step = outline_step(session, learning, inputs.prompts, inputs.held_out, inputs.reward_model)
            memory = memory_by_phase(step)
        phase, available = peak_phase(memory), device_memory_bytes()
        needed = sum(memory[phase].values())
        has = ", whose memory is unknown" if available is None else f", which has {format_bytes(available)}"
        found = f"{phase} needs the most memory, arrays of {format_bytes(needed)} on each device{has}"
        away, host_memory = host_bytes(session.scoring, learning) * len(session.mesh.local_devices), host_memory_bytes()
        if away:
            found += f"; {format_bytes(away)} stay in this host's memory of {format_bytes(host_memory)}"
        if away > host_memory:
            advice = "set optimizer.offload and score.reference.offload to false, or use more hosts"
            recorder.fail("memory", found, advice)
        elif available is not None and needed > available:
            recorder.fail("memory", found, "use more devices or a smaller model; grpo train --dry-run shows the parts")
        else:
            recorder.ok("memory", f"{found}; grpo train --dry-run --compile adds what programs need")
    return checkpoint_bytes


def _check_networks(
    recorder: CheckRecorder, opened: tuple[Session, LearnerGroup] | None, inputs: PreflightInputs
) -> None:
    """Checks attention and runs the networks with their real weights; skips this on all hosts if one host cannot."""
    if any_host(opened is None):
        reason = "the model or the mesh is missing on this host or on another one"
        recorder.skip("attention", *inputs.weight_checks, reason=reason)
        return
    assert opened is not None
    session, learning = opened
    check_attention(recorder, session.scoring, learning, inputs.reward_model)
    if any_host(not inputs.prompts):
        recorder.skip(*inputs.weight_checks, reason="the prompts are missing on this host or on another one")
        return
    params, definition = None, session.model_spec.reference_definition
    if (reason := too_large_reason(session, definition)) is not None:
        recorder.skip("forward", reason=reason)
    else:
        with recorder.run_check("forward"):
            params = check_forward_pass(recorder, session, inputs.prompts[0])
        # Generation has its own copy of the weights, and gradients take as much again.
        reason = too_large_reason(session, definition, num_copies=2)
    if any_host(params is None or reason is not None):
        recorder.skip("answer", reason=reason or "the forward pass fails on this host or on another one")
    else:
        assert params is not None
        with recorder.run_check("answer"):
            check_answer(recorder, session, params, inputs.prompts[0])
        if device_platform(session.mesh.devices.flat[0]) != "cpu":
            check_gradients(recorder, session, learning, params)
    if inputs.reward_model is not None:
        with recorder.run_check("reward model"):
            samples = make_trial_samples(session.model_spec.tokenizer, inputs.prompts)
            check_reward_model(recorder, session, inputs.reward_model, samples)


def _gather_results(local_results: Sequence[CheckResult]) -> Sequence[CheckResult]:
    """Returns all results of process 0 and the others' warnings and failures. All hosts must call it together."""
    of_hosts = enumerate(gather_json_over_hosts([asdict(result) for result in local_results]))
    results = [CheckResult(**{**one, "host": host}) for host, found in of_hosts for one in found]
    return [one for one in results if one.host == 0 or one.verdict in ("warn", "fail")]
