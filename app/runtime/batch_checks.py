"""Checks that a run's micro-batches divide evenly over its devices."""

from __future__ import annotations

import math

from app.mesh.placement import num_local_row_shards
from app.runtime.scoring import ScoringSession
from settings import Settings
from settings.errors import InputError
from settings.schema.algorithm import AlgorithmSettings, CriticSettings

DYNAMIC_BATCHING_HINT = "or set {scope}.max_tokens_per_device instead of {scope}.rows_per_device, for any number"


def check_fixed_micro_batches(settings: Settings, session: ScoringSession) -> None:
    """Raises InputError, with a valid value, if fixed update micro-batches do not divide over the devices.

    Packed micro-batches are filled with empty rows instead.
    """
    scopes: dict[str, AlgorithmSettings | CriticSettings] = {"algorithm": settings.algorithm}
    if settings.has_critic:
        scopes["critic"] = settings.critic
    for scope, chosen in scopes.items():
        if chosen.rows_per_device is not None:
            _check_rows_per_device(settings, scope, chosen.rows_per_device, devices=num_local_row_shards(session.mesh))


def _check_rows_per_device(settings: Settings, scope: str, rows_per_device: int, *, devices: int) -> None:
    group_size, otherwise = settings.rollout.group_size, DYNAMIC_BATCHING_HINT.format(scope=scope)
    mini_batch_prompts = settings.rollout.prompts_per_step // settings.num_mini_batches
    for field, prompts in (
        ("rollout.prompts_per_step", settings.rollout.prompts_per_step),
        ("algorithm.mini_batch_prompts", mini_batch_prompts),
    ):
        if prompts * group_size % devices != 0:
            raise InputError(
                f"{field}: {prompts} prompts x rollout.group_size {group_size} = {prompts * group_size} samples do not "
                f"divide over the {devices} devices of a host (mesh.shape {settings.mesh.shape}); set it to a multiple "
                f"of {devices // math.gcd(devices, group_size)}, {otherwise}"
            )
    samples = mini_batch_prompts * group_size // devices
    if samples % rows_per_device != 0:
        raise InputError(
            f"{scope}.rows_per_device: {rows_per_device} does not divide the {samples} samples of an optimizer step "
            f"on each device ({mini_batch_prompts} prompts x rollout.group_size {group_size} over {devices} devices); "
            f"set it to {math.gcd(samples, rows_per_device)}, which does, {otherwise}"
        )
