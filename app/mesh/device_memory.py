"""The memory of devices and hosts, and its peak use."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled

from app.mesh.devices import simulated_slice


def peak_memory_bytes() -> int:
    """Returns the peak memory of the fullest local device; of the process if devices do not report it (the CPU)."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stats):
        return max(s["peak_bytes_in_use"] for s in stats)
    # Linux reports KiB, macOS bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_memory_bytes() -> int | None:
    """Returns the memory of a local device; on a CPU, its share of the host's; None if it is unknown."""
    if (simulated := simulated_slice()) is not None:
        return simulated.chip.hbm_bytes
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_limit" in s for s in stats):
        return min(s["bytes_limit"] for s in stats)
    if jax.local_devices()[0].platform != "cpu":
        return None
    return host_memory_bytes() // jax.local_device_count()


def program_memory_bytes(program: Compiled) -> int:
    """Returns the memory of a program on each device while it runs, its arguments included, as the compiler counts."""
    found: Any = program.memory_analysis()
    outputs = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + outputs + found.temp_size_in_bytes


def host_memory_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Returns the memory of the machine, or of its container."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return min(installed, int(allowed)) if allowed.isdigit() else installed
