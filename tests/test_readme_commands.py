"""Tests of the documented commands, in the form in which they are printed.

Every line of a ```bash block counts. A script must exist and parse. A `grpo` command, also one that a script launches
elsewhere (after `--`), runs with `--print-config`, which resolves its settings and stops. It runs with `--help` if the
command takes no settings or is `--compare`, and unchanged with `--help` or `--version`. The resolved settings must also
pass the checks of the command.
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_group
from typer.testing import CliRunner

import cli
from settings import InputError, load
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
WITHOUT_SETTINGS = {"report"}
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


def test_readme_and_contributing_show_commands() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        assert list(bash_commands((REPOSITORY / name).read_text(encoding="utf-8"))), f"{name} shows no command"


@pytest.mark.parametrize("command", COMMANDS)
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


def test_settings_that_stop_a_verb_are_found_though_print_config_shows_them() -> None:
    with pytest.raises(InputError, match=r"set eval\.temperature above 0"):
        check_settings(["grpo", "evaluate", "--set", "eval.num_samples=8"], {})


def test_commands_are_found_in_bash_blocks_only() -> None:
    markdown = (
        "```bash\n# a comment\ngrpo train \\\n    --set a.b=1  # why\n\nbash scripts/test.sh\n```\n"
        "```yaml\nrun: {}\n```\n```\ngrpo nothing\n```\n"
    )
    assert [shlex.split(line, comments=True) for line in bash_commands(markdown)] == [
        ["grpo", "train", "--set", "a.b=1"],
        ["bash", "scripts/test.sh"],
    ]


def test_arguments_end_where_the_shell_takes_over() -> None:
    words, environment = words_and_environment("STEPS=3 grpo train --set 'run.name=a b' 2>&1 | tee log.txt")
    assert environment == {"STEPS": "3"}
    assert words == ["grpo", "train", "--set", "run.name=a b"]


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
