"""Tests that a second start loads the programs of the first, and that unusable cache folders are reported."""

import logging
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from app.mesh import program_cache
from app.mesh.program_cache import MAX_BYTES, share_program_cache, use_program_cache
from tests.program import DEADLINE_S, REPOSITORY, metrics_of, of_tiny, reproducible, settings

CONFIG = (
    *("jax_enable_compilation_cache", "jax_compilation_cache_dir"),
    *("jax_compilation_cache_max_size", "jax_persistent_cache_min_compile_time_secs"),
)


def read_config(name: str) -> object:
    return getattr(jax.config, name)


@pytest.fixture(autouse=True)
def unused_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starts each test like a user's process, with a cache that has no folder yet."""
    before = {name: read_config(name) for name in CONFIG}
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def folder_in(cache_home: Path) -> Path:
    (folder,) = (cache_home / "grpo" / "programs").iterdir()
    return folder


def test_programs_are_cached_in_a_private_folder(tmp_path: Path) -> None:
    use_program_cache()
    folder = folder_in(tmp_path)
    assert read_config("jax_compilation_cache_dir") == str(folder)
    assert read_config("jax_compilation_cache_max_size") == MAX_BYTES
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.name.startswith(f"{platform.machine()}-")


@pytest.mark.parametrize(("name", "value"), [(CONFIG[0], False), (CONFIG[1], "/elsewhere")])
def test_cache_settings_of_jax_override_ours(name: str, value: object, tmp_path: Path) -> None:
    jax.config.update(name, value)
    use_program_cache()
    assert read_config(name) == value and not (tmp_path / "grpo").exists()


def test_other_hosts_only_read_the_program_cache_that_process_0_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_program_cache()
    share_program_cache()
    assert read_config("jax_compilation_cache_max_size") == MAX_BYTES
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    share_program_cache()
    assert read_config("jax_compilation_cache_max_size") == -1
    assert read_config("jax_compilation_cache_dir") is not None
    # Hosts with GPUs autotune their programs together, so the other hosts must not load cached ones.
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    share_program_cache()
    assert read_config("jax_compilation_cache_dir") is None


def test_an_unusable_cache_folder_is_reported_by_a_warning(tmp_path, monkeypatch, caplog):
    def assert_refused(reason: str) -> None:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="app.mesh.program_cache"):
            use_program_cache()
        assert read_config("jax_compilation_cache_dir") is None
        (message,) = caplog.messages
        assert message.startswith("compiled programs cannot be cached: ") and reason in message
        assert message.endswith("; set XDG_CACHE_HOME to another folder")

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert_refused("File exists")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_program_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    for shared in (folder_in(tmp_path), tmp_path / "grpo"):
        shared.chmod(0o770)
        assert_refused(f"other users may write to {shared};")
        shared.chmod(0o700)
    monkeypatch.setattr(program_cache, "LOCK_TIMEOUT_S", 0.01)
    with program_cache.FileLock(folder_in(tmp_path) / ".lockfile"):
        assert_refused("another process holds the lock of its folder")


def test_interrupted_and_oldest_programs_are_removed_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_program_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    for age, name in enumerate(("newest", "older", "oldest")):
        for suffix in ("cache", "atime"):
            path = folder_in(tmp_path) / f"{name}-{suffix}"
            path.touch()
            os.utime(path, (1e9 - age, 1e9 - age))
    (folder_in(tmp_path) / "half-cache").touch()
    monkeypatch.setattr(program_cache, "MAX_PROGRAMS", 2)
    use_program_cache()
    left = {path.name for path in folder_in(tmp_path).glob("*-[ac]*e")}
    assert left == {"newest-cache", "newest-atime", "older-cache", "older-atime"}


@pytest.mark.slow
def test_a_second_start_compiles_only_programs_whose_cache_file_is_damaged(tiny_model: Path, tmp_path: Path) -> None:
    more = ("run.steps=1", "eval.every_steps=1", "eval.num_prompts=8", "rollout.slots=8", "rollout.mode=exact")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMP", "JAX_PERS"))}
    environment |= {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(tmp_path)}
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "true"}

    def train(name: str) -> tuple[dict, str]:
        arguments = [*of_tiny(tiny_model), *settings(*more, f"run.dir={tmp_path}", f"run.name={name}")]
        command = [sys.executable, "-m", "cli", "train", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr
        return metrics_of(tmp_path / name)[-1], done.stderr

    first, _ = train("first")
    second, _ = train("second")
    assert first["perf/compilations"] > 5
    assert second["perf/compilations"] == 0
    programs = sorted(folder_in(tmp_path).glob("*-cache"))
    for number, program in enumerate(programs):
        content = bytearray(program.read_bytes())
        content[len(content) // 2] ^= 16
        program.write_bytes(content if number % 2 else content[: len(content) // 2])
    third, shown = train("third")
    assert third["perf/compilations"] == first["perf/compilations"]
    assert shown.count("cannot be cached or loaded, and are recompiled: Error reading persistent") == 1
    assert "UserWarning" not in shown
    assert reproducible([first]) == reproducible([second]) == reproducible([third])
