"""The checks of settings that each command runs before it starts.

Checks that need a model file, a data set or a device are next to the code that uses it.
"""

from __future__ import annotations

from functools import partial

from settings.checks.check import run_checks
from settings.checks.hosts import HOST_CHECKS, check_no_pretend
from settings.checks.rollout import ENVIRONMENT_CHECKS, SCHEDULE_CHECKS, STALENESS_CHECKS, WORKER_CHECKS
from settings.checks.training import (
    ALGORITHM_CHECKS,
    BATCH_CHECKS,
    REWARD_CHECKS,
    RUN_CHECKS,
    check_evaluation_temperature,
    check_max_length,
    check_token_quotas,
)

ROLLOUT_CHECKS = (*SCHEDULE_CHECKS, *WORKER_CHECKS, *ENVIRONMENT_CHECKS)
SIZE_CHECKS = (*BATCH_CHECKS, *ROLLOUT_CHECKS, *STALENESS_CHECKS, check_token_quotas, *HOST_CHECKS)
SAMPLING_CHECKS = (check_max_length, *ROLLOUT_CHECKS, *HOST_CHECKS, check_no_pretend)
TRAIN_CHECKS = (*ALGORITHM_CHECKS, *REWARD_CHECKS, *RUN_CHECKS, *SIZE_CHECKS)


check_for_train = partial(run_checks, checks=(*TRAIN_CHECKS, check_no_pretend))
"""Raises InputError listing everything that prevents training with these settings."""

check_for_dry_run = partial(run_checks, checks=TRAIN_CHECKS)
"""The checks for training, but simulated devices are accepted."""

check_for_inspect_mesh = partial(run_checks, checks=SIZE_CHECKS)
"""The checks of settings that determine sizes."""

check_for_mesh = partial(run_checks, checks=(*HOST_CHECKS, check_no_pretend))
"""The checks of devices and hosts."""

check_for_gae = partial(run_checks, checks=(*HOST_CHECKS, check_no_pretend))
check_for_rollout = partial(run_checks, checks=SAMPLING_CHECKS)
check_for_evaluation = partial(run_checks, checks=(check_evaluation_temperature, *SAMPLING_CHECKS))
check_for_score = partial(run_checks, checks=(*REWARD_CHECKS, *HOST_CHECKS, check_no_pretend))
"""Lengths are not checked: the input sets them."""
