"""Tests that files damaged at random or on purpose are read, or refused with one error."""

import itertools
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from app.runtime.model_spec import read_model_spec
from settings import InputError, Settings, load
from settings.checks.commands import check_for_train
from settings.loading.fields import FIELDS
from tests.model.io.gguf_files import add_tokenizer, random_checkpoint, write_gguf
from tests.program import here
from tests.tiny_directory import write_model

NUM_HEADER_BYTES = 2000
EXTREME_NUMBERS = ["9" * 5000, "0x" + "f" * 5000, "1e999", '"\\ud800"', "[" * 500, "\x1b[2J", "{a: 1}"]
EXTREME_VALUES = [10**9, 10**30, -1, 0, 1.5, 1e308, None, [], {}, "x" * 1000, [[]], True, "\x1b[2J", [10**9]]


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Returns the content after a few random changes: bits, bytes, sizes, gaps and insertions."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice(b'\x00\x7f\x80\xff\n"{[')
            case 2:
                del data[at : at + rng.randrange(1, 64)]
            case 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 16))
            case _:
                data[at : at + 8] = rng.choice([0, 1, 2**31, 2**40, 2**62, 2**64 - 1]).to_bytes(8, "little")
        data = data or bytearray(b"\n")
    return bytes(data)


def is_refused(read: Callable[[], object]) -> bool:
    """Returns whether the input is refused with one readable error, and not accepted; fails otherwise."""
    try:
        read()
    except InputError as error:
        assert str(error) and len(str(error)) < 5000
        return True
    return False


def read_model(path: Path) -> object:
    return read_model_spec(Settings.model_validate({"model": {"path": str(path)}}))


def write_gguf_with_tokenizer(path: Path) -> Path:
    tokens = [*"abcdefgh", "ab", "<eos>", *(f"<{i}>" for i in range(22))]
    tokenizer = partial(add_tokenizer, tokens=tokens, merge="a b")
    return write_gguf(path, "qwen2", random_checkpoint(biases=True, tied=False), extra=[tokenizer])


@pytest.mark.slow
def test_a_damaged_model_or_settings_file_is_read_or_refused_with_one_error(tmp_path: Path) -> None:
    gguf, model = write_gguf_with_tokenizer(tmp_path / "model.gguf"), write_model(tmp_path / "model")
    config, rng = tmp_path / "settings.yaml", random.Random(0)
    config.write_text(load(None, [], {}).to_yaml())
    readers: dict[Path, Callable[[], object]] = {gguf: lambda: read_model(gguf)}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        readers[model / name] = lambda: read_model(model)
    readers[config] = lambda: check_for_train(load(str(config), [], {}))
    for path, read in readers.items():
        content, num_refused = path.read_bytes(), 0
        assert not is_refused(read)
        for number in range(100):
            if path.name == "config.json" and number % 2:
                fields = json.loads(content)
                path.write_text(json.dumps(fields | {rng.choice(list(fields)): rng.choice(EXTREME_VALUES)}))
            else:
                size = len(content) if path == config else NUM_HEADER_BYTES
                path.write_bytes(damaged(content[:size], rng) + content[size:])
            num_refused += is_refused(read)
        path.write_bytes(content)
        assert num_refused > 0, path


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b"", b'{"vocab_size": ' + b"9" * 5000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_model_file_with_foreign_content_is_refused_with_one_error(tmp_path: Path, name: str, content: bytes) -> None:
    model = write_model(tmp_path / "model")
    (model / name).write_bytes(content)
    assert is_refused(lambda: read_model(model)) or name == "tokenizer_config.json"


def test_unknown_merges_and_absurd_numbers_of_layers_are_refused(tmp_path: Path) -> None:
    path = write_gguf_with_tokenizer(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"a b", b"a q"))
    with pytest.raises(InputError, match="merges 'a q', which is not in its vocabulary"):
        read_model(path)
    with pytest.raises(InputError, match="num_hidden_layers must be a positive integer below 10,001, got 1000000000"):
        read_model(write_model(tmp_path / "model", num_hidden_layers=10**9))


def test_extreme_values_of_settings_are_accepted_or_refused_with_one_error() -> None:
    for field, value in zip(FIELDS, itertools.cycle(EXTREME_NUMBERS), strict=False):
        is_refused(lambda change=f"{field}={value}": check_for_train(load(None, [change], {})))


def test_escape_sequences_in_setting_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text('"\\e[2J": 1\nrun:\n  "\\e[31msteps": 2\n')
    result = here("train", "--config", config)
    assert result.exit_code == 2 and r"unknown setting run.\x1b[31msteps" in result.stderr
    assert "\x1b" not in result.stderr + result.stdout
