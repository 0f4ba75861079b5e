"""The one table of TPU chips, and the slices of them that virtual devices can stand for.

`mesh.pretend: v4-16` shows where everything will lie on a slice before there is one. Imports no jax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from settings.errors import InputError
from settings.loading.fields import did_you_mean, nearest_names

GIB = 2**30


@dataclass(frozen=True)
class TpuChip:
    """One chip, which JAX has as one device.

    Source: the system architecture pages of Cloud TPU, https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
    """

    name: str
    device_kind: str
    """As JAX spells it; a device's own may go on behind it."""
    hbm_bytes: int
    flops: float
    """Dense bfloat16 peak, a second."""
    hbm_bytes_per_s: float
    ici_bytes_per_s: float
    """Out of a chip over all its links together; as much comes in at the same time."""
    dcn_bytes_per_s_per_host: float
    """Out of a host of `chips_per_host` chips."""
    chips_per_host: int
    """Of a slice of several hosts."""
    cores_in_name: int
    """What a slice's name counts of each chip: v4-16 are 8 chips of two cores, v5e-16 are 16 chips."""
    max_chips_of_one_host: int
    """A slice of so many chips or fewer is a single host."""


TPU_CHIPS: Mapping[str, TpuChip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            TpuChip("v4", "TPU v4", 32 * GIB, 275e12, 1.2e12, 300e9, 25e9, 4, 2, 4),
            TpuChip("v5e", "TPU v5 lite", 16 * GIB, 197e12, 819e9, 200e9, 12.5e9, 4, 1, 8),
            TpuChip("v5p", "TPU v5", 95 * GIB, 459e12, 2765e9, 600e9, 25e9, 4, 2, 4),
            TpuChip("v6e", "TPU v6 lite", 32 * GIB, 918e12, 1638e9, 400e9, 50e9, 4, 1, 8),
        )
    }
)
"""By the name that slices of them begin with; v5e before v5p, whose kind its own begins with."""

SLICE_SIZES: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {1: (1, 4, 8, 16, 32, 64, 128, 256), 2: (8, 16, 32, 64, 128, 256, 512)}
)
"""What the number in a slice's name may be, by `Chip.cores_in_name`; no more than 256 chips."""


@dataclass(frozen=True)
class TpuSlice:
    """Chips that are linked with each other, on hosts of equally many. Chip i is on host i // chips_per_host."""

    name: str
    chip: TpuChip
    num_chips: int
    chips_per_host: int

    @property
    def num_hosts(self) -> int:
        return self.num_chips // self.chips_per_host


def parse_slice(name: str) -> TpuSlice:
    """The slice of a name such as `v4-16`; v5e's may be spelled as in `v5litepod-16`, too.

    Raises:
        InputError: there is no such slice.
    """
    found = re.fullmatch(r"([a-z0-9]+)-([0-9]{1,6})", name.strip().lower().replace("v5litepod", "v5e"))
    chip = TPU_CHIPS.get(found[1]) if found else None
    if found is None or chip is None or int(found[2]) not in SLICE_SIZES[chip.cores_in_name]:
        raise InputError(
            f"mesh.pretend: got {name!r}{_suggest_slice_names(found, chip, name)}; known: {_known_slice_names()}"
        )
    num_chips = int(found[2]) // chip.cores_in_name
    chips_per_host = num_chips if num_chips <= chip.max_chips_of_one_host else chip.chips_per_host
    return TpuSlice(found[0], chip, num_chips, chips_per_host)


def _known_slice_names() -> str:
    return "; ".join(
        f"{chip.name}-N with N {'cores' if chip.cores_in_name > 1 else 'chips'}, one of "
        f"{', '.join(map(str, SLICE_SIZES[chip.cores_in_name]))}"
        for chip in TPU_CHIPS.values()
    )


def _suggest_slice_names(match: re.Match[str] | None, chip: TpuChip | None, name: str) -> str:
    if match is None or chip is None:
        names = [f"{chip.name}-{size}" for chip in TPU_CHIPS.values() for size in SLICE_SIZES[chip.cores_in_name]]
        return did_you_mean(nearest_names(name, names)[:3])
    sizes = SLICE_SIZES[chip.cores_in_name]
    below, above = [n for n in sizes if n < int(match[2])][-1:], [n for n in sizes if n > int(match[2])][:1]
    return did_you_mean([f"{chip.name}-{size}" for size in below + above])


def find_chip(device_kind: str) -> TpuChip | None:
    """The chip of a device, by what JAX calls its kind; None of any other device."""
    return next((chip for chip in TPU_CHIPS.values() if device_kind.startswith(chip.device_kind)), None)
