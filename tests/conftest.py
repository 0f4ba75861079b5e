"""Sets up tests with eight virtual CPU devices, without network and without the caller's settings.

A test of a single device builds its mesh from `jax.devices()[:1]`.
"""

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from settings.loading.synonyms import ALIASES, HISTORIC_NAMES

REPOSITORY = Path(__file__).resolve().parent.parent

pytest_plugins = ("tests.run_fixtures", "tests.reward.processes")

# Variables that would bring the caller's settings, secrets, terminal width or colours into the tests.
FOREIGN = {name.upper() for name in (*ALIASES, *HISTORIC_NAMES)} | {
    "WANDB_API_KEY",
    "HF_TOKEN",
    "COLUMNS",
    "FORCE_COLOR",
    "PY_COLORS",
    "GITHUB_ACTIONS",
}

# Background jobs of a shell ignore Ctrl-C, and the programs that tests interrupt would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

for name in [name for name in os.environ if name in FOREIGN or name.startswith("GRPO__")]:
    del os.environ[name]

# Set for this process and its children. WANDB_MODE is left out: it is a historic name of `logging.wandb_mode` and
# would be a setting of every test; wandb is not used while `logging.wandb_project` is null.
os.environ["JAX_PLATFORMS"] = "cpu"
# The cache is shared by all processes of the suite and kept between runs. Every program is written, however fast
# it was compiled.
PROGRAMS = REPOSITORY / ".pytest_cache" / "programs"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Most of the test time is compilation of programs that run once for a very short time. Set this to false to test the
# optimized programs that users run, which takes longer.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
FLAGS = [
    # The fusion emitters take more than half of the suite's processor time to compile programs that run once. JAX
    # 0.11 has nothing else, and ends the process at a flag that it does not know.
    *["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10."),
    # pytest-xdist keeps all cores busy, so that splitting a program among compiler threads only adds work.
    "--xla_cpu_parallel_codegen_split_count=1",
    # Virtual devices share a few cores: on a busy machine a device may wait for another longer than the 40 s after
    # which XLA ends the process.
    "--xla_cpu_collective_call_terminate_timeout_seconds=240",
]
# Workers of pytest-xdist inherit the variable, and each flag must appear once, because the cache's keys contain it.
os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*os.environ.get("XLA_FLAGS", "").split(), *FLAGS]))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import jax  # noqa: E402  (reads the variables above)
from jax.experimental import pallas  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
# Traced programs are many small, long-lived objects: with the default thresholds, collection takes 5 % of the time.
gc.set_threshold(50_000, 20, 100)

# No deadlines: the first example of a property may compile, and the machine may be busy with something else.
# CI tries the same examples every time.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=os.environ.get("CI") in ("1", "true"),
)
hypothesis.settings.load_profile("suite")

MAX_BYTES = 2 * 2**30
"""Maximum number of cached programs; if there are more, all are deleted."""
COMPILING = "/jax/core/compile/backend_compile_duration"
seconds_compiling: list[float] = []
"""Seconds per program that a process of the suite compiled or loaded from the compilation cache."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and sum(path.stat().st_size for path in PROGRAMS.glob("*")) > MAX_BYTES:
        shutil.rmtree(PROGRAMS)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: seconds_compiling.append(duration_secs) if event == COMPILING else None
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["seconds_compiling"] = seconds_compiling  # pyright: ignore


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds the times of a process that pytest-xdist started; a process that died reports none."""
    seconds_compiling.extend(getattr(node, "workeroutput", {}).get("seconds_compiling", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(
        f"compiling: {sum(seconds_compiling):.0f} s in all processes of the suite, {len(seconds_compiling)} programs"
    )


MAPS = Path("/proc/self/maps")
MANY_MAPS = 20_000


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go() -> Iterator[None]:
    """Frees compiled programs after a file if there are many: a process with more than 65,530 memory maps is killed."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    call = pallas.pallas_call
    monkeypatch.setattr(pallas, "pallas_call", lambda *kernel, **how: call(*kernel, **{**how, "interpret": True}))


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    folder = REPOSITORY.parent / "shared" / "data" / "gsm8k"
    if not (folder / "train.jsonl").is_file():
        pytest.skip(f"GSM8K is not at {folder}")
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: $GRPO_TEST_SMOLLM2, or the file that scripts/fetch_smollm2.sh downloads."""
    named = os.environ.get("GRPO_TEST_SMOLLM2")
    if named:
        assert Path(named).is_file(), f"GRPO_TEST_SMOLLM2 names {named}, which is not a file"
        return Path(named)
    found = sorted(
        path for path in (REPOSITORY / "models").glob("**/*.gguf") if path.name.lower().startswith("smollm2-135m")
    )
    if not found:
        pytest.skip("no SmolLM2 in models/: bash scripts/fetch_smollm2.sh, or set GRPO_TEST_SMOLLM2")
    return found[0]
