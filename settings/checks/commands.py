"""The checks of settings that each command runs before it starts.

Checks that need a model file, a data set or a device are next to the code that uses it.
"""

from __future__ import annotations

from settings.checks.check import run_checks
from settings.checks.hosts import HOST_CHECKS, check_no_pretend, check_pretend_conflicts
from settings.checks.rollout import SCHEDULE_CHECKS, STALENESS_CHECKS, WORKER_CHECKS
from settings.checks.training import (
    ALGORITHM_CHECKS,
    BATCH_CHECKS,
    REWARD_CHECKS,
    RUN_CHECKS,
    check_evaluation_temperature,
    check_max_length,
    check_token_quotas,
)
from settings.checks.unused_settings import check_unused_settings
from settings.loading.resolve import Resolved

ROLLOUT_CHECKS = (*SCHEDULE_CHECKS, *WORKER_CHECKS)
SIZE_CHECKS = (*BATCH_CHECKS, *ROLLOUT_CHECKS, *STALENESS_CHECKS, check_token_quotas, *HOST_CHECKS)
TRAIN_CHECKS = (*ALGORITHM_CHECKS, *REWARD_CHECKS, check_unused_settings, *RUN_CHECKS, *SIZE_CHECKS)


def check_for_train(resolved: Resolved) -> None:
    """Raises InputError listing everything that prevents training with these settings."""
    run_checks(resolved, (*TRAIN_CHECKS, check_no_pretend))


def check_for_dry_run(resolved: Resolved) -> None:
    """Runs the checks for training, but accepts simulated devices."""
    run_checks(resolved, (*TRAIN_CHECKS, check_pretend_conflicts))


def check_for_inspect_mesh(resolved: Resolved) -> None:
    """Raises InputError listing every invalid combination of settings that determine sizes."""
    run_checks(resolved, (*SIZE_CHECKS, check_pretend_conflicts))


def check_for_rollout(resolved: Resolved) -> None:
    """Raises InputError listing everything that prevents sampling with these settings."""
    run_checks(resolved, (check_max_length, *ROLLOUT_CHECKS, *HOST_CHECKS, check_no_pretend))


def check_for_evaluation(resolved: Resolved) -> None:
    """Raises InputError listing everything that prevents an evaluation with these settings."""
    run_checks(
        resolved,
        (check_max_length, check_evaluation_temperature, *ROLLOUT_CHECKS, *HOST_CHECKS, check_no_pretend),
    )


def check_for_score(resolved: Resolved) -> None:
    """Raises InputError listing everything that prevents scoring. Lengths are not checked: the input sets them."""
    run_checks(resolved, (*REWARD_CHECKS, *HOST_CHECKS, check_no_pretend))


def check_for_mesh(resolved: Resolved) -> None:
    """Raises InputError listing every invalid setting of the devices and hosts."""
    run_checks(resolved, (*HOST_CHECKS, check_no_pretend))
