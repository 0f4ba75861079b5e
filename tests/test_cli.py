"""Tests of the command line: output, exit codes, and no import of JAX before it is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from settings import load
from tests.program import here

REPOSITORY = Path(__file__).resolve().parent.parent
CANARY = "CANARY-0123456789abcdef"
HINT = " (--debug shows the traceback)"
CONFIGURED = ("train", "evaluate", "rollout", "score", "gae", "inspect-mesh", "export", "doctor")
"""Commands that take settings."""
VERBS = (*CONFIGURED, "report")


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


QUICK = [("--version",), ("--help",), *((verb, "--help") for verb in VERBS)]
QUICK += [(verb, "--print-config") for verb in CONFIGURED]


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_questions_are_answered_without_jax(arguments: tuple[str, ...]) -> None:
    program = (
        "import sys, cli\n"
        "try: cli.main()\n"
        "finally: print({'jax', 'flax', 'numpy', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    start = time.perf_counter()
    answer = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert answer.stderr == "set()\n"
    assert answer.stdout
    assert time.perf_counter() - start < 5  # under a second alone; the suite may share its cores


def test_help_names_every_verb() -> None:
    text = grpo("--help").stdout
    assert all(verb in text for verb in VERBS)


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


def test_flags_of_gae_override_the_settings_that_they_name() -> None:
    flags = ("--gamma", "0.9", "--lam", "1", "--chunk-size", "32", "--backend", "serial", "--mask-mode", "zero")
    environ = {"GRPO__ALGORITHM__GAMMA": "0.5", "GRPO__ALGORITHM__LAM": "0.5"}
    answer = grpo("gae", *flags, "--set", "algorithm.gamma=0.1", "--print-config", environ=environ)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    for line in (
        "  gamma: 0.9  # --gamma",
        "  lam: 1.0  # --lam",
        "  gae_chunk_size: 32  # --chunk-size",
        "  gae_backend: serial  # --backend",
        "  mask_mode: zero  # --mask-mode",
    ):
        assert line in answer.stdout.splitlines()


def test_what_print_config_prints_is_a_config(tmp_path: Path) -> None:
    first = grpo("train", "--set", "run.seed=3", "--print-config", cwd=tmp_path)
    (tmp_path / "printed.yaml").write_text(first.stdout)
    second = grpo("train", "--config", "printed.yaml", "--print-config", cwd=tmp_path)

    def values(text: str) -> list[str]:
        return [line.split("  # ")[0] for line in text.splitlines()]

    assert values(second.stdout) == values(first.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--config", "missing.yaml"), "error: config file not found: /"),
        (("train", "--set", "run.stepz=3"), "did you mean run.steps?"),
        (("train", "--set", "num_pre_q=1"), "rollout.group_size = 1 (from --set)"),
        (("train", "--set", "rollout.temperature=0"), "rollout.temperature = 0.0"),
        (("rollout", "--set", "rollout.top_p=2", "--out", "o.jsonl"), "rollout.top_p: expected"),
        (("rollout",), "missing option --out"),
        (("score",), "missing option --input"),
        (("score", "--input", "missing.jsonl", "--out", "o.jsonl"), "missing.jsonl: no such file"),
        (("gae", "--out", "o.jsonl"), "missing option --input"),
        (("gae", "--input", "missing.jsonl", "--out", "o.jsonl"), "missing.jsonl: no such file"),
        (("gae", "--input", "missing.npz", "--out", "o.npz"), "missing.npz: no such file"),
        (("gae", "--input", "a.npz", "--out", "o.jsonl"), "--out: expected the format of --input"),
        (("gae", "--gamma", "1.5"), "algorithm.gamma: expected less than or equal to 1, got 1.5 (from --gamma)"),
        (("gae", "--lam", "-0.1"), "algorithm.lam: expected greater than or equal to 0, got -0.1"),
        (("gae", "--chunk-size", "0"), "algorithm.gae_chunk_size: expected greater than or equal to 1, got 0"),
        (("gae", "--bench", "--backend", "serial"), "--backend: not used with --bench"),
        (("gae", "--shapes", "4x4"), "--shapes: only used with --bench"),
        (("gae", "--bench", "--input", "a.npz"), "--input: not used with --bench"),
        (("gae", "--bench", "--shapes", "4x"), "--shapes: expected ROWSxTOKENS,..."),
        (("evaluate", "--picture", "p.png"), "--picture needs --compare BEFORE.jsonl AFTER.jsonl"),
        (("evaluate", "--compare", "a", "b", "--print-config"), "--print-config cannot be combined with --compare"),
        (("evaluate", "--compare", "a", "b", "--checkpoint", "c"), "--checkpoint cannot be combined with --compare"),
        (("evaluate", "--compare", "a", "b", "--out", "c"), "--out cannot be combined with --compare"),
        (("evaluate", "--compare", "a", "b", "--set", "run.seed=1"), "--set cannot be combined with --compare"),
        (("evaluate", "--compare", "a", "a"), "both name a; give each a file of its own"),
        (("evaluate", "--compare", "missing.jsonl", "b"), "missing.jsonl: no such file"),
        (("evaluate", "--set", "eval.num_samples=4"), "greedy samples of a prompt are all alike; set eval.temperature"),
        (("inspect-mesh", "--set", "mesh.shape=2,4"), "mesh.shape: expected"),
        (("export", "--out", "o"), "missing option --checkpoint"),
        (("export", "--checkpoint", "missing"), "missing option --out"),
        (("export", "--checkpoint", "missing", "--out", "o"), "--checkpoint: there is no folder missing"),
        (("evaluate", "--checkpoint", "."), "--checkpoint: no settings.yaml of a run is in /"),
        (("export", "--checkpoint", ".", "--out", "o"), "--checkpoint: no settings.yaml of a run is in /"),
        (("train", "--from-rollouts", "."), "--from-rollouts: no settings.yaml of a run is in /"),
        (("inspect-mesh", "--set", "mesh.process_id=0"), "also set mesh.coordinator_address"),
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
    ("place", "is_of_run"),
    [
        *((place, True) for place in (".", "checkpoints", "checkpoints/2", "rollouts/step_000001.jsonl")),
        *((place, True) for place in ("eval/step_000002.jsonl", "credited.jsonl")),
        *((place, False) for place in ("mine/credited.jsonl", "checkpoints/2/progress", "../credited.jsonl")),
    ],
)
def test_settings_are_a_run_s_where_what_is_named_lies_in_its_folders_and_that_is_told(
    tmp_path: Path, place: str, is_of_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from app.commands.command_support import find_run_config

    file = tmp_path.resolve() / "run" / "settings.yaml"
    file.parent.mkdir()
    file.touch()
    assert find_run_config({"--from-rollouts": file.parent / place}) == (str(file) if is_of_run else None)
    told = f"note: --from-rollouts: uses the settings of {file}\n" if is_of_run else ""
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize(
    ("verb", "option"), [("train", "--from-rollouts"), ("evaluate", "--checkpoint"), ("export", "--checkpoint")]
)
def test_commands_name_the_run_whose_settings_they_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.yaml").write_text(load(None, ["run.steps=3"], {}).to_yaml())
    answer = here(verb, option, ".", "--print-config")
    assert answer.exit_code == 0, answer.stderr
    assert answer.stderr == f"note: {option}: uses the settings of {tmp_path.resolve() / 'settings.yaml'}\n"
    assert "\n  steps: 3  # yaml:" in answer.stdout
    assert here(verb, option, ".", "--config", "settings.yaml", "--print-config").stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("trian",),
        ("train", "--sett", "a=b"),
        ("train", "--resume", "maybe"),
        ("rollout", "--limit", "0"),
        ("rollout", "--prompts", "missing.jsonl"),
        ("score", "--input", "missing.jsonl"),
        ("score", "--role", "critic"),
        ("gae", "--backend", "quick"),
        ("train", "--json"),
        ("evaluate", "--compare", "one.jsonl"),
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


def in_process(verb: str, statement: str) -> subprocess.CompletedProcess[str]:
    """Runs a statement inside a command, in another process."""
    program = (
        "import sys, typer, cli\nfrom settings import InputError\n"
        "from app.commands.command_support import handle_errors\n"
        f"sys.argv = {['grpo', verb]!r}\n"
        "@cli.app.command()\n"
        f"def {verb}() -> None:\n"
        f"    with handle_errors(debug=False):\n        {statement}\n"
        "cli.main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, "HF_TOKEN": CANARY},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("statement", "code", "stderr"),
    [
        ("raise RuntimeError('out of luck')", 1, f"error: RuntimeError: out of luck{HINT}\n"),
        (f"raise OSError('401 for {CANARY}')", 1, f"error: OSError: 401 for <HF_TOKEN>{HINT}\n"),
        ("raise InputError('line 3: no answer')", 2, "error: line 3: no answer\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("raise typer.Exit(75)", 75, ""),
        ("pass", 0, ""),
    ],
)
def test_every_ending_has_its_exit_code(statement: str, code: int, stderr: str) -> None:
    answer = in_process("stumble", statement)
    assert (answer.returncode, answer.stderr) == (code, stderr)


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
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


def test_json_keeps_letters_readable() -> None:
    from app.commands.command_support import format_summary

    assert json.loads(format_summary({"naïve": 1.5}, as_json=True)) == {"naïve": 1.5}
    assert format_summary({"samples": 8, "out": "é"}, as_json=False) == "samples  8\nout      é"


def test_a_run_says_at_once_that_it_starts_and_then_what_it_does(tmp_path: Path) -> None:
    answer = grpo("train", *("--set", f"run.dir={tmp_path}", "--set", "model.path=nowhere/model"), cwd=tmp_path)
    assert answer.returncode == 2
    first, *_ = answer.stderr.splitlines()
    assert re.fullmatch(r"\[ +0\.\d s\] grpo train: quickstart-seed0, model nowhere/model; loading JAX", first)
