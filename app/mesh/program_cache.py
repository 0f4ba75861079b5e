"""The disk cache of compiled programs, and a counter of compilations."""

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

MAX_BYTES, MAX_PROGRAMS = 8 * 2**30, 4000
"""Limits of the cache; the least recently used programs are dropped."""
LOCK_TIMEOUT_S = 10
"""Maximum wait for the lock of the folder, as in JAX."""

_log = logging.getLogger(__name__)
_warned_about = set[Path]()


def use_program_cache() -> None:
    """Makes JAX cache compiled programs in `$XDG_CACHE_HOME/grpo/programs` for later runs.

    Machines with different processors, which may share a home directory, have separate caches. JAX's own variables
    (`JAX_COMPILATION_CACHE_DIR` and others) take precedence. If the folder cannot be used, a warning is logged and
    everything is recompiled.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    try:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache_home.mkdir(parents=True, exist_ok=True)
        folder = _make_private(cache_home, "grpo", "programs", _processor())
        _tidy(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        reason = "another process holds the lock of its folder" if isinstance(error, Timeout) else error
        _log.warning("compiled programs cannot be cached: %s; set XDG_CACHE_HOME to another folder", reason)
        return
    config.update("jax_compilation_cache_dir", str(folder))
    if config.jax_compilation_cache_max_size == -1:
        config.update("jax_compilation_cache_max_size", MAX_BYTES)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # By default, only programs that took a second to compile are cached; a step has many small ones.
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning, folder)


def share_program_cache() -> None:
    """Adapts the cache to several hosts: since JAX lets only process 0 write, the others read without a lock."""
    if jax.process_count() == 1:
        return
    if jax.devices()[0].platform == "gpu" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # Hosts autotune a program together: a host that loads it from the cache would keep the others waiting.
        jax.config.update("jax_compilation_cache_dir", None)
    if jax.process_index() > 0:
        jax.config.update("jax_compilation_cache_max_size", -1)


def _show_warning(show: Callable[..., None], folder: Path, message: Warning | str, *where: Any, **more: Any) -> None:
    """Shows one warning about the folder instead of JAX's warnings about programs that cannot be cached or loaded."""
    if "persistent compilation cache entry" not in str(message):
        show(message, *where, **more)
        return
    if folder not in _warned_about:
        _warned_about.add(folder)
        advice = "if this persists, delete the folder while no run uses it"
        _log.warning("programs in %s cannot be cached or loaded, and are recompiled: %s; %s", folder, message, advice)


def _processor() -> str:
    """Returns a string that identifies the architecture and the instruction set of this machine's processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    # The line is called `flags` on x86 and `Features` on ARM.
    instructions = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(instructions.encode()).hexdigest()[:8]}"


def _make_private(folder: Path, *names: str) -> Path:
    """Creates nested folders that only this user may write to, and returns the innermost.

    Raises:
        PermissionError: other users could put programs into one of them, which this program would run.
    """
    for name in names:
        folder /= name
        folder.mkdir(exist_ok=True, mode=0o700)
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022 or folder.is_symlink():
            raise PermissionError(f"other users may write to {folder}")
    return folder


def _tidy(folder: Path) -> None:
    """Removes the least recently used programs beyond the limit, and partly written ones, which JAX never replaces."""
    with FileLock(folder / ".lockfile", timeout=LOCK_TIMEOUT_S):
        programs = set(folder.glob("*-cache"))
        # JAX writes the `-atime` file after the program, under the same lock, and again at each use.
        used = {path: path.with_name(path.name.removesuffix("-cache") + "-atime") for path in programs}
        whole = sorted((path for path in programs if used[path].exists()), key=lambda path: used[path].stat().st_mtime)
        for path in programs - {*whole[-MAX_PROGRAMS:]}:
            path.unlink()
            used[path].unlink(missing_ok=True)


class CompilationCounter:
    """Counts XLA's compilations in this process until `close`; programs loaded from the disk cache do not count."""

    # JAX reports a duration also for programs from the cache.
    REQUEST, CACHE_HIT = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"

    def __init__(self) -> None:
        self._count = 0
        self.seconds = 0.0
        """Total seconds spent compiling and loading programs."""
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: object) -> None:
        if event == self.REQUEST:
            self._count += 1
            self.seconds += duration_secs

    def _on_event(self, event: str, **_: object) -> None:
        self._count -= event == self.CACHE_HIT

    def take_count(self) -> int:
        """Returns the number of compilations since the last call."""
        count, self._count = self._count, 0
        return count

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)
