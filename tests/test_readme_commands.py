"""Tests of the documented commands, in the form in which they are printed.

Every line of a ```bash block counts. A script must exist and parse. A `grpo` command, also one that a script launches
elsewhere (after `--`), runs with `--print-config`, which resolves its settings and stops. It runs with `--help` if the
command takes no settings or is `--compare`, and unchanged with `--help` or `--version`. The resolved settings must also
pass the checks of the command. A slow test runs the commands of the README in order, in a fresh clone.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_group
from typer.testing import CliRunner

import cli
from settings import load
from settings.checks.commands import (
    check_for_dry_run,
    check_for_evaluation,
    check_for_inspect_mesh,
    check_for_mesh,
    check_for_rollout,
    check_for_score,
    check_for_train,
)

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    path for pattern in ("README.md", "CONTRIBUTING.md", "sops/**/*.md") for path in sorted(REPOSITORY.glob(pattern))
]
WITHOUT_SETTINGS = {"report", "settings", "presets"}
CHECKS = {
    "train": check_for_train,
    "evaluate": check_for_evaluation,
    "rollout": check_for_rollout,
    "score": check_for_score,
    "gae": check_for_mesh,
    "inspect-mesh": check_for_inspect_mesh,
    "export": check_for_mesh,
    "doctor": check_for_mesh,
}
OTHERWISE = {"dry_run": check_for_dry_run, "plan": check_for_mesh}
"""Options with which a command runs other checks."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
SHELL_OPERATOR = re.compile(r"\d?[<>|&;]")


def bash_commands(markdown: str) -> Iterator[str]:
    """Returns each command of each ```bash block, with continued lines joined and comments removed."""
    for block in re.findall(r"^```bash\n(.*?)^```", markdown, flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if shlex.split(line, comments=True):
                yield line.strip()


def words_and_environment(command: str) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments up to the first pipe, redirection or `&&`, and the assignments before them."""
    words = shlex.split(command, comments=True)
    words = list(itertools.takewhile(lambda word: not SHELL_OPERATOR.match(word), words))
    environment = {}
    while words and ASSIGNMENT.match(words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    return words, environment


def check_settings(words: list[str], environment: dict[str, str]) -> None:
    """Raises InputError if the command would stop at the checks of its settings."""
    _, subcommand, *arguments = words
    options = get_group(cli.app).commands[subcommand].make_context(subcommand, arguments).params
    check = next((check for option, check in OTHERWISE.items() if options.get(option)), CHECKS[subcommand])
    check(load(options["config"], options["overrides"] or [], environment))


COMMANDS = [
    pytest.param(command, id=f"{path.name}: {command}")
    for path in DOCUMENTS
    for command in dict.fromkeys(bash_commands(path.read_text(encoding="utf-8")))
]
EXAMPLES = [pytest.param(example, id=f"--help: {example}") for example in cli.COMMANDS.values()]


@pytest.mark.parametrize("command", COMMANDS + EXAMPLES)
def test_command_works_as_written(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, environment = words_and_environment(command)
    for word in words:
        if re.fullmatch(r"(\./)?(scripts/[\w/-]+\.sh|\.ci/run)", word):
            subprocess.run(["bash", "-n", REPOSITORY / word], check=True)
    if words[:1] == ["bash"] and "--" in words:
        words = words[words.index("--") + 1 :]
    if words[0].split("/")[-1] != "grpo":
        return
    monkeypatch.chdir(REPOSITORY)
    if not {"--help", "--version", "--print-config"} & set(words):
        takes_none = words[1] in WITHOUT_SETTINGS or "--compare" in words
        if not takes_none:
            check_settings(words, environment)
        words.append("--help" if takes_none else "--print-config")
    answer = CliRunner().invoke(cli.app, words[1:], prog_name="grpo", env=environment)
    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout


SKIPPED = {
    "bash scripts/test.sh": "it runs this test",
    "pip install -e '.[tpu]'": "it downloads packages",
    "bash scripts/fetch_smollm2.sh": "it downloads a model",
    "grpo train --config smollm2_": "it needs that model",
    "grpo doctor --config smollm2_": "it needs that model",
    "grpo train --config gsm8k_qwen2_5_0_5b_gpu": "it needs a GPU and downloads a model",
}
"""Maps the beginning of commands of the README that a test cannot run to the reason."""
SHORTENED = ("bash scripts/quickstart.sh", "grpo train --config dapo", "grpo train --set model.lora")
"""Beginnings of commands that run one step here; the main run, of `grpo train`, keeps its length."""


def as_script(commands: list[str]) -> str:
    """Returns a shell script that announces and runs the commands as they are written."""
    lines = ["set -euo pipefail"]
    for command in commands:
        lines.append(f"echo README at $SECONDS s: {shlex.quote(command)}")
        if reasons := [reason for start, reason in SKIPPED.items() if command.startswith(start)]:
            lines.append(f"echo Not run here: {shlex.quote(reasons[0])}")
        else:
            steps = "export GRPO__RUN__STEPS=1" if command.startswith(SHORTENED) else "unset GRPO__RUN__STEPS"
            lines += [steps, command]
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_readme_run_in_order_in_a_fresh_clone(tmp_path: Path) -> None:
    """Runs them in one shell. The environment of the clone takes all packages but this one from the environment of the
    tests, so that pip finds them without network."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this is no git repository to clone")
    clone = tmp_path / "grpo"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True)
    venv.create(clone / ".venv", with_pip=True, symlinks=True)
    (clone / ".venv" / "made-by-grpo").touch()
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(clone / ".venv")}))
    (purelib / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    commands = [*bash_commands((clone / "README.md").read_text(encoding="utf-8"))]
    for skipped in SKIPPED:
        assert any(command.startswith(skipped) for command in commands), f"README no longer shows {skipped}"
    environment = os.environ | {
        "PYTHON": sys.executable,
        "GRPO_VENV": "",
        "PYTHONPATH": "",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        # As users have it, but the commands share what they compile.
        "XLA_FLAGS": "",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
    }
    answer = subprocess.run(
        ["bash", "-c", as_script(commands)], cwd=clone, env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, f"{answer.stdout[-2000:]}\n{answer.stderr[-4000:]}"
    assert answer.stdout.count("README at ") == len(commands)
    runs = {re.sub(r"-\d{8}-\d{6}$", "-<time>", path.name) for path in (clone / "runs").iterdir()}
    assert runs == {"quickstart-<time>", "quickstart-seed0", "quickstart_ppo-seed0", "mixed", "lora"}
    lines = [*map(json.loads, (clone / "runs/quickstart-seed0/metrics.jsonl").read_text().splitlines())]
    assert max(line["step"] for line in lines) == 100
    before, *_, after = (line for line in lines if "eval/accuracy" in line)
    assert before["eval/accuracy"] <= 0.4 and after["eval/accuracy"] >= 0.9 and after["eval/format_rate"] >= 0.99
    for file in ("runs/quickstart-seed0/report.html", "before_after.png", "quickstart-model/model.safetensors"):
        assert (clone / file).stat().st_size > 1000, file


def test_the_stages_of_the_readme_chain_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the commands of "One stage at a time" in the order of the README."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## One stage at a time") : readme.index("## Commands")]
    chain = [words_and_environment(command)[0] for command in bash_commands(section)]
    assert [words[1] for words in chain] == ["rollout", "score", "score", "gae", "train"]
    monkeypatch.chdir(tmp_path)
    for words in chain:
        answer = CliRunner().invoke(cli.app, words[1:], prog_name="grpo")
        assert answer.exit_code == 0, answer.stderr
        assert answer.stdout
    assert len((tmp_path / "advantages.jsonl").read_text().splitlines()) == 8
