"""Checks that all hosts agree before the first step.

Hosts run the same program in lockstep. If a setting, package, file or folder differed on one host, the run would
deadlock or compute something else, so these are compared before anything expensive starts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax

from app.distributed.collectives import gather_json_over_hosts
from app.records.identity import Identity
from app.records.versions import program_versions
from settings import Resolved
from settings.errors import InputError
from settings.loading.fields import FIELDS, value_of

PER_HOST_SETTINGS = frozenset(
    (
        "run.dir",
        *(f"mesh.{field}" for field in ("coordinator_address", "num_processes", "process_id", "start_timeout_s")),
    )
)
"""Settings that may differ between hosts: process 0's value is used, or they only serve to find the other hosts."""
MAX_SHOWN = 120
"""Maximum length of a value shown in an error message."""


class HostFact(NamedTuple):
    """A property of a host that must be the same on all hosts."""

    value: str
    origin: str = ""
    """Source of the value, for the error message; it may differ between hosts."""


HostFacts = Mapping[str, HostFact]


def check_hosts_agree(resolved: Resolved, identity: Identity = MappingProxyType({})) -> None:
    """Checks that all hosts have the same code, packages, `identity`, and settings except `PER_HOST_SETTINGS`.

    All hosts must call it, after `jax_startup.initialize_distributed`.

    Args:
        identity: further values that must be equal; the keys are the names shown in the error.

    Raises:
        InputError: the hosts differ. Every host raises it and lists the differing values with their hosts.
    """
    if jax.process_count() == 1:
        return
    local = {
        field: HostFact(_comparable(value_of(resolved.settings, field)), resolved.origin(field))
        for field in FIELDS
        if field not in PER_HOST_SETTINGS
    }
    local |= {name: HostFact(str(x)) for name, x in {**program_versions(), **identity}.items()}
    gathered = gather_json_over_hosts([socket.gethostname(), local])
    hosts = [f"host {i} ({name})" for i, (name, _) in enumerate(gathered)]
    all_facts = [{name: HostFact(*fact) for name, fact in facts.items()} for _, facts in gathered]
    problem = describe_difference(hosts, all_facts)
    if problem is not None:
        raise InputError(problem)


def describe_difference(hosts: Sequence[str], facts: Sequence[HostFacts]) -> str | None:
    """Returns an error message that names the facts that differ, with the values of the first; None if none differs."""
    names = dict.fromkeys(name for one in facts for name in one)
    absent = HostFact("missing")
    differing = [name for name in names if len({one.get(name, absent).value for one in facts}) > 1]
    if not differing:
        return None
    first, *others = differing
    hosts_by_fact: dict[HostFact, list[str]] = {}
    for host, one in zip(hosts, facts, strict=True):
        hosts_by_fact.setdefault(one.get(first, absent), []).append(host)

    def shown(fact: HostFact) -> str:
        value = fact.value if len(fact.value) <= MAX_SHOWN else f"{fact.value[: MAX_SHOWN - 3]}..."
        return f"{value} (from {fact.origin})" if fact.origin else value

    values = "; ".join(f"{shown(fact)} on {', '.join(where)}" for fact, where in hosts_by_fact.items())
    more = f" (they also differ in {', '.join(others[:5])}{' and others' if len(others) > 5 else ''})" if others else ""
    return (
        f"{first}: the hosts differ: {values}{more}. Start the same command with the same code, packages and files on "
        "every host"
    )


def _comparable(value: object) -> str:
    """Returns a value as text. A file's path loses its folder, which may differ, since contents are compared too."""
    text = value if isinstance(value, str) else repr(value)
    return os.path.basename(text) if os.path.isfile(text) else text
