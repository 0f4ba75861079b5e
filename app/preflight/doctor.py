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

from app.distributed.collectives import bytes_over_hosts, max_over_hosts
from app.distributed.host_consistency import agree, check_shared, prompts_digest
from app.distributed.lockstep import together
from app.mesh import topology
from app.mesh.device_memory import device_memory_bytes
from app.preflight.check_results import RUN_TIME, Diagnosis, Finding, Findings
from app.preflight.environment_checks import (
    CACHED,
    HUB_DATA,
    WANDB_KEY,
    HubSource,
    Inquiry,
    Writes,
    ask_hub,
    ask_wandb,
    asks_wandb,
    cached_models,
    fetching_nothing,
    hub_sources,
    look_at_disk,
    look_at_hub,
    look_at_versions,
    look_at_wandb,
    size_text,
    unused_accelerator,
    writes_of,
)
from app.preflight.memory import networks_held, state_bytes
from app.preflight.model_checks import (
    Seen,
    look_at_end_of_turn,
    look_at_forward,
    look_at_reward_model,
    look_at_rewards,
    look_at_template,
    too_large,
    trial_samples,
)
from app.prompts.data_sources import spread
from app.prompts.dataset import Dataset
from app.records.run_directory import RunDirectory, check_claim
from app.records.sample import Prompt
from app.records.versions import lower_bounds
from app.runtime.host_group import joined_hosts
from app.runtime.inputs import (
    DataRows,
    encode_rows,
    read_critic,
    read_held_out_rows,
    read_judge,
    read_policy,
    read_rows,
)
from app.runtime.model_spec import CriticInput, ModelInput
from app.runtime.pinned_revisions import pinned
from app.runtime.reward_model import RewardModelInput
from app.runtime.session import Session
from app.training.inputs import check_best, fingerprints_of, fingerprints_of_data
from app.training.learner import wire_learning
from app.training.setup import check_session, facts_of_files, launch_notes
from settings import Resolved, Settings
from settings.checks.commands import check_for_train
from settings.checks.unused_settings import launch_lines
from settings.errors import InputError

Data = TypeVar("Data")

MOST_START_S = 20
"""Seconds that hosts wait for each other here, at most."""

MOST_ROWS = 2000
"""That become tokens, of each data set."""
NO_PROMPT = "for want of a prompt"


@dataclass
class Read:
    """What could be read of a run's input; the rest is None, or empty."""

    model: ModelInput | None = None
    critic: CriticInput | None = None
    reward_model: RewardModelInput | None = None
    dataset: Dataset | None = None
    prompts: Sequence[Prompt] = ()
    held_out: Sequence[Prompt] = ()
    """Of both data sets, of some rows where there are many."""
    asked: DataRows = ()
    held_out_asked: DataRows = ()
    """The same of all rows: those that became no tokens as they are."""
    cached: dict[str, str] = field(default_factory=dict)
    """Setting -> what this machine's cache holds of its hub id."""

    def is_whole(self, settings: Settings) -> bool:
        """All that a session needs."""
        wanted = (self.model, self.dataset, self.critic if settings.has_critic else self.model)
        return None not in wanted and (self.reward_model is not None or settings.reward.model is None)

    @property
    def trials(self) -> tuple[str, ...]:
        """Checks that ask the real weights. What could not be read has its line already."""
        return ("forward",) if self.reward_model is None else ("forward", "reward model")


def examine(resolved: Resolved) -> Diagnosis:
    """Looks at everything that a launch looks at, and tries each room once.

    It fetches and claims nothing, and leaves nothing behind. Several hosts look together and have the same diagnosis.
    """
    start, settings = time.perf_counter(), resolved.settings
    look, run = Findings(), RunDirectory.of(settings.run)
    with suppress(InputError):
        # What a run goes on with. A record that cannot be read is told of with the run's directory.
        settings = pinned(settings, run)
    sources = hub_sources(settings)
    key = os.environ.get(WANDB_KEY)
    of_hub = ask_hub(sources)
    of_wandb = Inquiry(lambda: ask_wandb(key)) if key and asks_wandb(settings) else None
    with ExitStack() as stack:
        has_devices = _join(look, settings, run, stack)
        _look_at_settings(look, resolved)
        look_at_versions(look, lower_bounds())
        with look.looking_at("run directory"):
            _look_at_directory(look, run, settings)
        look_at_wandb(look, settings, of_wandb)
        read = _read(look, settings, sources, of_hub)
        seen, writes = None, None
        if has_devices:
            session = _open(look, resolved, run, read, stack)
            writes = _look_at_memory(look, session, read)
            seen = _try(look, session, read)
        else:
            look.skip("mesh", "memory", *read.trials, why="for want of devices")
        if read.model is not None and read.prompts:
            with look.looking_at("end of turn"):
                look_at_end_of_turn(look, settings, read.model.tokenizer, read.prompts[0], seen)
        else:
            look.skip("end of turn", why=NO_PROMPT)
        with look.looking_at("disk"):
            look_at_disk(look, run.path, writes)
        host = jax.process_index() if has_devices else 0
        found = _of_all_hosts(look.all) if has_devices else look.all
    return Diagnosis(found, time.perf_counter() - start, host)


def _join(look: Findings, settings: Settings, run: RunDirectory, stack: ExitStack) -> bool:
    """Whether there are devices to try anything on; they are those of all hosts then."""
    with look.looking_at("devices"):
        # A launch may wait for slow machines; whoever only looks wants to hear which one is not there.
        patience_s = min(settings.mesh.start_timeout_s, MOST_START_S)
        mesh = settings.mesh.model_copy(update={"start_timeout_s": patience_s})
        hurried = settings.model_copy(update={"mesh": mesh})
        stack.enter_context(joined_hosts(hurried, out=run.path.with_name(f"{run.path.name}.doctor")))
        devices = topology.devices(settings.mesh)
        memory = device_memory_bytes()
        found = (
            f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), "
            f"{'memory not known' if memory is None else f'{size_text(memory)} each'}, on {jax.process_count()} host(s)"
        )
        extra = None if settings.mesh.platform == "cpu" else unused_accelerator(devices[0].platform)
        if extra is None or settings.mesh.cpu_devices is not None:
            look.ok("devices", found)
        else:
            advice = f"pip install 'grpo[{extra}]', or say mesh.platform: cpu"
            look.warn("devices", f"{found}, though this machine has more than that", advice)
        return True
    return False


def _look_at_settings(look: Findings, resolved: Resolved) -> None:
    with look.looking_at("settings"):
        check_for_train(resolved)
        look.ok("settings", "\n".join(launch_lines(resolved)) or "they go together")


def _look_at_directory(look: Findings, run: RunDirectory, settings: Settings) -> None:
    check_claim(run, "auto")
    pinned(settings, run)
    if run.is_occupied or run.has_checkpoint:
        steps = f"checkpoints of steps {', '.join(map(str, sorted(run.checkpoint_steps)))}" * run.has_checkpoint
        advice = "continue it with --resume auto, or choose another run.name"
        look.warn("run directory", f"{run.path} already holds a run, {steps or 'without a checkpoint'}", advice)
    else:
        look.ok("run directory", f"{run.path} can be written to")


def _read(look: Findings, settings: Settings, sources: Sequence[HubSource], of_hub: dict[str, Inquiry]) -> Read:
    """All that a launch reads, from this machine alone."""
    read = Read(cached=cached_models(sources))
    for inquiry in of_hub.values():
        inquiry.wait()
    with fetching_nothing(sources):
        _read_networks(look, settings, sources, read)
        _read_data(look, settings, read)
        if settings.eval.every_steps:
            _read_held_out(look, settings, read)
    for source in sources:
        with look.looking_at(f"hub: {source.setting}"):
            look_at_hub(look, source, of_hub[source.setting], cached=read.cached.get(source.setting))
    if read.model is not None and read.prompts:
        with look.looking_at("template"):
            look_at_template(look, settings, read.model.tokenizer, read.prompts[0])
        with look.looking_at("reward"):
            samples = trial_samples(read.model.tokenizer, read.prompts)
            look_at_rewards(look, settings, samples, read.asked, read.held_out_asked)
    else:
        look.skip("template", "reward", why=NO_PROMPT)
    return read


def _read_networks(look: Findings, settings: Settings, sources: Sequence[HubSource], read: Read) -> None:
    absent = {source.setting for source in sources if source.kind == "model"} - read.cached.keys()
    if "model.path" in absent:
        look.skip("model", why="it is not in this machine's cache")
    else:
        with look.looking_at("model"):
            read.model = read_policy(settings)
            architecture = read.model.architecture
            look.ok(
                "model",
                f"{settings.model.path}: {architecture.family}, {read.model.definition.num_parameters:,} parameters, "
                f"{read.model.tokenizer.vocab_size:,} tokens known, {architecture.max_positions:,} in its context",
            )
    if settings.has_critic:
        if read.model is None or "critic.path" in absent:
            look.skip("critic", why="it, or the model whose tokens it reads, is not there")
        else:
            with look.looking_at("critic"):
                read.critic = read_critic(settings, read.model)
                look.ok("critic", f"{settings.critic.path or settings.model.path}: it reads the policy's tokens")
    if settings.reward.model is not None and "reward.model" in absent:
        look.skip("reward model", why="it is not in this machine's cache")
    else:
        with look.looking_at("reward model"):
            read.reward_model = read_judge(settings)


def _read_data(look: Findings, settings: Settings, read: Read) -> None:
    source = settings.data.source
    with look.looking_at("data"):
        read.dataset = _unless_absent(look, "data", source, lambda: read_rows(settings))
        if read.dataset is None:
            return
        if source.startswith(HUB_DATA):
            read.cached["data.source"] = CACHED
        told = read.dataset.to_text()
        if read.model is None:
            look.ok("data", f"{told}; without a tokenizer there are no prompts")
            return
        rows = read.dataset.rows[:MOST_ROWS]
        read.prompts, report = encode_rows(settings, rows, read.model.tokenizer)
        read.asked = read.prompts if len(rows) == len(read.dataset.rows) else read.dataset.rows
        if read.reward_model is not None:
            read.reward_model.check_prompt(read.prompts[0])
        some = f"of the first {len(rows):,} " if len(rows) < len(read.dataset.rows) else ""
        look.ok("data", f"{told}\n{some}{report.to_text()}")


def _read_held_out(look: Findings, settings: Settings, read: Read) -> None:
    source = settings.data.eval_source or settings.data.source
    with look.looking_at("held-out data"):
        rows = _unless_absent(look, "held-out data", source, lambda: read_held_out_rows(settings))
        if rows is None:
            return
        if settings.data.eval_source is not None and source.startswith(HUB_DATA):
            read.cached["data.eval_source"] = CACHED
        if read.model is None:
            look.ok("held-out data", f"{len(rows):,} rows of {source}; without a tokenizer there are no prompts")
            return
        some = spread(rows, MOST_ROWS)
        read.held_out, _ = encode_rows(settings, some, read.model.tokenizer)
        read.held_out_asked = read.held_out if len(some) == len(rows) else rows
        check_best(settings, read.held_out_asked)
        of_rows = f", from {len(some):,} of {len(rows):,} rows" if len(some) < len(rows) else ""
        look.ok("held-out data", f"{len(read.held_out):,} prompts of {source}{of_rows}")


def _unless_absent(look: Findings, check: str, source: str, reading: Callable[[], Data]) -> Data | None:
    """What is read; None, and a finding that says so, where the hub's data set is not in the cache."""
    try:
        return reading()
    except InputError as error:
        # As far as `datasets` tells: it has a ValueError for a configuration that is not there.
        absent = isinstance(error.__cause__, OSError) or "Couldn't find cache" in str(error.__cause__)
        if not (source.startswith(HUB_DATA) and absent):
            raise
    look.skip(check, why=f"{source} is not in this machine's cache")
    return None


def _open(look: Findings, resolved: Resolved, run: RunDirectory, read: Read, stack: ExitStack) -> Session | None:
    """The mesh, with everything on it that a launch would put there. All hosts call it together."""
    settings = resolved.settings
    if jax.process_count() > 1:
        agreed = False
        with look.looking_at("hosts"):
            with together():
                facts = _facts(settings, run, read)
            agree(resolved, facts)
            check_shared(run)
            agreed = True
            look.ok("hosts", "they have the same settings, code, packages and files, and see one run directory")
        if not agreed:
            # Programs of hosts that differ would wait for each other for ever.
            look.skip("mesh", why="since the hosts differ")
            return None
    if read.model is None or (settings.has_critic and read.critic is None):
        look.skip("mesh", why="for want of a model")
        return None
    session = None
    with look.looking_at("mesh"):
        session = stack.enter_context(closing(Session.open(settings, read.model, read.critic)))
        check_session(settings, session)
        axes = ", ".join(f"{axis} {size}" for axis, size in session.mesh.shape.items())
        look.ok("mesh", "\n".join((axes, *launch_notes(settings, session))))
    return session


def _facts(settings: Settings, run: RunDirectory, read: Read) -> dict[str, str]:
    """What this host has of what hosts must have in common."""
    facts = facts_of_files(settings, run)
    if read.model is not None and read.dataset is not None and read.is_whole(settings):
        of_data = fingerprints_of_data(settings, read.dataset)
        facts |= fingerprints_of(read.model, of_data, read.critic, read.reward_model)
        facts["the evaluation prompts"] = prompts_digest(read.held_out)
    return facts


def _look_at_memory(look: Findings, session: Session | None, read: Read) -> Writes | None:
    """Returns what a run would write; None where that is not known."""
    if session is None:
        look.skip("memory", why="for want of a mesh")
        return None
    settings, writes = session.settings, None
    with look.looking_at("memory"):
        learning = wire_learning(settings, session)
        needed, available = sum(networks_held(session, learning, read.reward_model).values()), device_memory_bytes()
        found = f"weights and optimizer moments take {size_text(needed)} on each device"
        if available is not None and needed > available:
            advice = "more devices, or a smaller model; grpo train --dry-run shows what holds it"
            look.fail("memory", f"{found}, which has {size_text(available)}", advice, exit_code=RUN_TIME)
        else:
            there = "how much it has is not known" if available is None else f"which has {size_text(available)}"
            look.ok("memory", f"{found}, {there}; grpo train --dry-run shows what a step needs beside it")
        lengths = [len(prompt.token_ids) for prompt in read.prompts] or [settings.data.max_prompt_length]
        tokens, hosts = float(np.mean(lengths)), jax.process_count()
        writes = writes_of(settings, checkpoint=state_bytes(learning), prompt_tokens=tokens, num_hosts=hosts)
    return writes


def _try(look: Findings, session: Session | None, read: Read) -> Seen | None:
    """What the real weights say of the first prompt. Hosts try together, or not at all."""
    if not _everywhere(session is not None and bool(read.prompts)):
        look.skip(*read.trials, why="for want of a model, a prompt or a mesh, here or on another host")
        return None
    assert session is not None
    seen = None
    if (why := too_large(session, session.input.reference)) is not None:
        look.skip("forward", why=f"{why}: only shapes were compared")
    else:
        with look.looking_at("forward"):
            seen = look_at_forward(look, session, read.prompts[0])
    if read.reward_model is not None:
        with look.looking_at("reward model"):
            samples = trial_samples(session.input.tokenizer, read.prompts)
            look_at_reward_model(look, session, read.reward_model, samples)
    return seen


def _everywhere(ready: bool) -> bool:
    return not max_over_hosts(np.asarray(int(not ready)))


def _of_all_hosts(own: Sequence[Finding]) -> Sequence[Finding]:
    """The first host's, and what is amiss on the others. All hosts call it together."""
    if jax.process_count() == 1:
        return own
    said = bytes_over_hosts(json.dumps([asdict(finding) for finding in own]).encode())
    of_hosts = [[Finding(**{**one, "host": host}) for one in json.loads(text)] for host, text in enumerate(said)]
    first, *others = of_hosts
    return [*first, *(one for found in others for one in found if one.verdict in ("warn", "fail"))]
