"""What must be the same on every host before anything is done, or all of them stop."""

from __future__ import annotations

import json
from collections.abc import Mapping

from app.mesh.placement import bytes_over_hosts
from settings.errors import InputError


def agree(fields: Mapping[str, str]) -> None:
    """Every host calls it with its own values of the same fields.

    Raises:
        InputError: on all hosts, naming the first field that differs and each host's value.
    """
    hosts = [json.loads(own) for own in bytes_over_hosts(json.dumps(dict(fields)).encode())]
    for field in fields:
        values = [host.get(field) for host in hosts]
        if len(set(values)) > 1:
            told = ", ".join(f"host {number}: {value}" for number, value in enumerate(values))
            raise InputError(
                f"hosts do not agree on {field} ({told}); start all of them with the same command and files"
            )
