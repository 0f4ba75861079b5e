"""Compiled programs kept on disk, so that only the first of several runs compiles them."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout

MAX_BYTES = 8 * 2**30
"""Of all programs together; those that were not used for longest are dropped."""
LOCK_TIMEOUT_S = 10
"""As long as JAX waits for the folder's lock."""

_log = logging.getLogger(__name__)
_warn_once = functools.cache(_log.warning)


def use_program_cache() -> None:
    """Makes JAX keep the programs that it compiles in `$XDG_CACHE_HOME/grpo/programs`, from where later runs load them.

    Machines whose processors differ, which may share a home directory, keep programs of their own. JAX's own variables
    (`JAX_COMPILATION_CACHE_DIR`, `JAX_ENABLE_COMPILATION_CACHE`) take precedence. A folder that cannot be used is a
    warning: everything is then compiled anew.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo" / "programs" / _processor()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner(folder)
        _remove_interrupted(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        reason = f"{folder} is locked by another process" if isinstance(error, Timeout) else error
        _log.warning("programs are compiled anew, because they cannot be kept: %s; set XDG_CACHE_HOME", reason)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    # By default, only what took a second to compile is kept; a step has many small programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning, folder)


def _show_warning(show: Callable[..., None], folder: Path, message: Warning | str, *where: Any, **more: Any) -> None:
    """Shows a warning of JAX about a program that cannot be read or written once, as one about the folder."""
    if "persistent compilation cache entry" in str(message):
        _warn_once("programs in %s cannot be read or written, and are compiled anew; delete the folder", folder)
        _log.debug("%s", message)
    else:
        show(message, *where, **more)


def share_program_cache() -> None:
    """Lets all hosts but the first read programs without the folder's lock: JAX writes them on the first alone."""
    if jax.process_index() > 0:
        jax.config.update("jax_compilation_cache_max_size", -1)


def _processor() -> str:
    """Returns a name of this machine's processor and its instructions."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    # The line is called so on x86 and ARM.
    instructions = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(instructions.encode()).hexdigest()[:8]}"


def _check_owner(folder: Path) -> None:
    """Raises PermissionError if others could put programs into the folder, from where they are run."""
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"others than this user may write to {folder}")


def _remove_interrupted(folder: Path) -> None:
    """Removes programs whose writing was interrupted, which JAX would neither use nor replace."""
    with FileLock(folder / ".lockfile", timeout=LOCK_TIMEOUT_S):
        for program in folder.glob("*-cache"):
            # Written after the program, under the same lock.
            if not program.with_name(f"{program.name.removesuffix('-cache')}-atime").exists():
                program.unlink()
