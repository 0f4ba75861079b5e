"""Checks of devices and hosts for every command that uses devices."""

from __future__ import annotations

from collections.abc import Iterator

from settings.checks.check import Rule
from settings.loading.fields import value_of
from settings.loading.printing import RENDEZVOUS_FIELDS
from settings.loading.resolve import Resolved


def _check_processes(resolved: Resolved) -> Iterator[str]:
    mesh = resolved.settings.mesh
    missing = [field for field in RENDEZVOUS_FIELDS if value_of(resolved.settings, field) is None]
    given = [f"<{field}>" for field in RENDEZVOUS_FIELDS if field not in missing]
    if mesh.coordinator_address == "auto":
        if given[1:]:
            yield f"{' and '.join(given[1:])}: must be null with mesh.coordinator_address: auto"
    elif given and missing:
        yield (
            f"{' and '.join(given)}: also set {' and '.join(missing)}, or only mesh.coordinator_address: auto if the "
            "platform provides the list of hosts"
        )
    elif mesh.num_processes is not None and mesh.process_id is not None and mesh.process_id >= mesh.num_processes:
        last = mesh.num_processes - 1
        yield f"<mesh.process_id> is too large for <mesh.num_processes>; ids range from 0 to {last}"


HOST_CHECKS = (
    _check_processes,
    Rule(
        lambda s: s.mesh.expect_processes not in (None, s.mesh.num_processes) and s.mesh.num_processes is not None,
        "<mesh.expect_processes> differs from <mesh.num_processes>; set it to null, or set both to the number of hosts",
    ),
    Rule(
        lambda s: s.mesh.cpu_devices is not None and s.mesh.platform not in ("auto", "cpu"),
        "<mesh.cpu_devices> is for CPU hosts, but <mesh.platform>; set it to null, or set mesh.platform: cpu",
    ),
)

check_no_pretend = Rule(
    lambda s: s.mesh.pretend is not None,
    "<mesh.pretend>: only grpo train --dry-run and grpo inspect-mesh accept simulated devices; set it to null",
)
