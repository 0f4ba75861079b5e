"""`grpo doctor`: every piece of a launch in turn, each looked at even where one before it cannot be used."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import jax
import numpy as np

from app.distributed.collectives import gather_bytes_over_hosts, max_over_hosts
from app.distributed.host_consistency import check_hosts_agree, check_shared_run_directory, describe_prompts
from app.distributed.lockstep import error_barrier
from app.mesh import topology
from app.mesh.device_memory import device_memory_bytes
from app.preflight.check_results import EXIT_ENVIRONMENT, CheckRecorder, CheckResult, DoctorReport
from app.preflight.environment_checks import (
    CACHED_ANY_COMMIT,
    HUB_DATA_PREFIX,
    WANDB_KEY,
    BackgroundRequest,
    DiskUsage,
    HubSource,
    cached_model_commits,
    check_disk,
    check_hub_source,
    check_versions,
    check_wandb,
    estimate_disk_usage,
    fetch_wandb_user,
    format_size,
    hub_offline,
    hub_sources,
    request_hub_commits,
    unused_accelerator,
    uses_wandb_online,
)
from app.preflight.memory import network_bytes, state_bytes
from app.preflight.model_checks import (
    ForwardResult,
    check_chat_template,
    check_end_of_turn,
    check_forward_pass,
    check_reward_functions,
    check_reward_model,
    make_test_samples,
    too_large_reason,
)
from app.prompts.data_sources import evenly_spaced
from app.prompts.dataset import Dataset
from app.records.run_directory import RunDirectory, check_run_directory
from app.records.sample import Prompt
from app.records.versions import minimum_versions
from app.runtime.host_group import join_hosts
from app.runtime.inputs import (
    PromptsOrRows,
    encode_rows,
    read_checked_reward_model,
    read_critic,
    read_eval_rows,
    read_policy,
    read_train_rows,
)
from app.runtime.model_spec import CriticSpec, ModelSpec
from app.runtime.pinned_revisions import pin_revisions
from app.runtime.reward_model import RewardModelSpec
from app.runtime.session import Session
from app.training.inputs import check_best_checkpoint_metric, dataset_fingerprints, input_fingerprints
from app.training.learner import make_learner_group
from app.training.setup import check_session, file_fingerprints, setup_notes
from settings import Resolved, Settings
from settings.checks.commands import check_for_train
from settings.checks.unused_settings import launch_notices
from settings.errors import InputError

Data = TypeVar("Data")

MAX_START_S = 20
"""Seconds that hosts wait for each other here, at most."""

MAX_ENCODED_ROWS = 2000
"""That become tokens, of each data set."""
NO_PROMPT = "for want of a prompt"


@dataclass
class PreflightInputs:
    """What could be read of a run's input; the rest is None, or empty."""

    model: ModelSpec | None = None
    critic: CriticSpec | None = None
    reward_model: RewardModelSpec | None = None
    dataset: Dataset | None = None
    prompts: Sequence[Prompt] = ()
    held_out: Sequence[Prompt] = ()
    """Of both data sets, of some rows where there are many."""
    all_rows: PromptsOrRows = ()
    all_held_out_rows: PromptsOrRows = ()
    """The same of all rows: those that became no tokens as they are."""
    cached_commits: dict[str, str] = field(default_factory=dict)
    """Setting -> what this machine's cache holds of its hub id."""

    def is_complete(self, settings: Settings) -> bool:
        """All that a session needs."""
        wanted = (self.model, self.dataset, self.critic if settings.has_critic else self.model)
        return None not in wanted and (self.reward_model is not None or settings.reward.model is None)

    @property
    def weight_checks(self) -> tuple[str, ...]:
        """Checks that ask the real weights. What could not be read has its line already."""
        return ("forward",) if self.reward_model is None else ("forward", "reward model")


def run_doctor(resolved: Resolved) -> DoctorReport:
    """Looks at everything that a launch looks at, and tries each room once.

    It fetches and claims nothing, and leaves nothing behind. Several hosts look together and have the same diagnosis.
    """
    start, settings = time.perf_counter(), resolved.settings
    look, run = CheckRecorder(), RunDirectory.from_settings(settings.run)
    with suppress(InputError):
        # What a run goes on with. A record that cannot be read is told of with the run's directory.
        settings = pin_revisions(settings, run)
    sources = hub_sources(settings)
    key = os.environ.get(WANDB_KEY)
    of_hub = request_hub_commits(sources)
    of_wandb = BackgroundRequest(lambda: fetch_wandb_user(key)) if key and uses_wandb_online(settings) else None
    with ExitStack() as stack:
        has_devices = _start_devices(look, settings, run, stack)
        _check_settings(look, resolved)
        check_versions(look, minimum_versions())
        with look.run_check("run directory"):
            _check_run_directory(look, run, settings)
        check_wandb(look, settings, of_wandb)
        read = _read_inputs(look, settings, sources, of_hub)
        seen, writes = None, None
        if has_devices:
            session = _open_session(look, resolved, run, read, stack)
            writes = _check_memory(look, session, read)
            seen = _check_real_weights(look, session, read)
        else:
            look.skip("mesh", "memory", *read.weight_checks, reason="for want of devices")
        if read.model is not None and read.prompts:
            with look.run_check("end of turn"):
                check_end_of_turn(look, settings, read.model.tokenizer, read.prompts[0], seen)
        else:
            look.skip("end of turn", reason=NO_PROMPT)
        with look.run_check("disk"):
            check_disk(look, run.path, writes)
        host = jax.process_index() if has_devices else 0
        found = _gather_results(look.results) if has_devices else look.results
    return DoctorReport(found, time.perf_counter() - start, host)


def _start_devices(recorder: CheckRecorder, settings: Settings, run: RunDirectory, stack: ExitStack) -> bool:
    """Whether there are devices to try anything on; they are those of all hosts then."""
    with recorder.run_check("devices"):
        # A launch may wait for slow machines; whoever only looks wants to hear which one is not there.
        patience_s = min(settings.mesh.start_timeout_s, MAX_START_S)
        mesh = settings.mesh.model_copy(update={"start_timeout_s": patience_s})
        hurried = settings.model_copy(update={"mesh": mesh})
        stack.enter_context(join_hosts(hurried, out=run.path.with_name(f"{run.path.name}.doctor")))
        devices = topology.global_devices(settings.mesh)
        memory = device_memory_bytes()
        found = (
            f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), "
            f"{'memory not known' if memory is None else f'{format_size(memory)} each'}, on {jax.process_count()} "
            f"host(s)"
        )
        extra = None if settings.mesh.platform == "cpu" else unused_accelerator(devices[0].platform)
        if extra is None or settings.mesh.cpu_devices is not None:
            recorder.ok("devices", found)
        else:
            advice = f"pip install -e '.[{extra}]', or say mesh.platform: cpu"
            recorder.warn("devices", f"{found}, though this machine has more than that", advice)
        return True
    return False


def _check_settings(recorder: CheckRecorder, resolved: Resolved) -> None:
    with recorder.run_check("settings"):
        check_for_train(resolved)
        recorder.ok("settings", "\n".join(launch_notices(resolved)) or "they go together")


def _check_run_directory(recorder: CheckRecorder, run: RunDirectory, settings: Settings) -> None:
    check_run_directory(run, "auto")
    pin_revisions(settings, run)
    if run.has_settings or run.has_checkpoint:
        steps = f"checkpoints of steps {', '.join(map(str, sorted(run.checkpoint_steps)))}" * run.has_checkpoint
        advice = "continue it with --resume auto, or choose another run.name"
        recorder.warn("run directory", f"{run.path} already holds a run, {steps or 'without a checkpoint'}", advice)
    else:
        recorder.ok("run directory", f"{run.path} can be written to")


def _read_inputs(
    recorder: CheckRecorder,
    settings: Settings,
    sources: Sequence[HubSource],
    hub_requests: dict[str, BackgroundRequest],
) -> PreflightInputs:
    """All that a launch reads, from this machine alone."""
    read = PreflightInputs(cached_commits=cached_model_commits(sources))
    for inquiry in hub_requests.values():
        inquiry.wait()
    with hub_offline(sources):
        _read_models(recorder, settings, sources, read)
        _read_data(recorder, settings, read)
        if settings.eval.every_steps:
            _read_held_out(recorder, settings, read)
    for source in sources:
        with recorder.run_check(f"hub: {source.setting}"):
            check_hub_source(
                recorder, source, hub_requests[source.setting], cached=read.cached_commits.get(source.setting)
            )
    if read.model is not None and read.prompts:
        with recorder.run_check("template"):
            check_chat_template(recorder, settings, read.model.tokenizer, read.prompts[0])
        with recorder.run_check("reward"):
            samples = make_test_samples(read.model.tokenizer, read.prompts)
            check_reward_functions(recorder, settings, samples, read.all_rows, read.all_held_out_rows)
    else:
        recorder.skip("template", "reward", reason=NO_PROMPT)
    return read


def _read_models(
    recorder: CheckRecorder, settings: Settings, sources: Sequence[HubSource], inputs: PreflightInputs
) -> None:
    absent = {source.setting for source in sources if source.kind == "model"} - inputs.cached_commits.keys()
    if "model.path" in absent:
        recorder.skip("model", reason="it is not in this machine's cache")
    else:
        with recorder.run_check("model"):
            inputs.model = read_policy(settings)
            architecture = inputs.model.architecture
            recorder.ok(
                "model",
                f"{settings.model.path}: {architecture.family}, {inputs.model.definition.num_parameters:,} parameters, "
                f"{inputs.model.tokenizer.vocab_size:,} tokens known, {architecture.max_positions:,} in its context",
            )
    if settings.has_critic:
        if inputs.model is None or "critic.path" in absent:
            recorder.skip("critic", reason="it, or the model whose tokens it reads, is not there")
        else:
            with recorder.run_check("critic"):
                inputs.critic = read_critic(settings, inputs.model)
                recorder.ok("critic", f"{settings.critic.path or settings.model.path}: it reads the policy's tokens")
    if settings.reward.model is not None and "reward.model" in absent:
        recorder.skip("reward model", reason="it is not in this machine's cache")
    else:
        with recorder.run_check("reward model"):
            inputs.reward_model = read_checked_reward_model(settings)


def _read_data(recorder: CheckRecorder, settings: Settings, inputs: PreflightInputs) -> None:
    source = settings.data.source
    with recorder.run_check("data"):
        inputs.dataset = _read_if_cached(recorder, "data", source, lambda: read_train_rows(settings))
        if inputs.dataset is None:
            return
        if source.startswith(HUB_DATA_PREFIX):
            inputs.cached_commits["data.source"] = CACHED_ANY_COMMIT
        told = inputs.dataset.to_text()
        if inputs.model is None:
            recorder.ok("data", f"{told}; without a tokenizer there are no prompts")
            return
        rows = inputs.dataset.rows[:MAX_ENCODED_ROWS]
        inputs.prompts, report = encode_rows(settings, rows, inputs.model.tokenizer)
        inputs.all_rows = inputs.prompts if len(rows) == len(inputs.dataset.rows) else inputs.dataset.rows
        if inputs.reward_model is not None:
            inputs.reward_model.check_prompt(inputs.prompts[0])
        some = f"of the first {len(rows):,} " if len(rows) < len(inputs.dataset.rows) else ""
        recorder.ok("data", f"{told}\n{some}{report.to_text()}")


def _read_held_out(recorder: CheckRecorder, settings: Settings, inputs: PreflightInputs) -> None:
    source = settings.data.eval_source or settings.data.source
    with recorder.run_check("held-out data"):
        rows = _read_if_cached(recorder, "held-out data", source, lambda: read_eval_rows(settings))
        if rows is None:
            return
        if settings.data.eval_source is not None and source.startswith(HUB_DATA_PREFIX):
            inputs.cached_commits["data.eval_source"] = CACHED_ANY_COMMIT
        if inputs.model is None:
            recorder.ok("held-out data", f"{len(rows):,} rows of {source}; without a tokenizer there are no prompts")
            return
        some = evenly_spaced(rows, MAX_ENCODED_ROWS)
        inputs.held_out, _ = encode_rows(settings, some, inputs.model.tokenizer)
        inputs.all_held_out_rows = inputs.held_out if len(some) == len(rows) else rows
        check_best_checkpoint_metric(settings, inputs.all_held_out_rows)
        of_rows = f", from {len(some):,} of {len(rows):,} rows" if len(some) < len(rows) else ""
        recorder.ok("held-out data", f"{len(inputs.held_out):,} prompts of {source}{of_rows}")


def _read_if_cached(recorder: CheckRecorder, check: str, source: str, read_data: Callable[[], Data]) -> Data | None:
    """What is read; None, and a finding that says so, where the hub's data set is not in the cache."""
    try:
        return read_data()
    except InputError as error:
        # As far as `datasets` tells: it has a ValueError for a configuration that is not there.
        absent = isinstance(error.__cause__, OSError) or "Couldn't find cache" in str(error.__cause__)
        if not (source.startswith(HUB_DATA_PREFIX) and absent):
            raise
    recorder.skip(check, reason=f"{source} is not in this machine's cache")
    return None


def _open_session(
    recorder: CheckRecorder, resolved: Resolved, run: RunDirectory, inputs: PreflightInputs, stack: ExitStack
) -> Session | None:
    """The mesh, with everything on it that a launch would put there. All hosts call it together."""
    settings = resolved.settings
    if jax.process_count() > 1:
        agreed = False
        with recorder.run_check("hosts"):
            with error_barrier():
                facts = _host_facts(settings, run, inputs)
            check_hosts_agree(resolved, facts)
            check_shared_run_directory(run)
            agreed = True
            recorder.ok("hosts", "they have the same settings, code, packages and files, and see one run directory")
        if not agreed:
            # Programs of hosts that differ would wait for each other for ever.
            recorder.skip("mesh", reason="since the hosts differ")
            return None
    if inputs.model is None or (settings.has_critic and inputs.critic is None):
        recorder.skip("mesh", reason="for want of a model")
        return None
    session = None
    with recorder.run_check("mesh"):
        session = stack.enter_context(closing(Session.open(settings, inputs.model, inputs.critic)))
        check_session(settings, session)
        axes = ", ".join(f"{axis} {size}" for axis, size in session.mesh.shape.items())
        recorder.ok("mesh", "\n".join((axes, *setup_notes(settings, session))))
    return session


def _host_facts(settings: Settings, run: RunDirectory, inputs: PreflightInputs) -> dict[str, str]:
    """What this host has of what hosts must have in common."""
    facts = file_fingerprints(settings, run)
    if inputs.model is not None and inputs.dataset is not None and inputs.is_complete(settings):
        of_data = dataset_fingerprints(settings, inputs.dataset)
        facts |= input_fingerprints(inputs.model, of_data, inputs.critic, inputs.reward_model)
        facts["the evaluation prompts"] = describe_prompts(inputs.held_out)
    return facts


def _check_memory(recorder: CheckRecorder, session: Session | None, inputs: PreflightInputs) -> DiskUsage | None:
    """Returns what a run would write; None where that is not known."""
    if session is None:
        recorder.skip("memory", reason="for want of a mesh")
        return None
    settings, writes = session.settings, None
    with recorder.run_check("memory"):
        learning = make_learner_group(settings, session)
        needed, available = sum(network_bytes(session, learning, inputs.reward_model).values()), device_memory_bytes()
        found = f"weights and optimizer moments take {format_size(needed)} on each device"
        if available is not None and needed > available:
            advice = "more devices, or a smaller model; grpo train --dry-run shows what holds it"
            recorder.fail("memory", f"{found}, which has {format_size(available)}", advice, exit_code=EXIT_ENVIRONMENT)
        else:
            there = "how much it has is not known" if available is None else f"which has {format_size(available)}"
            recorder.ok("memory", f"{found}, {there}; grpo train --dry-run shows what a step needs beside it")
        lengths = [len(prompt.token_ids) for prompt in inputs.prompts] or [settings.data.max_prompt_length]
        tokens, hosts = float(np.mean(lengths)), jax.process_count()
        writes = estimate_disk_usage(
            settings, checkpoint_bytes=state_bytes(learning), mean_prompt_tokens=tokens, num_hosts=hosts
        )
    return writes


def _check_real_weights(
    recorder: CheckRecorder, session: Session | None, inputs: PreflightInputs
) -> ForwardResult | None:
    """What the real weights say of the first prompt. Hosts try together, or not at all."""
    if not _true_on_all_hosts(session is not None and bool(inputs.prompts)):
        recorder.skip(*inputs.weight_checks, reason="for want of a model, a prompt or a mesh, here or on another host")
        return None
    assert session is not None
    seen = None
    if (why := too_large_reason(session, session.model_spec.reference_definition)) is not None:
        recorder.skip("forward", reason=f"{why}: only shapes were compared")
    else:
        with recorder.run_check("forward"):
            seen = check_forward_pass(recorder, session, inputs.prompts[0])
    if inputs.reward_model is not None:
        with recorder.run_check("reward model"):
            samples = make_test_samples(session.model_spec.tokenizer, inputs.prompts)
            check_reward_model(recorder, session, inputs.reward_model, samples)
    return seen


def _true_on_all_hosts(condition: bool) -> bool:
    return not max_over_hosts(np.asarray(int(not condition)))


def _gather_results(local_results: Sequence[CheckResult]) -> Sequence[CheckResult]:
    """The first host's, and what is amiss on the others. All hosts call it together."""
    if jax.process_count() == 1:
        return local_results
    said = gather_bytes_over_hosts(json.dumps([asdict(finding) for finding in local_results]).encode())
    of_hosts = [[CheckResult(**{**one, "host": host}) for one in json.loads(text)] for host, text in enumerate(said)]
    first, *others = of_hosts
    return [*first, *(one for found in others for one in found if one.verdict in ("warn", "fail"))]
