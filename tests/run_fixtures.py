"""Provides a tiny model and tiny runs that many tests share."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.mesh.devices import simulate_slice
from app.mesh.program_cache import CompilationCounter
from app.rollout.workers.async_generation import AsyncRollout
from app.training.learner import LearnerGroup
from app.training.setup import RunSetup, prepare_run
from settings import load
from tests.program import here, of_tiny, succeeded, train_here
from tests.tiny_directory import write_model

TINY = """\
run: {{dir: {runs}, name: tiny, steps: 4}}
model: {{path: {model}}}
data: {{max_prompt_length: 16, num_problems: 40}}
rollout: {{prompts_per_step: 4, group_size: 4, max_new_tokens: 4}}
reward: {{functions: [arithmetic, {{name: arithmetic_format, weight: 0.5}}]}}
optimizer: {{learning_rate: 1e-3}}
checkpoint: {{every_steps: 2}}
eval: {{every_steps: 2, num_prompts: 20}}
"""

FULL = """\
run: {{dir: {runs}, name: full, steps: 12}}
model: {{path: {model}}}
data: {{max_prompt_length: 16, num_problems: 40}}
rollout: {{prompts_per_step: 4, group_size: 4, max_new_tokens: 4, temperature: 0.7, top_p: 0.9, min_p: 0.02}}
reward: {{functions: [arithmetic, {{name: arithmetic_format, weight: 0.5}}]}}
algorithm: {{beta: 0.05, epochs: 2, mini_batch_prompts: 2, max_tokens_per_device: 20}}
optimizer: {{learning_rate: 1e-3}}
mesh: {{cpu_devices: 8, shape: "1,2,4"}}
checkpoint: {{every_steps: 3, keep: 4}}
eval: {{every_steps: 3, num_prompts: 16}}
"""
"""A run with truncated sampling, a KL penalty, several epochs, mini-batches and micro-batches.

Its 12 steps extend into a second epoch of the 40 problems.
"""

NO_REPORT = "logging: {{report: false}}\n"
"""Settings without the report, which takes two seconds."""

LORA = {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "v_proj", "mlp"]}
"""Settings of the run with adapters."""

PPO = """\
run: {{dir: {runs}, name: ppo, steps: 4}}
model: {{path: {model}}}
data: {{max_prompt_length: 16, num_problems: 40}}
rollout: {{prompts_per_step: 8, group_size: 1, max_new_tokens: 4}}
reward: {{functions: [{{name: arithmetic_format, weight: 0.5}}]}}
algorithm:
  {{name: ppo, beta: 0.05, kl_target: 0.01, epochs: 2,
   mini_batch_prompts: 4, bootstrap_truncated: true, max_tokens_per_device: 32}}
critic: {{warmup_steps: 2, learning_rate: 1e-2, clip_range: 1e-3}}
optimizer: {{learning_rate: 1e-3, schedule: linear}}
mesh: {{cpu_devices: 8}}
checkpoint: {{every_steps: 1, keep: 4, best_metric: null}}
eval: {{every_steps: 0}}
"""

SCHEDULED = (
    *("rollout.scheduler=adaptive", "rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4"),
    *("rollout.workers.fast.count=4", "rollout.workers.heavy.count=4"),
)


@pytest.fixture(scope="session", autouse=True)
def programs_count_as_compiled() -> Iterator[None]:
    """Counts programs from the tests' compilation cache as compiled, as they would be for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompilationCounter, "CACHE_HIT", "")
        yield


@pytest.fixture
def calls_of_generation(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records, in order, the calls with which training submits and collects rounds and publishes weights."""
    calls: list[str] = []

    def record(name: str, call: Callable[..., Any]) -> None:
        def recorded(*arguments: Any, **named: Any) -> Any:
            calls.append(name.removesuffix("_round"))
            return call(*arguments, **named)

        monkeypatch.setattr(AsyncRollout, name, recorded)

    for name in ("submit", "collect_round", "publish"):
        record(name, getattr(AsyncRollout, name))
    return calls


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def real_devices_again() -> Iterator[None]:
    """Ends the simulation of a slice, or of a host with GPUs, after the test."""
    yield
    simulate_slice(None)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Returns a folder that the first process of the session fills, and all others only read."""
    in_worker = "PYTEST_XDIST_WORKER" in os.environ
    base = factory.getbasetemp().parent if in_worker else factory.getbasetemp()
    folder, is_made = base / name, base / f"{name}.made"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            is_made.touch()
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "models", lambda folder: write_model(folder / "tiny")) / "tiny"


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    """Returns the config of the smallest run, whose directory is `tmp_path / "runs" / "tiny"`."""
    return write_config(tmp_path, TINY + NO_REPORT, tiny_model)


@pytest.fixture
def full_config(tmp_path: Path, tiny_model: Path) -> Path:
    """Returns the config of a run of twelve full steps, whose directory is `tmp_path / "runs" / "full"`."""
    return write_config(tmp_path, FULL + NO_REPORT, tiny_model)


def write_config(folder: Path, text: str, model: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(text.format(runs=folder / "runs", model=model))
    return path


def launched(config: Path, *overrides: str) -> tuple[RunSetup, LearnerGroup]:
    with prepare_run(load(str(config), overrides, {}), resume="never") as launch:
        return launch, launch.learning


def run_once(
    factory: pytest.TempPathFactory, name: str, model: Path, *overrides: str, text: str = TINY + NO_REPORT
) -> Path:
    """Returns the directory of a run that succeeded, in which tests must not change anything."""
    folder = made_once(factory, name, lambda new: succeeded(train_here(write_config(new, text, model), *overrides)))
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Returns the directory of the smallest run, which has finished; tests must not change it."""
    return run_once(tmp_path_factory, "finished", tiny_model, text=TINY)


@pytest.fixture
def loose(finished: Path, tmp_path: Path) -> Path:
    """Returns a file with the samples of a step, outside any run."""
    return Path(shutil.copy(finished / "rollouts" / "step_000001.jsonl", tmp_path / "samples.jsonl"))


@pytest.fixture
def source(finished: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    shutil.copytree(finished / "rollouts", folder / "rollouts")
    shutil.copy(finished / "settings.yaml", folder)
    return folder


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Returns the directory of a run of two steps with adapters; tests must not change it."""
    lora = [f"model.lora.{name}={value}" for name, value in LORA.items()]
    return run_once(tmp_path_factory, "adapted", tiny_model, *lora, "run.steps=2", "optimizer.learning_rate=0.1")


@pytest.fixture(scope="session")
def sampled(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Returns a file with four samples of each of six prompts, in batches of four prompts; tests must not change it."""

    def sample(folder: Path) -> None:
        succeeded(here("rollout", *of_tiny(tiny_model), "--limit", "6", "--out", folder / "samples.jsonl"))

    return made_once(tmp_path_factory, "sampled", sample) / "samples.jsonl"


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Returns the directory of a run of twelve full steps without interruption; tests must not change it."""
    return run_once(tmp_path_factory, "uninterrupted", tiny_model, text=FULL + NO_REPORT)
