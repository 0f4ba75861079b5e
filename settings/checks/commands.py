"""Defines which checks of settings each command runs before it starts.

Checks that need a model file, a data set or a device are next to the code that uses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from settings.checks.rollout import check_chat_template, check_environment, check_staleness, check_workers
from settings.checks.training import (
    check_algorithm,
    check_batch,
    check_curriculum,
    check_distillation,
    check_evaluation_temperature,
    check_judge,
    check_max_length,
    check_penalty,
    check_reference,
    check_rewards,
    check_run,
    check_token_quotas,
)
from settings.errors import InputError
from settings.loading.fields import value_of
from settings.loading.printing import RENDEZVOUS_FIELDS
from settings.loading.resolve import Resolved


def _run_checks(resolved: Resolved, checks: Iterable[Callable[[Resolved], Iterable[str]]]) -> None:
    """Runs every check and raises InputError listing all problems, one per line."""
    problems = [message for check in checks for message in check(resolved)]
    if problems:
        raise InputError(re.sub(r"<([a-z_.0-9]+)>", lambda match: resolved.describe(match[1]), "\n".join(problems)))


def _check_hosts(resolved: Resolved) -> Iterator[str]:
    mesh = resolved.settings.mesh
    missing = [field for field in RENDEZVOUS_FIELDS if value_of(resolved.settings, field) is None]
    given = [f"<{field}>" for field in RENDEZVOUS_FIELDS if field not in missing]
    if mesh.coordinator_address == "auto":
        if given[1:]:
            names = " and ".join(given[1:])
            way_out = f"set {names.replace('<', '').replace('>', '')} to null"
            yield f"{names}: mesh.coordinator_address: auto finds the hosts itself; {way_out}"
    elif given and missing:
        yield (
            f"{' and '.join(given)}: also set {' and '.join(missing)}, or only mesh.coordinator_address: auto if the "
            "platform provides the list of hosts"
        )
    elif mesh.num_processes is not None and mesh.process_id is not None and mesh.process_id >= mesh.num_processes:
        last = mesh.num_processes - 1
        yield f"<mesh.process_id> is too large for <mesh.num_processes>; give every host its own id from 0 to {last}"
    if mesh.expect_processes not in (None, mesh.num_processes) and mesh.num_processes is not None:
        yield (
            "<mesh.expect_processes> differs from <mesh.num_processes>; set the former to null, or both to the number "
            "of hosts"
        )
    if mesh.cpu_devices is not None and mesh.platform not in ("auto", "cpu"):
        yield "<mesh.cpu_devices> is for CPU hosts, but <mesh.platform>; set it to null, or set mesh.platform: cpu"


def _check_no_pretend(resolved: Resolved) -> Iterator[str]:
    if resolved.settings.mesh.pretend is not None:
        yield "<mesh.pretend>: only grpo train --dry-run and grpo inspect-mesh accept simulated devices; set it to null"


ROLLOUT_CHECKS = (check_workers, check_environment, check_chat_template)
SIZE_CHECKS = (check_batch, check_max_length, *ROLLOUT_CHECKS, check_staleness, check_token_quotas, _check_hosts)
SAMPLING_CHECKS = (check_max_length, *ROLLOUT_CHECKS, _check_hosts, _check_no_pretend)
LEARNING_CHECKS = (
    *(check_algorithm, check_reference, check_distillation, check_penalty),
    *(check_rewards, check_curriculum, check_run),
)
TRAIN_CHECKS = (*LEARNING_CHECKS, *SIZE_CHECKS)


check_hosts = partial(_run_checks, checks=(_check_hosts,))
"""Raises InputError listing all problems of the settings that connect hosts."""

check_for_train = partial(_run_checks, checks=(*TRAIN_CHECKS, _check_no_pretend))
"""Raises InputError listing everything that prevents training with these settings."""

check_for_dry_run = partial(_run_checks, checks=TRAIN_CHECKS)
"""Raises InputError listing everything that prevents a dry run, which may simulate its devices."""

check_for_inspect_mesh = partial(_run_checks, checks=SIZE_CHECKS)
"""Raises InputError listing all problems of the settings that determine the sizes of a run."""

check_for_mesh = partial(_run_checks, checks=(_check_hosts, _check_no_pretend))
"""Raises InputError listing all problems of hosts and devices, for commands whose input determines sequence lengths."""

check_for_rollout = partial(_run_checks, checks=SAMPLING_CHECKS)
check_for_evaluation = partial(_run_checks, checks=(check_evaluation_temperature, check_judge, *SAMPLING_CHECKS))
check_for_score = partial(_run_checks, checks=(check_rewards, check_reference, _check_hosts, _check_no_pretend))
"""Raises InputError listing what prevents `grpo score`, except sequence lengths, which the input file determines."""
