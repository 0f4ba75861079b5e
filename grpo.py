"""The Python API, and the entry point of the command line: `grpo.py` in a checkout, `grpo/__init__.py` when installed.

Importing it imports nothing else; the first call of a function imports the program. `cli`, `app` and `settings` are in
the same folder. The program's own processes put that folder first on `sys.path`, so that they never import a user's
modules with these names.

Each function does what the command with its name does, but logs to stderr and prints nothing on stdout. `overrides`
maps settings to values, as in `{"run.steps": 20}` or `{"run": {"steps": 20}}`. Like `--set`, it is overridden by
environment variables such as `GRPO__RUN__STEPS`. Invalid input raises `grpo.InputError` with the command's error
message, which names arguments instead of options.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import os

    from app.commands.python_api import Samples
    from app.environments.interface import Environment as Environment
    from app.environments.interface import StepResult as StepResult
    from app.environments.interface import ToolCall as ToolCall
    from app.evaluation.printed_summary import EvaluationSummary
    from app.training.train import TrainingRun
    from settings import InputError as InputError

    File = str | os.PathLike[str] | None
    Rows = Iterable[Mapping[str, Any]] | None
    Reward = Callable[..., Any] | str | Mapping[str, Any]
    Rewards = Reward | Iterable[Reward] | None

PROGRAM_FOLDER = str(Path(__file__).resolve().parent)
PACKAGES = ("app", "settings")
INTERFACE = ("StepResult", "Environment", "ToolCall")
"""Names that users' environments import; they are loaded without the rest of the program."""


def train(
    config: File = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    rewards: Rewards = None,
    data: Rows = None,
    eval_data: Rows = None,
    on_step: Callable[[Mapping[str, Any]], object] | None = None,
    resume: Literal["auto", "never", "must"] = "never",
    allow_changed: Sequence[str] = (),
    **unknown: object,
) -> TrainingRun:
    """Trains a model, as `grpo train` does, and returns its run directory and metrics.

        def brevity(completion, answer):
            return len(answer) / max(len(completion), 1)

        run = grpo.train(overrides={"run.steps": 20}, rewards=["arithmetic", brevity])
        rewards = [line["reward/mean"] for line in run.metrics[1:]]

    Args:
        config: a preset or a YAML file. None means the preset `quickstart` if the model is built in, else no preset.
        overrides: settings by name. The value of `algorithm.estimator` may also be a Python function.
        rewards: the value of `reward.functions`; a Python function may take the place of a name or path. It is called
            in this process: an exception affects only its sample, but the limits of `plugins.*` do not apply. In the
            settings of the run it is `callable:NAME`; pass it again to resume the run.
        data: rows in place of `data.source`, one dict each, as in a JSON Lines file. They are saved in `<run>/data/`.
        eval_data: rows in place of `data.eval_source`.
        on_step: called on every host after each step with its line of `metrics.jsonl`. If it returns a true value on
            any host, the run saves a checkpoint and ends.
        resume: `never` starts a run and refuses a used directory; `auto` continues the run if it has a checkpoint,
            otherwise starts it; `must` refuses to start without a checkpoint.
        allow_changed: when resuming, settings or sections that may differ from those of the run so far although they
            change what it learns.
        unknown: any other argument is refused; the error suggests the setting or argument that was probably meant.

    Raises:
        InputError: an input cannot be used.
        KeyboardInterrupt: a first Ctrl-C ended the run with a checkpoint. A second one ends the process.
        RuntimeError: training failed.
    """
    return _program().train(**locals())


def evaluate(
    config: File = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    checkpoint: File = None,
    data: Rows = None,
    rewards: Rewards = None,
    out: File = None,
) -> EvaluationSummary | None:
    """Evaluates a model or a checkpoint on held-out prompts, as `grpo evaluate` does. Only process 0 gets the summary.

        after = grpo.evaluate(checkpoint="runs/quickstart-seed0")
        print(after.metrics["eval/accuracy"].value, after.metrics["eval/accuracy"].interval)

    Args:
        config: as for `train`; with a checkpoint, None means the settings of its run.
        checkpoint: `<run>/checkpoints/<step>` or a run directory; None evaluates the model of `model.path`.
        data: rows in place of `data.eval_source`.
        rewards: as for `train`; the first one determines the accuracy.
        out: a file for the samples.
    """
    return _program().evaluate(**locals())


def rollout(
    config: File = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    checkpoint: File = None,
    data: Rows = None,
    limit: int | None = None,
    out: File = None,
) -> Samples | None:
    """Samples completions of prompts, as `grpo rollout` does. Only process 0 gets the samples.

        samples = grpo.rollout(data=[{"prompt": "12 + 34 = ?", "answer": "46"}])
        print(samples.records[0]["completion"])

    Args:
        config: as for `evaluate`.
        checkpoint: as for `evaluate`.
        data: rows in place of `data.source`.
        limit: the number of prompts to use; None for all.
        out: a file for the samples; an interrupted rollout to the same file is continued.
    """
    return _program().rollout(**locals())


def score(
    samples: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    config: File = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    role: Literal["policy", "reference", "critic", "reward"] = "policy",
    checkpoint: File = None,
    rewards: Rewards = None,
    out: File = None,
) -> Samples | None:
    """Adds logprobs, values or rewards to samples, as `grpo score` does. Only process 0 gets the scored samples.

        graded = grpo.score(samples.records, role="reward", rewards=[brevity])
        print(graded.summary["reward/mean"])

    Args:
        samples: a file of samples, or the samples as dicts, such as the `records` that `rollout` returns.
        config: as for `evaluate`.
        role: `policy` and `reference` add logprobs, `critic` adds values, `reward` calls the reward functions and the
            reward model.
        checkpoint: as for `evaluate`; only for the roles `policy` and `critic`.
        rewards: as for `train`.
        out: a file for the scored samples.
    """
    return _program().score(**locals())


def __getattr__(name: str) -> Any:
    if name == "InputError":
        return _program().InputError
    if name in INTERFACE:
        globals().update({one: getattr(_interface(), one) for one in INTERFACE})
        return globals()[name]
    hint = "; its functions are train, evaluate, rollout and score, and sops/migrate/from_trl.md is for users of TRL"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{'' if name.startswith('_') else hint}")


def _interface() -> ModuleType:
    """Imports only the interface of environments, whose processes must start fast and may import a user's own `app`."""
    file = Path(PROGRAM_FOLDER) / "app" / "environments" / "interface.py"
    specification = importlib.util.spec_from_file_location("grpo_interface", file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _program() -> Any:
    """Imports the program and returns the module that implements the API; afterwards `sys.path` is as before."""
    add_program_to_path()
    try:
        return importlib.import_module("app.commands.python_api")
    finally:
        sys.path.remove(PROGRAM_FOLDER)


def add_program_to_path() -> None:
    """Puts this program's folder first on `sys.path`, and imports `app` and `settings` from it.

    Raises:
        ImportError: other modules with these names are already imported.
    """
    # A folder without `__init__.py` is a namespace package without a file.
    loaded = {name: sys.modules[name] for name in PACKAGES if name in sys.modules}
    places = {name: [*getattr(one, "__path__", ()), getattr(one, "__file__", "")][0] for name, one in loaded.items()}
    own = Path(PROGRAM_FOLDER)
    others = [f"{name} from {place}" for name, place in places.items() if Path(place).resolve() != own / name]
    if others:
        raise ImportError(
            f"grpo has its own modules {' and '.join(PACKAGES)}, but this process has already imported "
            f"{' and '.join(others)}. Rename those modules, or call grpo in a process that does not import them"
        )
    sys.path.insert(0, PROGRAM_FOLDER)
    # Import them now, because Ray puts the working directory first on the path before a worker's first task.
    for package in PACKAGES:
        importlib.import_module(package)


def main() -> None:
    """Runs the command line; the entry point of the console script."""
    add_program_to_path()
    from cli import main as run_command_line

    run_command_line()
