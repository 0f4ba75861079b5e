"""What all hosts must have in common before the first step.

Hosts that work together run the same program in step. One that was given another setting, package, file or folder would
wait for the others for ever, or train something else than they do, so it is looked for while stopping costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import socket
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import jax

from app.distributed.collectives import gather_bytes_over_hosts
from app.distributed.lockstep import error_barrier
from app.records.run_directory import RunDirectory
from app.records.sample import Prompt
from app.records.versions import TRAINING_PACKAGES, program_versions
from settings import Resolved
from settings.errors import InputError
from settings.loading.fields import FIELDS, value_of
from settings.schema.reward import RewardFunctionSettings

PER_HOST_SETTINGS = frozenset(
    f"mesh.{field}" for field in ("coordinator_address", "num_processes", "process_id", "start_timeout_s")
)
"""How a host finds the others; that it has, says that they agree."""
MAX_VALUE_CHARACTERS = 120
"""Characters of a value in an error."""


class Fact(NamedTuple):
    """Something of a host that must be the same on all."""

    value: str
    origin: str = ""
    """What set it, for the error; hosts may differ in it."""


Facts = Mapping[str, Fact]


def check_hosts_agree(resolved: Resolved, facts: Mapping[str, str] | None = None) -> None:
    """Whether all hosts have the same packages, code and settings, and the same of whatever else `facts` says.

    All hosts call it, after `topology.start`.

    Raises:
        InputError: on every host, what differs and where it is what.
    """
    if jax.process_count() == 1:
        return
    own = {
        **_setting_facts(resolved),
        **{name: Fact(x) for name, x in {**program_versions(TRAINING_PACKAGES), **(facts or {})}.items()},
    }
    said = [json.loads(one) for one in gather_bytes_over_hosts(json.dumps([socket.gethostname(), own]).encode())]
    hosts = [f"host {i} ({name})" for i, (name, _) in enumerate(said)]
    problem = describe_difference(hosts, [{name: Fact(*fact) for name, fact in facts.items()} for _, facts in said])
    if problem is not None:
        raise InputError(problem)


def describe_difference(hosts: Sequence[str], facts: Sequence[Facts]) -> str | None:
    """What the hosts do not agree on, the first in full; None where they agree on everything."""
    names = dict.fromkeys(name for one in facts for name in one)
    absent = Fact("not there")
    differing = [name for name in names if len({one.get(name, absent).value for one in facts}) > 1]
    if not differing:
        return None
    first, *others = differing
    held: dict[Fact, list[str]] = {}
    for host, one in zip(hosts, facts, strict=True):
        held.setdefault(one.get(first, absent), []).append(host)
    values = "; ".join(f"{_format_fact(fact)} on {', '.join(where)}" for fact, where in held.items())
    more = f" (they also differ in {', '.join(others[:5])}{', ...' if len(others) > 5 else ''})" if others else ""
    return (
        f"{first}: the hosts differ: {values}{more}. Start the same command with the same code, packages and files on "
        "every host"
    )


def _format_fact(fact: Fact) -> str:
    value = fact.value if len(fact.value) <= MAX_VALUE_CHARACTERS else f"{fact.value[: MAX_VALUE_CHARACTERS - 3]}..."
    return f"{value} (from {fact.origin})" if fact.origin else value


def _setting_facts(resolved: Resolved) -> Facts:
    return {
        field: Fact(_format_value(value_of(resolved.settings, field)), resolved.origin(field))
        for field in FIELDS
        if field not in PER_HOST_SETTINGS
    }


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def describe_prompts(prompts: Sequence[Prompt]) -> str:
    """How many there are, and what tells them from others, for people to read."""
    return f"{len(prompts)} prompts, {prompts_fingerprint(prompts)[:16]}"


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over all that samples and their judges take from their prompts, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        said = [prompt.uid, prompt.token_ids.tolist(), prompt.source, prompt.answer, dict(prompt.extra)]
        digest.update(json.dumps(said, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def plugin_file_digests(functions: Sequence[RewardFunctionSettings]) -> dict[str, str]:
    """By plug-in: of the file that it is in. One that is imported by its module's name is taken for granted."""
    files = {one.function: Path(one.function.rpartition(":")[0]) for one in functions if one.function is not None}
    return {
        f"reward.functions: the file of {name}": hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for name, path in files.items()
        if path.is_file()
    }


def describe_newest_checkpoint(run: RunDirectory) -> str:
    """The step of the newest checkpoint that this host sees."""
    steps = run.checkpoint_steps
    return f"step {max(steps)}" if steps else "none"


def check_shared_run_directory(run: RunDirectory) -> None:
    """Whether all hosts see one and the same folder where the run is to be. Leaves nothing behind.

    All hosts call it together.

    Raises:
        InputError: on every host, where one does not see what host 0 has put there.
    """
    if jax.process_count() == 1:
        return
    is_first = jax.process_index() == 0
    parents = list(run.path.absolute().parents)
    depth = next(i for i, folder in enumerate(parents) if folder.is_dir())
    depth, name = json.loads(gather_bytes_over_hosts(json.dumps([depth, f".grpo-{uuid.uuid4().hex}"]).encode())[0])
    note = parents[min(depth, len(parents) - 1)] / name

    try:
        with error_barrier():
            if is_first:
                _create_probe(note)
        with error_barrier():
            _check_probe_visible(note, run)
    finally:
        if is_first:
            with suppress(OSError):
                note.unlink()


def _create_probe(probe: Path) -> None:
    try:
        probe.touch(exist_ok=False)
    except OSError as error:
        raise InputError(f"run.dir: cannot write to {probe.parent}: {error.strerror}; choose another") from error


def _check_probe_visible(probe: Path, run: RunDirectory) -> None:
    if not probe.exists():
        raise InputError(
            f"run.dir: {run.path.absolute()} is not the same folder on all hosts: in {probe.parent} this one does "
            "not see what host 0 has just put there. Set run.dir to a folder that all hosts share"
        )
