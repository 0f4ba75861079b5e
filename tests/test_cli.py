"""The command line: output, exit codes, and no import of JAX before it is needed."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import cli
from app.commands.command_support import handle_errors
from settings import InputError, load
from settings.loading.config_file import preset_names
from settings.loading.fields import FIELDS
from tests.program import here

REPOSITORY = Path(__file__).resolve().parent.parent
CANARY = "CANARY-0123456789abcdef"
HINT = " (--debug shows the traceback)"
WITH_SETTINGS = ("train", "evaluate", "rollout", "score", "gae", "inspect-mesh", "export", "doctor")
COMMANDS = (*WITH_SETTINGS, "report", "settings", "presets")


def grpo(
    *arguments: str, cwd: Path = REPOSITORY, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


WITHOUT_JAX = [("--version",), ("--help",), *((command, "--help") for command in COMMANDS)]
WITHOUT_JAX += [(command, "--print-config") for command in WITH_SETTINGS]
WITHOUT_JAX += [("settings",), ("settings", "rollout"), ("presets",), ("presets", "dapo")]


def test_help_version_and_print_config_do_not_import_jax() -> None:
    # One process for all: an import by any of them would remain in sys.modules.
    program = (
        "import sys, cli\n"
        f"for arguments in {WITHOUT_JAX!r}:\n"
        "    sys.argv = ['grpo', *arguments]\n"
        "    try: cli.main()\n"
        "    except SystemExit as end: assert not end.code, arguments\n"
        "print({'jax', 'flax', 'numpy', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stderr == "set()\n"
    assert answer.stdout.count("Usage: grpo") == 1 + len(COMMANDS)
    assert answer.stdout.count("\nmodel:\n") == len(WITH_SETTINGS) + 1


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--print-config")], ids=" ".join)
def test_a_command_without_jax_answers_at_once(arguments: tuple[str, ...]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = grpo(*arguments)
    assert answer.returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor seconds, which do not depend on what else runs; less than a second of time on a quiet machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    if arguments == ("--help",):
        assert all(command in answer.stdout for command in COMMANDS)


def help_of(*command: str, **environ: str) -> str:
    answer = CliRunner().invoke(cli.app, [*command, "--help"], prog_name="grpo", env=environ)
    assert answer.exit_code == 0
    return answer.stdout


def test_help_lists_each_command_with_a_whole_sentence() -> None:
    _, _, commands = help_of().partition("Commands:\n")
    rows = dict(line.split(maxsplit=1) for line in commands.split("\n\n")[0].splitlines())
    assert set(rows) == set(COMMANDS)
    assert [text for text in rows.values() if not text.endswith(".") or text.endswith("..")] == []


@pytest.mark.parametrize("command", [(), *((command,) for command in COMMANDS)], ids=" ".join)
def test_help_fits_80_columns_in_plain_text_with_an_example(command: tuple[str, ...]) -> None:
    text = help_of(*command, COLUMNS="80")
    assert text == help_of(*command, COLUMNS="80", FORCE_COLOR="1") == help_of(*command, COLUMNS="80", NO_COLOR="1")
    assert text.isascii() and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[-1].startswith(" ".join(["  Example: grpo", *command]))


def test_the_program_alone_prints_its_help() -> None:
    assert grpo().stdout + grpo().stderr == help_of()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("grpo pres", ["presets"]),
        ("grpo train --config quick", ["quickstart", "quickstart_ppo", "quickstart_tools"]),
        ("grpo train --set rollout.gr", ["rollout.group_size="]),
        ("grpo train --config a --config b --num_generations 8 --set rollout.gr", ["rollout.group_size="]),
    ],
)
def test_the_shell_completes_commands_options_presets_and_settings(words: str, expected: list[str]) -> None:
    position = str(len(words.split()) - 1)
    answer = grpo(environ={"_GRPO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": position})
    assert (answer.returncode, answer.stdout.split()) == (0, expected)


@pytest.mark.parametrize(
    ("name", "fields", "note"),
    [
        ("rollout.group_size", ["rollout.group_size"], ""),
        ("use_dynamic_bsz", ["score.dynamic", "algorithm.dynamic_microbatch"], ""),
        ("num_generations", ["rollout.group_size"], "note: TRL's num_generations is rollout.group_size here\n"),
        ("groop_size", ["rollout.group_size"], "note: did you mean rollout.group_size?\n"),
    ],
)
def test_settings_finds_names_beginnings_endings_and_other_programs_names(
    name: str, fields: list[str], note: str
) -> None:
    answer = here("settings", name, "--json")
    assert (list(json.loads(answer.stdout)), answer.stderr) == (fields, note)


def test_settings_lists_every_setting_with_type_default_and_meaning() -> None:
    assert list(json.loads(here("settings", "--json").stdout)) == list(FIELDS)
    assert re.findall(r"^(\S+): .+  \[default: .+\]\n    \S", here("settings").stdout, flags=re.MULTILINE) == [*FIELDS]
    assert here("settings", "rollout.group_size").stdout == (
        "rollout.group_size: integer ≥ 1 and ≤ 65536  [default: 8]\n    Samples per prompt.\n"
    )
    assert json.loads(here("settings", "reward.functions", "--json").stdout)["reward.functions"]["default"] == [
        {"name": "arithmetic", "weight": 1.0}
    ]
    sections = [field for field in FIELDS if field.startswith("score.")]
    assert list(json.loads(here("settings", "score.", "--json").stdout)) == sections


def test_presets_lists_each_with_one_sentence_and_prints_one() -> None:
    rows = dict(line.split(maxsplit=1) for line in here("presets").stdout.splitlines())
    assert list(rows) == preset_names()
    assert [text for text in rows.values() if not text.endswith(".")] == []
    file = REPOSITORY / "settings" / "presets" / "dapo.yaml"
    assert here("presets", "dapo").stdout == file.read_text(encoding="utf-8")


def test_print_config_shows_all_layers_and_announces_the_environment(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("batch_size: 4\n")
    answer = grpo(
        *("train", "--config", "c.yaml", "--set", "run.seed=3", "--set", "num_pre_q=6", "--print-config"),
        cwd=tmp_path,
        environ={"NUM_PRE_Q": "5"},
    )
    assert answer.returncode == 0
    for line in (
        "  name: c-seed3  # derived",
        "  seed: 3  # set",
        "  dir: runs  # default",
        "  prompts_per_step: 4  # yaml:c.yaml:1",
        "  group_size: 5  # env:NUM_PRE_Q",
    ):
        assert line in answer.stdout.splitlines()
    assert answer.stderr == (
        "note: environment variable NUM_PRE_Q sets rollout.group_size to 5, instead of 6 from --set\n"
    )


def test_the_flags_of_gae_override_their_settings() -> None:
    flags = ("--gamma", "0.9", "--lam", "1", "--chunk-size", "32")
    environ = {"GRPO__ALGORITHM__GAMMA": "0.5", "GRPO__ALGORITHM__LAM": "0.5"}
    answer = grpo("gae", *flags, "--set", "algorithm.gamma=0.1", "--print-config", environ=environ)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    for line in (
        "  gamma: 0.9  # --gamma",
        "  lam: 1.0  # --lam",
        "  gae_chunk_size: 32  # --chunk-size",
    ):
        assert line in answer.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--config", "missing.yaml"), "error: config file not found: /"),
        (("train", "--set", "run.stepz=3"), "did you mean run.steps?"),
        (("evaluate", "--checkpoint", "."), "--checkpoint: no settings.yaml of a run was found in /"),
        (("gae", "--bench", "--backend", "numpy"), "--backend cannot be combined with --bench"),
        (("presets", "quickstar"), "unknown preset quickstar; did you mean quickstart?"),
    ],
)
def test_bad_input_is_one_message_on_stderr_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = here(*arguments)
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("error: ")
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr
    assert len(answer.stderr.splitlines()) <= 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "is_in_run"),
    [
        *((place, True) for place in (".", "checkpoints/2", "rollouts/step_000001.jsonl")),
        *((place, False) for place in ("mine/advantages.jsonl", "checkpoints/2/progress")),
    ],
)
def test_a_path_in_the_folders_of_a_run_uses_its_settings(
    tmp_path: Path, place: str, is_in_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from app.commands.command_support import find_run_settings

    file = tmp_path.resolve() / "run" / "settings.yaml"
    file.parent.mkdir()
    file.write_text("run:\n  name: mine\n")
    found = find_run_settings({"--from-rollouts": file.parent / place})
    assert (found and found.name) == (str(file) if is_in_run else None)
    note = f"note: --from-rollouts: using the settings in {file}\n" if is_in_run else ""
    assert capsys.readouterr() == ("", note)


@pytest.mark.parametrize(("command", "option"), [("train", "--from-rollouts"), ("evaluate", "--checkpoint")])
def test_a_note_names_the_run_whose_settings_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.yaml").write_text(load(None, ["run.steps=3"], {}).to_yaml())
    answer = here(command, option, ".", "--print-config")
    assert answer.exit_code == 0, answer.stderr
    assert answer.stderr == f"note: {option}: using the settings in {tmp_path.resolve() / 'settings.yaml'}\n"
    assert "\n  steps: 3  # yaml:" in answer.stdout
    assert here(command, option, ".", "--config", "settings.yaml", "--print-config").stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("train", "--sett", "a=b"),
        ("train", "--json"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = here(*arguments)
    assert answer.exit_code == 2
    assert "Traceback" not in answer.stderr


def test_debug_shows_the_traceback_of_an_input_error() -> None:
    answer = grpo("train", "--debug", "--set", "run.steps=abc")
    assert answer.returncode == 2
    assert "Traceback" in answer.stderr
    assert answer.stderr.splitlines()[-1].startswith("error: run.steps")


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (OSError(f"401 for {CANARY}"), 1, f"error: OSError: 401 for <HF_TOKEN>{HINT}\n"),
        (InputError("line 3: no answer"), 2, "error: line 3: no answer\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Exit(75), 75, ""),
    ],
)
def test_each_exception_has_its_message_and_exit_code(
    error: BaseException, code: int, stderr: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    with pytest.raises(typer.Exit) as ended, handle_errors(debug=False):
        raise error
    assert (ended.value.exit_code, capsys.readouterr().err) == (code, stderr)


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed, open(tmp_path / "stderr", "w+") as stderr:
        answer = subprocess.run(
            [sys.executable, "-m", "cli", "train", "--print-config"],
            cwd=REPOSITORY,
            stdout=closed,
            stderr=stderr,
            check=False,
            timeout=60,
        )
        stderr.seek(0)
        assert (answer.returncode, stderr.read()) == (0, "")


def test_secrets_are_never_printed(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"WANDB_API_KEY={CANARY}\nGRPO__RUN__STEPS=7\n")
    (tmp_path / ".env").chmod(0o600)
    for arguments in (("train", "--print-config"), ("train", "--debug", "--set", "run.steps=abc")):
        answer = grpo(*arguments, cwd=tmp_path, environ={"HF_TOKEN": CANARY})
        assert CANARY not in answer.stdout + answer.stderr
    assert "env:GRPO__RUN__STEPS" not in grpo("train", "--print-config", cwd=tmp_path).stdout


def test_a_summary_is_json_or_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    from app.commands.command_support import print_result

    print_result({"naïve": 1.5}, as_json=True)
    assert capsys.readouterr().out == '{\n  "naïve": 1.5\n}\n'
    print_result({"samples": 8, "out": "é"}, as_json=False)
    print_result(None, as_json=False)
    assert capsys.readouterr().out == "samples  8\nout      é\n"


@pytest.mark.parametrize(
    ("arguments", "progress"),
    [
        (("gae", "--input", "missing.npz", "--out", "o.npz"), "grpo gae: missing.npz; loading JAX"),
    ],
)
def test_the_first_line_appears_before_jax_is_loaded(arguments: tuple[str, ...], progress: str, tmp_path: Path) -> None:
    answer = grpo(*arguments, *("--set", f"run.dir={tmp_path}", "--set", "model.path=nowhere/model"), cwd=tmp_path)
    assert answer.returncode == 2
    first, *_ = answer.stderr.splitlines()
    assert re.fullmatch(rf"\[ +0\.\d s\] {re.escape(progress)}", first)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--max_steps", "Settings are given as --set NAME=VALUE; TRL's max_steps is run.steps here"),
        ("--learning-rate=1", "Settings are given as --set NAME=VALUE; did you mean optimizer.learning_rate?"),
        ("--confg", "Possible options: --config"),
    ],
)
def test_a_setting_given_as_an_option_is_shown_as_one(option: str, message: str) -> None:
    result = here("train", option)
    assert result.exit_code == 2
    assert f"No such option: {option.partition('=')[0]}" in result.stderr and message in result.stderr


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("data.train_files=x", "; verl's data.train_files is data.source here"),
        ("+learning_rate=1", "; did you mean optimizer.learning_rate?"),
        ("run.steps=3", ""),
    ],
)
def test_a_setting_given_as_in_hydra_is_shown_as_an_option(argument: str, hint: str) -> None:
    result = here("train", argument, "--print-config")
    assert (result.exit_code, result.stdout) == (2, "")
    expected = f"Error: Unexpected arguments: {argument}. Settings are given as --set NAME=VALUE{hint}"
    assert result.stderr.splitlines()[-1] == expected
    result = here("report", "a", argument)
    assert result.exit_code == 2 and "--set" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "values"),
    [(("train", "--resume"), "<auto|never|must>"), (("evaluate", "--compare"), "BEFORE.jsonl AFTER.jsonl")],
)
def test_an_option_without_its_value_is_shown_with_one(arguments: Sequence[str], values: str) -> None:
    result = here(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == f"Error: {arguments[-1]} needs a value: {arguments[-1]} {values}"


def test_an_option_with_one_value_is_given_once() -> None:
    result = here("train", "--config", "dapo", "--set", "run.steps=3", "--config=quickstart", "--print-config")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--config is given 2 times, but takes one value" in result.stderr
    repeatable = ("--set", "run.steps=3", "--set", "run.seed=1", "--debug", "--debug", "--print-config")
    result = here("train", *repeatable)
    assert result.exit_code == 0, result.stderr
    assert "steps: 3  # set" in result.stdout and "seed: 1  # set" in result.stdout


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (("rollout", "--out", "new.jsonl", "--timeline", "old"), "--timeline: "),
        (("score", "--input", "in.jsonl", "--out", "old"), "--out: "),
        (("gae", "--bench", "--out", "."), "--out: "),
        (("evaluate", "--compare", "a.jsonl", "b.jsonl", "--picture", "old"), "--picture: "),
    ],
    ids=str,
)
def test_an_output_that_exists_is_only_replaced_if_it_is_asked_for(
    options: Sequence[str], output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("old", "bench.json"):
        (tmp_path / name).write_text("precious")
    result = here(*options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {output}" in result.stderr
    assert "exists already; delete it or give another name, or add --overwrite" in result.stderr
    # The next problem, which differs by command, comes only if it may be replaced.
    if "--bench" not in options:
        wrong = () if "--compare" in options else ("--set", "mesh.cpu_devices=65")
        result = here(*options, "--overwrite", *wrong)
        assert result.exit_code == 2 and "exists already" not in result.stderr
    assert (tmp_path / "old").read_text() == (tmp_path / "bench.json").read_text() == "precious"
