"""What must be the same on every host before anything is done, or all of them stop."""

from __future__ import annotations

import json
from collections.abc import Mapping

import jax

from app.mesh.placement import bytes_over_hosts
from settings import Resolved
from settings.errors import InputError
from settings.fields import FIELDS, value_of

OF_A_HOST = frozenset(
    f"mesh.{field}" for field in ("coordinator_address", "num_processes", "process_id", "start_timeout_s")
)
"""How a host finds the others; that it has, says that they agree."""


def agree(resolved: Resolved, facts: Mapping[str, str] | None = None) -> None:
    """Whether all hosts have the same settings, and the same of whatever else `facts` says.

    All hosts call it, after `topology.start`.

    Raises:
        InputError: on every host, what differs and what it is on each.
    """
    if jax.process_count() == 1:
        return
    settings = {field: repr(value_of(resolved.settings, field)) for field in FIELDS if field not in OF_A_HOST}
    own = {**settings, **(facts or {})}
    hosts = [json.loads(one) for one in bytes_over_hosts(json.dumps(own).encode())]
    for field in own:
        values = [host.get(field, "not there") for host in hosts]
        if len(set(values)) > 1:
            told = "; ".join(f"{value} on host {number}" for number, value in enumerate(values))
            raise InputError(
                f"{field}: the hosts differ: {told}. Start the same command with the same files on every host"
            )
