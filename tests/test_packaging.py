"""Tests that `pip install .` and `pip install -e .` install everything that the program needs, and nothing else."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from app.records.versions import code_digest, minimum_versions

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED_BY_ANOTHER = {"pydantic-core", "jaxlib"}
"""Packages of which pydantic and jax require exactly one version."""

OPTIONAL = {"math-verify": "math", "qwix": "qlora", "ray": "ray", "tensorboardx": "tensorboard"}
"""Packages of extras, which the program imports only if they are installed."""


def distribution(requirement: str) -> str:
    """Returns `ml-dtypes` for `ml_dtypes[extra]>=0.6; marker`."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def program_files() -> list[Path]:
    paths = (path for package in ("app", "settings") for path in REPOSITORY.glob(f"{package}/**/*.py"))
    return [REPOSITORY / "grpo.py", REPOSITORY / "cli.py", *paths]


def imported_packages() -> set[str]:
    """Returns every foreign top-level package that the program imports anywhere."""
    names = set()
    for path in program_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").split(".")[0])
    return names - set(sys.stdlib_module_names) - {"app", "settings", "cli", "grpo"}


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling (of the test extra) builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_dependencies_are_what_the_program_imports() -> None:
    known = packages_distributions()
    imported = {distribution(known[name][0] if name in known else name) for name in imported_packages()}
    declared = {distribution(requirement) for requirement in PROJECT["dependencies"]}
    extras = PROJECT["optional-dependencies"]
    assert all(name in map(distribution, extras[extra]) for name, extra in OPTIONAL.items())
    assert imported - PINNED_BY_ANOTHER - OPTIONAL.keys() == declared


def test_every_dependency_has_a_lower_bound() -> None:
    assert [line for line in PROJECT["dependencies"] if not re.fullmatch(r"[\w-]+>=[\d.]+", line)] == []


def test_torch_is_installed_for_tests_only() -> None:
    extras = PROJECT["optional-dependencies"]
    with_torch = [name for name, lines in extras.items() if "torch" in map(distribution, lines)]
    assert with_torch == ["test"]
    assert "torch" not in map(distribution, PROJECT["dependencies"])


def test_the_wheel_is_one_folder_with_the_program_and_its_data(unpacked_wheel: Path) -> None:
    def files(root: Path) -> set[str]:
        paths = (path for folder in ("app", "settings") for path in (root / folder).rglob("*") if path.is_file())
        return {str(path.relative_to(root)) for path in paths if path.suffix != ".pyc"}

    metadata = f"{PROJECT['name'].replace('-', '_')}-{PROJECT['version']}.dist-info"
    assert {path.name for path in unpacked_wheel.iterdir()} == {"grpo", metadata}
    program = unpacked_wheel / "grpo"
    assert {path.name for path in program.iterdir()} == {"__init__.py", "cli.py", "app", "settings"}
    assert (program / "__init__.py").read_bytes() == (REPOSITORY / "grpo.py").read_bytes()
    packed = files(program)
    assert packed == files(REPOSITORY)
    assert {"app/py.typed", "settings/py.typed", "settings/presets/quickstart.yaml"} <= packed


@dataclass(frozen=True)
class UserFolder:
    """A working directory on PYTHONPATH with an `app.py` and a `settings.py` of the user."""

    path: Path
    installed: Path
    """The folder in which Python finds `grpo`."""

    def run(self, script: str, *arguments: str) -> str:
        """Runs a script in another folder, like a console script, and returns its output."""
        (self.path / "bin").mkdir(exist_ok=True)
        (self.path / "bin" / "script").write_text(script)
        result = subprocess.run(
            [sys.executable, self.path / "bin" / "script", *arguments],
            cwd=self.path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join((str(self.path), str(self.installed)))},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def run_program(self, *arguments: str) -> str:
        module, function = PROJECT["scripts"]["grpo"].split(":")
        return self.run(f"import sys\nfrom {module} import {function}\nsys.exit({function}())", *arguments)


@pytest.fixture
def user_folder(unpacked_wheel: Path, tmp_path: Path) -> UserFolder:
    (tmp_path / "app.py").write_text("REWARD = 2.0")
    (tmp_path / "settings.py").write_text("FACTOR = 3.0")
    return UserFolder(tmp_path, unpacked_wheel)


def test_modules_of_the_user_do_not_replace_those_of_the_program(user_folder: UserFolder) -> None:
    version = user_folder.run_program("--version")
    assert version == f"grpo {PROJECT['version']}\n"
    printed = user_folder.run_program("train", "--config", "quickstart", "--print-config")
    assert "group_size" in printed and "presets/quickstart.yaml" in printed
    facts = user_folder.run(
        "import grpo; grpo.add_program_to_path()\n"
        "from app.records.versions import code_digest, minimum_versions\n"
        "print(code_digest(), minimum_versions()['jax'], minimum_versions('qlora')['qwix'])"
    )
    assert facts.split() == [code_digest(), minimum_versions()["jax"], minimum_versions("qlora")["qwix"]]


@pytest.mark.parametrize("name", ["rewards.py:score", "rewards:score", "math_verify"])
def test_a_reward_function_finds_the_modules_of_the_user(user_folder: UserFolder, name: str) -> None:
    if name == "math_verify":
        pytest.importorskip("math_verify", reason="math-verify is not installed: pip install -e '.[math]'")
    (user_folder.path / "rewards.py").write_text(
        "import app, settings\ndef score(completion): return app.REWARD * settings.FACTOR"
    )
    reward = user_folder.run(
        "import sys; import grpo; grpo.add_program_to_path()\n"
        "import numpy as np\n"
        "from app.records.sample import Prompt, Sample\n"
        "from app.reward.plugin import StepInfo\n"
        "from app.reward.plugin_signature import DataColumns\n"
        "from app.reward.reward_functions import RewardFunctions\n"
        "from settings.schema.reward import PluginSettings\n"
        "from settings.schema.reward import RewardSettings\n"
        "prompt = Prompt(uid='q', token_ids=np.zeros(1, np.int32), source='?', answer='6')\n"
        "sample = Sample(prompt, 0, 0, np.zeros(1, np.int32), '6', np.zeros(1, np.float32), 'stop', 0)\n"
        "settings = RewardSettings.model_validate({'functions': sys.argv[1:]})\n"
        "columns = DataColumns.from_rows([prompt], source='q.jsonl')\n"
        "with RewardFunctions(settings, PluginSettings(workers=1), columns) as functions:\n"
        "    print(functions.compute_rewards([sample], StepInfo(step=1, num_steps=1)).samples[0].reward)",
        name,
    )
    assert float(reward) == (1.0 if name == "math_verify" else 6.0)


def test_an_environment_finds_the_modules_of_the_user_and_the_interface(user_folder: UserFolder) -> None:
    (user_folder.path / "game.py").write_text(
        "import app, sys\nfrom grpo import StepResult\nimport settings\n"
        "class Game:\n    def reset(self): return None\n    def step(self, text, calls):\n"
        "        assert not {'jax', 'numpy'} & set(sys.modules)\n"
        "        return StepResult('on', reward=app.REWARD * settings.FACTOR)"
    )
    reward = user_folder.run(
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


API_SCRIPT = """
import sys
path = list(sys.path)
import grpo
ids = {"prompt_token_ids": [1], "completion_token_ids": [2], "behavior_logprobs": [-0.5], "policy_version": 0}
place = {"uid": "q/s0", "group_id": 0, "sample_index": 0, "finish_reason": "stop"}
sample = {**place, **ids, "prompt": "?", "completion": "six"}
scored = grpo.score([sample], role="reward", rewards=[lambda completion: len(completion)])
assert sys.path == path
print(scored.records[0]["reward"], sys.modules["app"].__file__)
"""


def test_the_python_api_works_where_the_user_has_modules_of_these_names(user_folder: UserFolder) -> None:
    reward, file = user_folder.run(API_SCRIPT).split()
    assert (float(reward), Path(file)) == (3.0, user_folder.installed / "grpo" / "app" / "__init__.py")


def test_the_python_api_names_the_users_modules_that_are_in_its_way(user_folder: UserFolder) -> None:
    message = user_folder.run(
        "import app, settings, grpo\n"
        "try:\n    grpo.evaluate()\n"
        "except ImportError as error:\n    print(error)\n"
        "print(app.REWARD, settings.FACTOR)"
    )
    for name in ("app", "settings"):
        assert f"{name} from {user_folder.path / name}.py" in message
    assert message.endswith("2.0 3.0\n")
