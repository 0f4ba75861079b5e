"""Compiled programs: kept on disk, so that only the first of several runs compiles them, and counted."""

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
"""Of all programs together; those that were not used for longest are dropped."""
LOCK_TIMEOUT_S = 10
"""As long as JAX waits for the folder's lock."""

_log = logging.getLogger(__name__)
_warned_about = set[Path]()


def use_program_cache() -> None:
    """Makes JAX keep the programs that it compiles in `$XDG_CACHE_HOME/grpo/programs`, from where later runs load them.

    Machines whose processors differ, which may share a home directory, keep programs of their own. What JAX's own
    variables (`JAX_COMPILATION_CACHE_DIR` and others) say takes precedence. A folder that cannot be used is a warning:
    everything is then compiled anew.
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
        _log.warning("programs are compiled anew, because they cannot be kept: %s; set XDG_CACHE_HOME", reason)
        return
    config.update("jax_compilation_cache_dir", str(folder))
    if config.jax_compilation_cache_max_size == -1:
        config.update("jax_compilation_cache_max_size", MAX_BYTES)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # By default, only what took a second to compile is kept; a step has many small programs.
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning, folder)


def share_program_cache() -> None:
    """Adapts the cache to several hosts, of which JAX lets the first alone write; the others read without its lock."""
    if jax.process_count() == 1:
        return
    if jax.devices()[0].platform == "gpu" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # Hosts that compile a program tune it together: one that loads it would keep the others waiting.
        jax.config.update("jax_compilation_cache_dir", None)
    if jax.process_index() > 0:
        jax.config.update("jax_compilation_cache_max_size", -1)


def _show_warning(show: Callable[..., None], folder: Path, message: Warning | str, *where: Any, **more: Any) -> None:
    """Shows JAX's first warning about a program that cannot be read or written as one about the folder."""
    if "persistent compilation cache entry" not in str(message):
        show(message, *where, **more)
        return
    if folder not in _warned_about:
        _warned_about.add(folder)
        advice = "if this goes on, delete the folder while no run uses it"
        _log.warning("programs in %s cannot be kept or loaded, and are compiled anew: %s; %s", folder, message, advice)


def _processor() -> str:
    """Returns a name of this machine's processor and its instructions."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    # The line is called so on x86 and ARM.
    instructions = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(instructions.encode()).hexdigest()[:8]}"


def _make_private(folder: Path, *names: str) -> Path:
    """Makes folders inside one another that only this user may write to, and returns the last.

    Raises:
        PermissionError: others could put programs into one of them, from where they would be run.
    """
    for name in names:
        folder /= name
        folder.mkdir(exist_ok=True, mode=0o700)
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022 or folder.is_symlink():
            raise PermissionError(f"others than this user may write to {folder}")
    return folder


def _tidy(folder: Path) -> None:
    """Removes the oldest of many programs, and those whose writing was interrupted, which JAX would never replace."""
    with FileLock(folder / ".lockfile", timeout=LOCK_TIMEOUT_S):
        programs = set(folder.glob("*-cache"))
        # Written after the program, under the same lock, and again at each use.
        used = {path: path.with_name(path.name.removesuffix("-cache") + "-atime") for path in programs}
        whole = sorted((path for path in programs if used[path].exists()), key=lambda path: used[path].stat().st_mtime)
        for path in programs - {*whole[-MAX_PROGRAMS:]}:
            path.unlink()
            used[path].unlink(missing_ok=True)


class CompilationCounter:
    """Counts what XLA compiles in this process, from its creation until it is closed; not what a cache on disk has."""

    # Each request has a duration, including those that the cache answers.
    REQUEST, CACHE_HIT = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"

    def __init__(self) -> None:
        self._count = 0
        self.seconds = 0.0
        """Total seconds of compiling programs and of loading them."""
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
