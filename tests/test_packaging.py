"""Tests that the wheel contains exactly what the program needs, and runs next to modules of the user."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from app.records.versions import code_digest, minimum_versions
from tests.program import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED_BY_ANOTHER = {"pydantic-core", "jaxlib"}
"""Packages of which pydantic and jax require exactly one version."""
OPTIONAL = {"math-verify": "math", "qwix": "qlora", "ray": "ray", "tensorboardx": "tensorboard"}
"""Packages of extras, which the program imports only if they are installed."""


def distribution(requirement: str) -> str:
    """Returns `ml-dtypes` for `ml_dtypes[extra]>=0.6; marker`."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def imported_packages() -> set[str]:
    names = set()
    for pattern in ("grpo.py", "cli.py", "app/**/*.py", "settings/**/*.py"):
        for path in REPOSITORY.glob(pattern):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names.add((node.module or "").split(".")[0])
    return names - set(sys.stdlib_module_names) - {"app", "settings", "cli", "grpo"}


def test_dependencies_are_exactly_the_imported_packages_with_lower_bounds() -> None:
    known = packages_distributions()
    imported = {distribution(known[name][0] if name in known else name) for name in imported_packages()}
    declared = {distribution(requirement) for requirement in PROJECT["dependencies"]}
    extras = {name: {*map(distribution, lines)} for name, lines in PROJECT["optional-dependencies"].items()}
    assert all(name in extras[extra] for name, extra in OPTIONAL.items())
    assert imported - PINNED_BY_ANOTHER - OPTIONAL.keys() == declared
    assert [line for line in PROJECT["dependencies"] if not re.fullmatch(r"[\w-]+>=[\d.]+", line)] == []
    assert [name for name, packages in extras.items() if "torch" in packages] == ["test"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling (of the test extra) builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_the_wheel_contains_one_folder_with_the_program_and_its_data(installed: Path) -> None:
    def files(root: Path) -> set[str]:
        paths = (path for folder in ("app", "settings") for path in (root / folder).rglob("*") if path.is_file())
        return {str(path.relative_to(root)) for path in paths if path.suffix != ".pyc"}

    metadata = f"{PROJECT['name'].replace('-', '_')}-{PROJECT['version']}.dist-info"
    assert {path.name for path in installed.iterdir()} == {"grpo", metadata}
    program = installed / "grpo"
    assert {path.name for path in program.iterdir()} == {"__init__.py", "cli.py", "app", "settings"}
    assert (program / "__init__.py").read_bytes() == (REPOSITORY / "grpo.py").read_bytes()
    assert files(program) == files(REPOSITORY) >= {"app/py.typed", "settings/presets/quickstart.yaml"}


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs a script where the user has modules `app` and `settings` on PYTHONPATH, and returns its output."""
    (tmp_path / "app.py").write_text("REWARD = 2.0")
    (tmp_path / "settings.py").write_text("FACTOR = 3.0")
    (tmp_path / "bin").mkdir()

    def run(script: str, *arguments: str) -> str:
        # The script is in another folder, like a console script.
        (tmp_path / "bin" / "script").write_text(script)
        result = subprocess.run(
            [sys.executable, tmp_path / "bin" / "script", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(installed)))},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def test_the_program_runs_next_to_modules_with_the_same_names(run: Callable[..., str]) -> None:
    module, function = PROJECT["scripts"]["grpo"].split(":")
    program = f"import sys\nfrom {module} import {function}\nsys.exit({function}())"
    assert run(program, "--version") == f"grpo {PROJECT['version']}\n"
    printed = run(program, "train", "--config", "quickstart", "--print-config")
    assert "group_size" in printed and "presets/quickstart.yaml" in printed
    facts = run(
        "import grpo; grpo.add_program_to_path()\n"
        "from app.records.versions import code_digest, minimum_versions\n"
        "print(code_digest(), minimum_versions()['jax'], minimum_versions('qlora')['qwix'])"
    )
    assert facts.split() == [code_digest(), minimum_versions()["jax"], minimum_versions("qlora")["qwix"]]


API_SCRIPT = """
import sys
path = list(sys.path)
import grpo
ids = {"prompt_token_ids": [1], "completion_token_ids": [2], "behavior_logprobs": [-0.5], "policy_version": 0}
place = {"uid": "q/s0", "group_id": 0, "sample_index": 0, "finish_reason": "stop"}
sample = {**place, **ids, "prompt": "?", "completion": "six"}
rewards = ["rewards.py:score", {"name": "module", "function": "rewards:score"}]
scored = grpo.score([sample], role="reward", rewards=rewards)
assert sys.path == path
print(scored.records[0]["reward"], sys.modules["app"].__file__)
"""


def test_python_api_and_rewards_can_import_user_modules_named_like_our_packages(run, installed, tmp_path):
    (tmp_path / "rewards.py").write_text(
        "import app, settings\ndef score(completion): return app.REWARD * settings.FACTOR"
    )
    reward, file = run(API_SCRIPT).split()
    assert (float(reward), Path(file)) == (12.0, installed / "grpo" / "app" / "__init__.py")
    message = run(
        "import app, settings, grpo\n"
        "try:\n    grpo.evaluate()\n"
        "except ImportError as error:\n    print(error)\n"
        "print(app.REWARD, settings.FACTOR)"
    )
    assert all(f"{name} from {tmp_path / name}.py" in message for name in ("app", "settings"))
    assert message.endswith("2.0 3.0\n")


def test_an_environment_can_import_user_modules_named_like_our_packages(
    run: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "game.py").write_text(
        "import app, sys\nfrom grpo import StepResult\nimport settings\n"
        "class Game:\n    def reset(self): return None\n    def step(self, text, calls):\n"
        "        assert not {'jax', 'numpy'} & set(sys.modules)\n"
        "        return StepResult('on', reward=app.REWARD * settings.FACTOR)"
    )
    reward = run(
        "import grpo; grpo.add_program_to_path()\n"
        "from app.environments.episode_pool import EpisodePool, EpisodeStart\n"
        "from settings.schema.reward import EnvironmentSettings, PluginSettings\n"
        "pool = EpisodePool(EnvironmentSettings(source='game.py:Game'), PluginSettings())\n"
        "pool.load()\n"
        "pool.step('a', EpisodeStart(0, {}), None, 'go', [], is_last=True)\n"
        "print(pool.take(60)[0])\n"
        "pool.close()"
    )
    assert "reward=6.0" in reward
