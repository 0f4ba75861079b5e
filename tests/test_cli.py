"""Tests the command line: output, exit codes, and that JAX is imported only when needed."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import cli
from app.commands.command_support import handle_errors, print_result, show_progress
from settings import InputError, load
from settings.loading.config_file import preset_names
from settings.loading.fields import FIELDS
from tests.program import CANARY, REPOSITORY, here, run_python, succeeded

WITH_SETTINGS = ("train", "evaluate", "rollout", "score", "gae", "inspect-mesh", "export", "doctor")
COMMANDS = (*WITH_SETTINGS, "report", "settings", "presets")

pytestmark = pytest.mark.usefixtures("in_folder")


def grpo(
    *arguments: str, environ: dict[str, str] | None = None, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environ or {})},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
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
    answer = run_python("-c", program)
    assert answer.stderr == "set()\n"
    assert answer.stdout.count("Usage: grpo") == 1 + len(COMMANDS)
    assert answer.stdout.count("\nmodel:\n") == len(WITH_SETTINGS) + 1


def help_of(*command: str, **environ: str) -> str:
    answer = CliRunner().invoke(cli.app, [*command, "--help"], prog_name="grpo", env=environ)
    assert answer.exit_code == 0
    return answer.stdout


def test_help_lists_each_command_with_a_full_sentence() -> None:
    _, _, commands = help_of().partition("Commands:\n")
    rows = dict(line.split(maxsplit=1) for line in commands.split("\n\n")[0].splitlines())
    assert set(rows) == set(COMMANDS)
    assert [text for text in rows.values() if not text.endswith(".") or text.endswith("..")] == []
    alone = here()
    assert (alone.exit_code, alone.stdout + alone.stderr) == (2, help_of())


@pytest.mark.parametrize("command", [(), *((command,) for command in COMMANDS)], ids=" ".join)
def test_help_fits_80_columns_in_plain_text_with_an_example(command: tuple[str, ...]) -> None:
    text = help_of(*command, COLUMNS="80")
    assert text == help_of(*command, COLUMNS="80", FORCE_COLOR="1") == help_of(*command, COLUMNS="80", NO_COLOR="1")
    assert text.isascii() and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[-1].startswith(" ".join(["  Example: grpo", *command]))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "grpo train --config quick",
            ["quickstart", "quickstart_distill", "quickstart_ppo", "quickstart_sft", "quickstart_tools"],
        ),
        ("grpo train --config a --config b --num_generations 8 --set rollout.gr", ["rollout.group_size="]),
    ],
)
def test_shell_completes_commands_presets_and_settings(words: str, expected: list[str]) -> None:
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
        ("score.", [field for field in FIELDS if field.startswith("score.")], ""),
    ],
)
def test_settings_are_found_by_name_prefix_and_other_programs_names(name: str, fields: list[str], note: str) -> None:
    answer = here("settings", name, "--json")
    assert (list(json.loads(answer.stdout)), answer.stderr) == (fields, note)


def test_settings_command_lists_every_setting_with_type_default_and_meaning() -> None:
    assert list(json.loads(here("settings", "--json").stdout)) == list(FIELDS)
    assert re.findall(r"^(\S+): .+  \[default: .+\]\n    \S", here("settings").stdout, flags=re.MULTILINE) == [*FIELDS]
    assert here("settings", "rollout.group_size").stdout == (
        "rollout.group_size: integer ≥ 1 and ≤ 65536  [default: 8]\n"
        "    Samples per prompt, which group-relative algorithms compare; 8 is usual.\n"
    )
    shown = json.loads(here("settings", "reward.functions", "--json").stdout)["reward.functions"]
    assert shown["default"] == [{"name": "arithmetic", "weight": 1.0}]


def test_presets_command_lists_each_preset_with_a_sentence_and_prints_one() -> None:
    rows = dict(line.split(maxsplit=1) for line in here("presets").stdout.splitlines())
    assert list(rows) == preset_names()
    assert [text for text in rows.values() if not text.endswith(".")] == []
    file = REPOSITORY / "settings" / "presets" / "dapo.yaml"
    assert here("presets", "dapo").stdout == file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("model.path=./gone",), "model.path: './gone' is neither an existing directory or file nor a hub id; "),
        (("reward.functions=[gone.py:f]",), "reward.functions: gone.py:f: no such file: "),
        (("env.tools=[gone.py:f]",), "env.tools: gone.py:f: no such file: "),
        (("data.source=gone.jsonl", "eval.every_steps=0"), "data.source: "),
        (("data.eval_source=gone.jsonl",), "data.eval_source: "),
        (("model.path=gone.gguf",), "model.path: 'gone.gguf' is neither"),
        (("reward.model=./gone",), "reward.model: './gone' is neither"),
        (("run.name=used",), "run.name: runs/used already holds a run; "),
    ],
)
def test_missing_files_and_used_folders_are_found_before_jax_is_loaded(changes: tuple[str, ...], message: str) -> None:
    Path("runs/used").mkdir(parents=True)
    Path("runs/used/settings.yaml").touch()
    answer = here("train", *(word for change in changes for word in ("--set", change)))
    assert answer.exit_code == 2 and answer.stderr.startswith(f"error: {message}"), answer.stderr


def test_missing_inputs_of_commands_are_found_before_jax_is_loaded() -> None:
    Path("runs/one/checkpoints").mkdir(parents=True)
    best = "runs/one/checkpoints/best"
    for command, option, path in (
        ("evaluate", "--checkpoint", best), ("rollout --out new", "--checkpoint", "gone"),
        ("export --out new", "--checkpoint", "gone"), ("score --out new", "--input", "gone.jsonl"),
        ("gae --out new", "--input", "gone.jsonl"), ("train", "--from-rollouts", "gone"),
    ):  # fmt: skip
        answer = here(*command.split(), option, path)
        hint = "; correct the path"
        if path == best:
            why = "nothing was evaluated in that run, or nothing better than its start"
            hint = f"; {why}; give <run>/checkpoints/<step>"
        line = f"error: {option}: {Path(path).absolute()}: no such file or folder{hint}\n"
        assert (answer.exit_code, answer.stderr) == (2, line)


def test_print_config_shows_the_layer_of_each_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_PRE_Q", "5")
    (tmp_path / "c.yaml").write_text("batch_size: 4\n")
    changes = ("--set", "run.seed=3", "--set", "num_pre_q=6", "--debug", "--debug")
    answer = succeeded(here("train", "--config", "c.yaml", *changes, "--print-config"))
    assert {
        "  name: c-seed3  # derived",
        "  seed: 3  # set",
        "  dir: runs  # default",
        "  prompts_per_step: 4  # yaml:c.yaml:1",
        "  group_size: 5  # env:NUM_PRE_Q",
    } <= {*answer.stdout.splitlines()}
    assert answer.stderr == (
        "note: environment variable NUM_PRE_Q sets rollout.group_size to 5, instead of 6 from --set\n"
    )


def test_flags_of_gae_override_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO__ALGORITHM__GAMMA", "0.5")
    monkeypatch.setenv("GRPO__ALGORITHM__LAM", "0.5")
    flags = ("--gamma", "0.9", "--lam", "1", "--chunk-size", "32", "--mask-mode", "through")
    answer = here("gae", *flags, "--set", "algorithm.gamma=0.1", "--print-config")
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert {"  gamma: 0.9  # --gamma", "  lam: 1.0  # --lam", "  gae_chunk_size: 32  # --chunk-size"} <= {
        *answer.stdout.splitlines()
    }


SET = "Settings are given as --set NAME=VALUE"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --config missing.yaml", "error: --config: there is no file /"),
        ("train --set run.stepz=3", "did you mean run.steps?"),
        ("evaluate --checkpoint .", "--checkpoint: no settings.yaml of a run was found in /"),
        ("gae --bench --backend numpy", "--backend cannot be combined with --bench"),
        ("gae --gamma 2 --print-config", "got 2 (from --gamma)"),
        ("gae --gamma [ --print-config", "--gamma:1:2: not valid YAML"),
        ("presets quickstar", "unknown preset quickstar; expected one of "),
        ("train --json", "error: --json needs --dry-run; the metrics of a run are in its metrics.jsonl"),
        ("train --max_steps", f"No such option: --max_steps. {SET}; TRL's max_steps is run.steps here"),
        ("train --learning-rate=1", f"{SET}; did you mean optimizer.learning_rate?"),
        ("train --confg", "--config"),
        ("train data.train_files=x", f"data.train_files=x. {SET}; verl's data.train_files is data.source here"),
        ("train +learning_rate=1 --print-config", f"+learning_rate=1. {SET}; did you mean optimizer.learning_rate?"),
        ("train run.steps=3", f"Error: Unexpected arguments: run.steps=3. {SET}\n"),
        ("train my.yaml", "Error: Unexpected argument: my.yaml. Presets and files of settings are given as --config"),
        ("train --preset dapo", "Error: No such option: --preset. Presets and files of settings are given as --config"),
        ("report a run.steps=3", "unexpected extra argument"),
        ("train --resume", "Error: --resume needs a value: --resume "),
        ("evaluate --compare", "Error: --compare needs a value: --compare BEFORE.jsonl AFTER.jsonl\n"),
        ("train --config dapo --config=quickstart", "--config is given 2 times, but takes one value"),
    ],
)
def test_wrong_usage_and_bad_input_give_one_message_and_exit_code_2(arguments, message, tmp_path):
    answer = here(*arguments.split())
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert message in answer.stderr and "Traceback" not in answer.stderr
    assert answer.stderr.count("rror: ") == 1
    assert len(answer.stderr.splitlines()) <= 3 or answer.stderr.startswith("Usage: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "option", "place", "is_in_run"),
    [
        ("train", "--from-rollouts", ".", True),
        ("evaluate", "--checkpoint", "checkpoints/2", True),
        ("train", "--from-rollouts", "mine/advantages.jsonl", False),
        ("train", "--from-rollouts", "checkpoints/2/progress", False),
    ],
)
def test_a_path_inside_a_run_directory_selects_its_settings(tmp_path, command, option, place, is_in_run):
    file = tmp_path.resolve() / "run" / "settings.yaml"
    file.parent.mkdir()
    file.write_text(load(None, ["run.steps=3"], {}).to_yaml())
    answer = succeeded(here(command, option, file.parent / place, "--print-config"))
    assert answer.stderr == (f"note: {option}: using the settings in {file}\n" if is_in_run else "")
    assert ("\n  steps: 3  # yaml:" in answer.stdout) == is_in_run
    assert here(command, option, file.parent / place, "--config", file, "--print-config").stderr == ""


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (OSError(f"401 for {CANARY}"), 1, "error: OSError: 401 for <HF_TOKEN> (--debug shows the traceback)\n"),
        (InputError("line 3: no answer"), 2, "error: line 3: no answer\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Exit(75), 75, ""),
    ],
)
def test_each_exception_has_its_message_and_exit_code(error, code, stderr, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", CANARY)
    with pytest.raises(typer.Exit) as ended, handle_errors(debug=False):
        raise error
    assert (ended.value.exit_code, capsys.readouterr().err) == (code, stderr)


def test_a_closed_pipe_is_not_an_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    answer = grpo("train", "--print-config", stdout=writing)
    os.close(writing)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_secrets_are_never_printed_and_debug_shows_the_traceback(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"WANDB_API_KEY={CANARY}\nGRPO__RUN__STEPS=7\n")
    (tmp_path / ".env").chmod(0o600)
    shown = grpo("train", "--print-config", environ={"HF_TOKEN": CANARY})
    failed = grpo("train", "--debug", "--set", "run.steps=abc", environ={"HF_TOKEN": CANARY})
    assert CANARY not in shown.stdout + shown.stderr + failed.stdout + failed.stderr
    assert "env:GRPO__RUN__STEPS" not in shown.stdout
    assert failed.returncode == 2 and "Traceback" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("error: run.steps")


def test_a_command_result_is_printed_as_json_or_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_result({"naïve": 1.5}, as_json=True)
    assert capsys.readouterr().out == '{\n  "naïve": 1.5\n}\n'
    print_result({"samples": 8, "out": "é"}, as_json=False)
    print_result(None, as_json=False)
    assert capsys.readouterr().out == "samples  8\nout      é\n"


def test_library_warnings_are_not_printed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    own, library = logging.StreamHandler(), logging.getLogger("a_library")
    with handle_errors(debug=False):
        show_progress("loading")
        library.addHandler(own)
        for name in ("a_library.part", "another"):
            logging.getLogger(name).warning("retrying")
    library.removeHandler(own)
    assert capsys.readouterr().err.count("retrying") == 2


def test_the_first_progress_line_appears_before_jax_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "rows.npz").touch()
    without_jax = "import sys, cli; sys.modules['jax'] = None; cli.main()"
    answer = run_python("-c", without_jax, "gae", "--input", tmp_path / "rows.npz", "--out", tmp_path / "o.npz")
    assert re.match(r"\[ *\d+\.\d s\] grpo gae: .*rows\.npz; loading JAX\n", answer.stderr)
    assert answer.returncode == 1 and "jax" in answer.stderr.splitlines()[-1]


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
def test_existing_output_files_are_only_replaced_on_request(
    options: Sequence[str], output: str, tmp_path: Path
) -> None:
    for name in ("old", "bench.json"):
        (tmp_path / name).write_text("precious")
    result = here(*options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {output}" in result.stderr
    assert "exists already; delete it or give another name, or add --overwrite" in result.stderr
    # The next error, which differs by command, comes only with --overwrite.
    if "--bench" not in options:
        wrong = () if "--compare" in options else ("--set", "mesh.cpu_devices=65")
        result = here(*options, "--overwrite", *wrong)
        assert result.exit_code == 2 and "exists already" not in result.stderr
    assert (tmp_path / "old").read_text() == (tmp_path / "bench.json").read_text() == "precious"
