from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

import pytest

from app.plugins.worker_process import MAX_PRINTED_BYTES, PIPE_BYTES
from settings.errors import InputError
from tests.reward.processes import WORKERS
from tests.reward.samples import make_group, score, values_of, write_plug_in

pytestmark = WORKERS


def test_a_worker_sees_few_variables_and_none_of_our_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "https_proxy", "GRPO__RUN__SEED", "JUDGE_KEY"):
        monkeypatch.setenv(name, "CANARY")
    source = (
        "import json, os\ndef f(completion):\n"
        "    fds = [f'/proc/self/fd/{fd}' for fd in range(3, 50)]\n"
        "    files = [os.readlink(fd) for fd in fds if os.path.exists(fd)]\n"
        "    with open('seen.json', 'w') as out: json.dump([dict(os.environ), files], out)\n    return 1"
    )
    path = write_plug_in(tmp_path, source)
    monkeypatch.chdir(tmp_path)
    with open(path) as ours:
        os.set_inheritable(ours.fileno(), True)
        score([f"{path}:f"], make_group("a"), env_vars=["JUDGE_KEY"])
    seen, files = json.loads((tmp_path / "seen.json").read_text())
    assert [name for name, value in seen.items() if "CANARY" in value] == ["JUDGE_KEY"]
    assert seen["PATH"] == os.environ["PATH"] and seen["PYTHONHASHSEED"] == "0"
    assert all(file.startswith(("pipe:", "anon_inode:", "socket:")) for file in files), files


@pytest.mark.parametrize(("asked_for", "seen"), [([], 0.0), (["CUDA_VISIBLE_DEVICES"], 3.0)])
def test_gpus_are_the_trainers_unless_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_for: list[str], seen: float
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    path = write_plug_in(tmp_path, "import os\ndef f(completion): return len(os.getenv('CUDA_VISIBLE_DEVICES', '-'))")
    assert values_of(score([f"{path}:f"], make_group("a"), env_vars=asked_for)) == [seen]


def test_an_asked_for_variable_must_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(InputError, match="environment variable JUDGE_KEY is not set"):
        score(["gsm8k"], make_group("a"), env_vars=["JUDGE_KEY"])


def test_what_a_plug_in_prints_cannot_command_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = (
        "import os, sys\ndef f(completion):\n    print(completion)\n    os.write(1, b'\\xff\\x1b]0;title\\x07\\n')\n"
        "    print('no end', end='', file=sys.stderr, flush=True)\n    return 1"
    )
    assert values_of(score([f"{write_plug_in(tmp_path, source)}:f"], make_group("a\x1b[2J\rb\tc"))) == [1.0]
    printed = "a\ufffd[2J\nb       c\n\ufffd\ufffd]0;title\ufffd\nno end\n"
    assert capfd.readouterr() == ("", printed)


def test_a_plug_in_may_print_more_than_a_pipe_holds_and_the_rest_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_plug_in(tmp_path, "def f(completion):\n    print(('x' * 99 + '\\n') * 10**4)\n    return 1")
    assert values_of(score([f"{path}:f"], make_group("a", "b"), workers=1)) == [1.0, 1.0]
    printed = capfd.readouterr().err
    assert PIPE_BYTES < len(printed) / 2 < MAX_PRINTED_BYTES + 1000
    assert printed.count("the rest of this call is left out") == 2


def test_a_key_lent_to_a_plug_in_is_never_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "CANARY-0123456789")
    source = (
        "import os\nkey = os.environ['JUDGE_KEY']\nprint(key)\n"
        "def f(completion):\n    print(key)\n    raise ValueError(key)"
    )
    scored = score([f"{write_plug_in(tmp_path, source)}:f"], make_group("a"), env_vars=["JUDGE_KEY"])
    assert "ValueError: <JUDGE_KEY>" in scored.notices[0]
    assert "CANARY" not in f"{scored}{capfd.readouterr()}"


@pytest.mark.parametrize("num_before", [64 * 2**10 - 6, 256 * 2**10 - 6])
def test_no_part_of_a_key_is_printed_where_a_long_line_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], num_before: int
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "CANARY-0123456789")
    source = f"import os\ndef f(completion):\n    print('x' * {num_before} + os.environ['JUDGE_KEY'] * 9)\n    return 1"
    score([f"{write_plug_in(tmp_path, source)}:f"], make_group("a"), env_vars=["JUDGE_KEY"])
    printed = capfd.readouterr().err
    assert printed.count("x") >= num_before - 100 and "CANARY" not in printed and "0123456789" not in printed


def test_the_environment_of_the_trainer_cannot_be_read_by_others(tmp_path: Path) -> None:
    score([f"{write_plug_in(tmp_path, 'def f(completion): return 1')}:f"], make_group("a"))
    get_dumpable = 3
    assert ctypes.CDLL(None).prctl(get_dumpable, 0, 0, 0, 0) == 0
