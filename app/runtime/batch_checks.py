"""Whether a run's micro-batches come out even on its devices."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from app.mesh.placement import has_host_memory, num_local_row_shards
from app.runtime.session import Session
from settings import Settings
from settings.errors import InputError
from settings.schema.settings import Algorithm
from settings.schema.settings import Critic as CriticSettings

OTHERWISE = "{scope}.dynamic_microbatch: true, instead of {scope}.rows_per_device, takes any number"


def check_rows(settings: Settings, session: Session) -> None:
    """Whether fixed update micro-batches come out even on every device; packed ones are filled up with empty rows.

    Raises: InputError naming the nearest values that do.
    """
    scopes: dict[str, Algorithm | CriticSettings] = {"algorithm": settings.algorithm}
    if settings.has_critic:
        scopes["critic"] = settings.critic
    for scope, chosen in scopes.items():
        if not chosen.dynamic_microbatch:
            assert chosen.rows_per_device is not None
            _check_fixed_rows(settings, scope, chosen.rows_per_device, devices=num_local_row_shards(session.mesh))


def _check_fixed_rows(settings: Settings, scope: str, rows: int, *, devices: int) -> None:
    group_size, otherwise = settings.rollout.group_size, OTHERWISE.format(scope=scope)
    mini_batch_prompts = settings.rollout.prompts_per_step // settings.num_mini_batches
    for field, prompts in (
        ("rollout.prompts_per_step", settings.rollout.prompts_per_step),
        ("algorithm.mini_batch_prompts", mini_batch_prompts),
    ):
        if prompts * group_size % devices != 0:
            fitting = [n for n in range(1, prompts + devices + 1) if n * group_size % devices == 0]
            raise InputError(
                f"{field}: {prompts} prompts x rollout.group_size {group_size} = {prompts * group_size} samples do not "
                f"divide over the {devices} devices of a host (mesh.shape {settings.mesh.shape}); the nearest values "
                f"of {field} that fit: {_nearest(fitting, prompts)}; {otherwise}"
            )
    samples = mini_batch_prompts * group_size // devices
    if samples % rows != 0:
        fitting = [n for n in range(1, samples + 1) if samples % n == 0]
        raise InputError(
            f"{scope}.rows_per_device: {rows} does not divide the {samples} samples of an optimizer step on each "
            f"device ({mini_batch_prompts} prompts x rollout.group_size {group_size} over {devices} devices); the "
            f"nearest that do: {_nearest(fitting, rows)}; {otherwise}"
        )


def _nearest(fitting: Sequence[int], value: int) -> str:
    below = [n for n in fitting if n < value][-1:]
    above = [n for n in fitting if n > value][:1]
    return " or ".join(map(str, below + above))


def check_host_memory(mesh: Mesh) -> None:
    """Raises InputError where the reference is to wait in a memory that the backend does not have."""
    if not has_host_memory(mesh):
        kind = mesh.devices.flat[0].device_kind
        raise InputError(
            f"score.reference.offload: true, but JAX offers no memory of the host for arrays on {kind}; set it to false"
        )
