"""Tests that a second start loads the programs of the first, and of folders in which none can be kept."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from app.mesh import program_cache
from app.mesh.program_cache import MAX_BYTES, CompilationCounter, share_program_cache, use_program_cache
from tests.program import DEADLINE_S, REPOSITORY, metrics_of, of_tiny, reproducible, settings

CONFIG = (
    *("jax_enable_compilation_cache", "jax_compilation_cache_dir"),
    *("jax_compilation_cache_max_size", "jax_persistent_cache_min_compile_time_secs"),
)


def read_config(name: str) -> object:
    return getattr(jax.config, name)


@pytest.fixture(autouse=True)
def unused_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starts each test as a process of a user starts: with a cache that has no folder yet."""
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


def test_programs_are_kept_in_a_folder_of_the_user_and_the_processor(tmp_path: Path) -> None:
    use_program_cache()
    folder = folder_in(tmp_path)
    assert read_config("jax_compilation_cache_dir") == str(folder)
    assert read_config("jax_compilation_cache_max_size") == MAX_BYTES
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.name == program_cache._processor()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("name", "value"), [(CONFIG[0], False), (CONFIG[1], "/elsewhere")])
def test_jax_s_own_settings_take_precedence(name: str, value: object, tmp_path: Path) -> None:
    jax.config.update(name, value)
    use_program_cache()
    assert read_config(name) == value
    assert not (tmp_path / "grpo").exists()


def test_only_the_first_host_locks_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    use_program_cache()
    share_program_cache()
    assert read_config("jax_compilation_cache_max_size") == MAX_BYTES
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    share_program_cache()
    assert read_config("jax_compilation_cache_max_size") == -1


def test_a_folder_that_cannot_be_used_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="app.mesh.program_cache"):
            use_program_cache()
        assert read_config("jax_compilation_cache_dir") is None
        (message,) = caplog.messages
        assert message.startswith("programs are compiled anew, because they cannot be kept: ")
        assert message.endswith("; set XDG_CACHE_HOME")
        return message

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "File exists" in refused()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_program_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    for shared in (folder_in(tmp_path), folder_in(tmp_path).parent, tmp_path / "grpo"):
        shared.chmod(0o770)
        assert f"others than this user may write to {shared};" in refused()
        shared.chmod(0o700)
    monkeypatch.setattr(program_cache, "LOCK_TIMEOUT_S", 0.01)
    with program_cache.FileLock(folder_in(tmp_path) / ".lockfile"):
        assert "another process holds the lock of its folder" in refused()


def test_a_program_whose_writing_was_interrupted_is_removed(tmp_path: Path) -> None:
    use_program_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    for name in ("whole-cache", "whole-atime", "half-cache"):
        (folder_in(tmp_path) / name).write_bytes(b"12345678")
    use_program_cache()
    assert {path.name for path in folder_in(tmp_path).glob("*e")} >= {"whole-cache", "whole-atime"}
    assert not (folder_in(tmp_path) / "half-cache").exists()


def test_of_too_many_programs_the_oldest_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_program_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    for age, name in enumerate(("newest", "older", "oldest")):
        for suffix in ("cache", "atime"):
            path = folder_in(tmp_path) / f"{name}-{suffix}"
            path.touch()
            os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(program_cache, "MAX_PROGRAMS", 2)
    use_program_cache()
    left = {path.name for path in folder_in(tmp_path).glob("*e")}
    assert left - {".lockfile"} == {"newest-cache", "newest-atime", "older-cache", "older-atime"}


def test_hosts_with_gpus_which_tune_programs_together_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    use_program_cache()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    share_program_cache()
    assert read_config("jax_compilation_cache_dir") is None


def test_programs_that_the_cache_has_are_not_compiled() -> None:
    request, hit = CompilationCounter.REQUEST, "/jax/compilation_cache/cache_hits"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompilationCounter, "CACHE_HIT", hit)
        counter = CompilationCounter()
        jax.monitoring.record_event_duration_secs(request, 2.0)
        assert (counter.take_count(), counter.seconds) == (1, 2.0)
        jax.monitoring.record_event(hit)
        jax.monitoring.record_event_duration_secs(request, 1.0)
        assert (counter.take_count(), counter.seconds) == (0, 3.0)
        counter.close()


def run(cache_home: Path, *arguments: str | Path) -> str:
    """Runs a command in a process whose programs are kept, and returns its stderr."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(cache_home)}
    environment = {name: value for name, value in environment.items() if not name.startswith(("JAX_COMP", "JAX_PERS"))}
    done = subprocess.run(
        [sys.executable, "-m", "cli", *map(str, arguments)],
        cwd=cache_home,
        env={**environment, "JAX_ENABLE_COMPILATION_CACHE": "true"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_damaged_programs_are_compiled_anew(
    tiny_model: Path, tmp_path: Path
) -> None:
    overrides = (
        *of_tiny(tiny_model),
        *settings("run.steps=1", "eval.every_steps=1", "eval.num_prompts=8", "rollout.slots=8", "rollout.mode=exact"),
    )

    def train(name: str) -> tuple[dict, str]:
        shown = run(tmp_path, "train", *overrides, *settings(f"run.dir={tmp_path}", f"run.name={name}"))
        return metrics_of(tmp_path / name)[-1], shown

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
    assert shown.count("cannot be kept or loaded, and are compiled anew: Error reading persistent") == 1
    assert "UserWarning" not in shown
    assert reproducible([first]) == reproducible([second]) == reproducible([third])
