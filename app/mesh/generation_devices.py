"""The devices of each host that only generate, which `rollout.devices` takes out of the training mesh."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from app.mesh.compile_only import compile_only_devices
from app.mesh.devices import host_index, is_compile_only, simulated_slice
from settings.errors import InputError

MAX_ROUNDING = 0.05
"""Part of a device by which a share may differ from whole devices, as 0.33 of 3 devices does."""


def generation_devices(wanted: float | tuple[int, ...], *, num_devices: int) -> tuple[int, ...]:
    """Returns the numbers of a host's devices that only generate: of a share, the last ones.

    Args:
        wanted: the value of `rollout.devices`.
        num_devices: devices of a host.

    Raises:
        InputError: they leave no device that trains, or are no whole number of devices.
    """
    if num_devices == 1:
        raise InputError(
            f"rollout.devices: got {_to_text(wanted)}, but each host has a single device, which must both train and "
            "generate; set it to null"
        )
    if isinstance(wanted, tuple):
        if wanted[-1] >= num_devices:
            raise InputError(
                f"rollout.devices: got {wanted[-1]}, but each host has devices 0 to {num_devices - 1}; name some of "
                "them, or a share such as 0.5"
            )
        return wanted
    num_generating = round(wanted * num_devices)
    if abs(num_generating - wanted * num_devices) > MAX_ROUNDING or not 0 < num_generating < num_devices:
        possible = ", ".join(f"{k / num_devices:g}" for k in range(1, num_devices))
        raise InputError(
            f"rollout.devices: {wanted:g} of the {num_devices} devices of a host is not a whole number of devices; "
            f"possible shares: {possible}"
        )
    return tuple(range(num_devices - num_generating, num_devices))


def _to_text(wanted: float | tuple[int, ...]) -> str:
    return str(list(wanted)) if isinstance(wanted, tuple) else f"{wanted:g}"


def without_generation_devices(devices: Sequence[Any], set_aside: Collection[int]) -> Sequence[Any]:
    """Returns the devices of all hosts without those whose numbers on their host are in `set_aside`.

    Raises:
        InputError: the rest is no slice for which programs can be compiled.
    """
    if not set_aside:
        return devices
    of_hosts: dict[int, list[Any]] = {}
    for device in devices:
        of_hosts.setdefault(host_index(device), []).append(device)
    kept = [one for local in of_hosts.values() for number, one in enumerate(local) if number not in set_aside]
    if not is_compile_only():
        return kept
    # Compilers know no part of a slice but a smaller slice.
    whole, per_host = simulated_slice(), len(kept) // len(of_hosts)
    assert whole is not None
    if per_host.bit_count() != 1:
        raise InputError(
            f"rollout.devices: {per_host} devices of each host would train, and programs can only be compiled in "
            "advance for 1, 2, 4 or 8 of them; set another share, or leave out --compile"
        )
    return compile_only_devices(replace(whole, num_chips=len(kept), chips_per_host=per_host))
