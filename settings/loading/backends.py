"""Finds out which devices JAX would use, without importing it."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping
from glob import glob
from importlib.util import find_spec

from settings.schema.mesh import MeshSettings

DEVICE_FILES = {"cuda": ("/dev/nvidia[0-9]*", "/dev/dxg"), "tpu": ("/dev/accel*", "/dev/vfio/[0-9]*")}
"""Maps a value of `mesh.platform` to patterns of its device files; `/dev/dxg` is a GPU under WSL."""


def may_have(platform: str) -> bool:
    """Returns whether this host has device files that suggest the platform `cuda` or `tpu`."""
    return any(map(glob, DEVICE_FILES[platform]))


def is_backend_installed(platform: str) -> bool:
    """Returns whether JAX's backend for a platform (`cpu`, `cuda` or `tpu`) is installed."""
    if platform == "tpu":
        return find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ
    folders = getattr(find_spec("jax_plugins"), "submodule_search_locations", None) or []
    return platform == "cpu" or any(platform in module.name for module in pkgutil.iter_modules(folders))


def expects_accelerator(mesh: MeshSettings, environ: Mapping[str, str]) -> bool:
    """Returns whether the devices will most likely be TPUs or GPUs, real or simulated ones."""
    if mesh.pretend is not None or mesh.platform in ("tpu", "cuda"):
        return True
    if mesh.platform == "cpu" or environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return False
    return any(may_have(platform) and is_backend_installed(platform) for platform in DEVICE_FILES)
