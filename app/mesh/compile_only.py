"""Devices that are not there, for which the accelerator's own compiler compiles programs without running them."""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

from jax.experimental import topologies

from app.mesh.gpu_cards import GpuHost
from app.mesh.tpu_chips import TpuSlice
from settings.errors import InputError

SCHEDULES = ".*schedule-analysis_final_bundles.*"
"""The compiler's files on the instructions that a Pallas kernel became."""


def compile_only_devices(place: TpuSlice | GpuHost) -> list[Any]:
    """Returns the devices of a TPU slice or of a host with GPUs, as the accelerator's compiler describes them.

    Raises:
        InputError: the compiler is not installed, or does not know the devices.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        description = topologies.get_topology_desc(
            platform=place.compiler, topology_name=place.topology_name, **place.topology_options
        )
    except Exception as error:  # JAX raises several types, some of them its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"mesh.pretend: cannot compile for {place.name}: {reason}; run pip install -e "
            f"'.[{place.compiler}]', which installs the compiler on any x86-64 Linux, with or without the device"
        ) from None
    return list(description.devices)


def keep_kernel_schedules() -> None:
    """Makes libtpu write the schedule of each kernel that it compiles. Must run before JAX loads it."""
    options = {"--xla_jf_dump_llo_text": "true", "--xla_jf_dump_llo_pass_label_regex": SCHEDULES}
    options["--xla_jf_dump_to"] = tempfile.mkdtemp(prefix="grpo-kernels-")
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    added = shlex.join(f"{name}={value}" for name, value in options.items())
    os.environ["LIBTPU_INIT_ARGS"] = f"{given} {added}".strip()


def kernel_schedules() -> Path | None:
    """Returns the folder of `keep_kernel_schedules`; None if libtpu writes none."""
    given = shlex.split(os.environ.get("LIBTPU_INIT_ARGS", ""))
    folders = [one.partition("=")[2] for one in given if one.startswith("--xla_jf_dump_to=")]
    return Path(folders[-1]) if folders else None
