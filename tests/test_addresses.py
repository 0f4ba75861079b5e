"""Tests the paths in options: runs in buckets are fetched, and a single host does not wait for the hosts of a run."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import grpo
from app.records.run_directory import RunDirectory, lock_run_directory
from app.tracking.bucket import BEST, Bucket
from app.tracking.run_mirror import RunMirror
from settings.errors import InputError
from tests.program import here, records_of, settings, succeeded
from tests.tracking.buckets import bucket_server

PLACE = "gs://bucket/place"
ELSEWHERE = f"{PLACE}/file.jsonl"
NO_ADDRESS = "expected a local path or a name, not an address"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (settings(f"model.path={PLACE}"), "model.path"),
        (settings(f"critic.path={PLACE}", "algorithm.name=ppo"), "critic.path"),
        (settings(f"reward.model={PLACE}"), "reward.model"),
        (settings(f"data.source={PLACE}"), "data.source"),
        (settings(f"data.source=[a.jsonl, {ELSEWHERE}]"), "data.source[1].source"),
        (settings(f"data.eval_source={ELSEWHERE}"), "data.eval_source"),
        (settings(f"reward.functions=[{PLACE}/rewards.py:brevity]"), "reward.functions[0].function"),
        (settings(f"env.source={PLACE}/games.py:Game"), "env.source"),
        (settings(f"env.tools=[{PLACE}/tools.py:search]"), "env.tools[0]"),
        (("--config", f"{PLACE}/settings.yaml"), "--config"),
    ],
)
def test_settings_of_local_paths_reject_bucket_addresses(
    arguments: tuple[str, ...], named: str, in_folder: None, tmp_path: Path
) -> None:
    assert refusal(tmp_path, "train", *arguments).startswith(f"error: {named}: {NO_ADDRESS}")


@pytest.mark.parametrize("place", ["ftq://a/b", "s3://", "gs:///a", "s3://a//b", "gs://a/../b"])
def test_run_dir_must_be_a_folder_or_an_address_in_a_bucket(place: str, in_folder: None, tmp_path: Path) -> None:
    expected = "error: run.dir: expected a folder, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER, got "
    assert refusal(tmp_path, "train", *settings(f"run.dir={place}")).startswith(expected)


@pytest.mark.parametrize(
    "arguments",
    [
        ("rollout", "--limit", "1", "--out", ELSEWHERE),
        ("rollout", "--out", "here.jsonl", "--timeline", ELSEWHERE),
        ("score", "--input", "here.jsonl", "--out", ELSEWHERE),
        ("gae", "--input", "here.jsonl", "--out", ELSEWHERE),
        ("gae", "--bench", "--shapes", "2x8", "--out", PLACE),
        ("evaluate", "--out", ELSEWHERE),
        ("evaluate", "--compare", "here.jsonl", "here.jsonl", "--picture", ELSEWHERE),
        ("export", "--config", "quickstart", "--out", PLACE),
        ("inspect-mesh", "--compile", "--hlo", PLACE),
    ],
)
def test_options_for_local_files_reject_bucket_addresses(
    arguments: tuple[str, ...], in_folder: None, tmp_path: Path
) -> None:
    assert refusal(tmp_path, *arguments).startswith(f"error: {arguments[-2]}: {NO_ADDRESS}")


@pytest.mark.usefixtures("in_folder")
def test_an_option_that_accepts_buckets_rejects_other_addresses(tmp_path: Path) -> None:
    address = "https://host/samples.jsonl"
    expected = f"error: --input: expected a local path, or a run at gs:// or s3://, got {address}; download it first\n"
    assert refusal(tmp_path, "score", "--out", "there.jsonl", "--input", address) == expected


@pytest.fixture(scope="module")
def bucket() -> Iterator[None]:
    with bucket_server("gs"):
        yield


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--from-rollouts", PLACE),
        ("train", "--config", "quickstart", "--from-rollouts", "here", "--checkpoint", PLACE),
        ("rollout", "--out", "here.jsonl", "--prompts", ELSEWHERE),
        ("rollout", "--out", "here.jsonl", "--checkpoint", f"{PLACE}/checkpoints/3"),
        ("score", "--out", "there.jsonl", "--input", ELSEWHERE),
        ("score", "--out", "there.jsonl", "--input", "here.jsonl", "--checkpoint", PLACE),
        ("gae", "--out", "there.jsonl", "--input", ELSEWHERE),
        ("evaluate", "--checkpoint", PLACE),
        ("evaluate", "--compare", "here.jsonl", ELSEWHERE),
        ("export", "--out", "here", "--checkpoint", PLACE),
        ("report", PLACE),
    ],
)
def test_error_says_that_a_bucket_address_contains_no_run(
    arguments: tuple[str, ...], in_folder: None, tmp_path: Path
) -> None:
    option = "RUN_DIR" if arguments[0] == "report" else next(word for word in arguments[::-1] if word[:2] == "--")
    expected = f"error: {option}: there is no run at {arguments[-1]}, and only runs are fetched; "
    assert refusal(tmp_path, *arguments).startswith(expected)


def refusal(folder: Path, *arguments: str) -> str:
    """Returns the only error of a command, which comes before JAX is loaded and before anything is written."""
    result = here(*arguments)
    assert result.exit_code == 2, result.stderr
    assert result.stderr.count("\n") == 1 and "loading JAX" not in result.stderr and not result.stdout
    assert not any(folder.iterdir())
    return result.stderr


@pytest.mark.usefixtures("bucket", "in_folder")
def test_a_run_in_a_bucket_is_fetched_if_an_option_names_it(finished: Path, tmp_path: Path) -> None:
    address, copy = f"{PLACE}/{tmp_path.name}", Path("runs/gs/bucket/place") / tmp_path.name
    run = Path(shutil.copytree(finished, tmp_path / "tiny", symlinks=True))
    with RunMirror(RunDirectory(run), Bucket(address)) as mirror:
        mirror.start()
    assert Bucket(address).read(BEST) == os.readlink(run / BEST).encode()
    names = "eval/step_000000.jsonl", "eval/step_000004.jsonl"
    of_files = succeeded(here("evaluate", "--compare", *(run / name for name in names)))
    result = succeeded(here("evaluate", "--compare", *(f"{address}/{name}" for name in names)))
    assert result.stdout.replace(str(copy), str(run)) == of_files.stdout
    assert f"note: --compare: fetched from {address}: all but its checkpoints\n" in result.stderr
    for step in ("", "/checkpoints/4", "/checkpoints/best"):
        result = succeeded(here("export", "--checkpoint", f"{address}{step}", "--out", f"model{len(step)}"))
        assert (f"note: --checkpoint: fetched from {address}: step 4" in result.stderr) == (not step)
    assert (copy / BEST).resolve().name == (run / BEST).resolve().name
    table, expected = (succeeded(here("evaluate", "--checkpoint", one)).stdout for one in (address, run))
    assert table.splitlines()[:-1] == expected.splitlines()[:-1]
    succeeded(here("report", address))
    assert "runs/gs/bucket" in (copy / "report.html").read_text()
    # While a run continues, another machine gets later lines without a newer checkpoint.
    (copy / "metrics.jsonl").write_text("")
    with lock_run_directory(RunDirectory(copy)):
        assert "has no finished training step yet" in here("report", address).stderr
    assert "note: RUN_DIR: fetched" in succeeded(here("report", address)).stderr


@pytest.mark.usefixtures("bucket", "in_folder")
def test_python_functions_accept_the_same_addresses_as_commands() -> None:
    with pytest.raises(InputError, match=r"^checkpoint: there is no run at gs://bucket/place, and "):
        grpo.evaluate(checkpoint=PLACE)
    with pytest.raises(InputError, match=r"^out: expected a local path or a name, not an address"):
        grpo.rollout(limit=1, out=ELSEWHERE)


def test_a_run_of_several_hosts_is_read_on_one_without_waiting_for_them(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "tiny", symlinks=True))
    # As a run on two hosts writes them.
    mesh = "  coordinator_address: 127.0.0.1:9\n  num_processes: 2\n  process_id: 0\n"
    text = (run / "settings.yaml").read_text()
    lines = [line for line in text.splitlines(keepends=True) if line.strip().split(":")[0] not in mesh]
    (run / "settings.yaml").write_text("".join(lines).replace("mesh:\n", f"mesh:\n{mesh}", 1))
    (run / "sessions.jsonl").unlink()
    out = tmp_path / "evaluated.jsonl"
    succeeded(here("evaluate", "--checkpoint", run, "--out", out))
    assert len(records_of(out)) == len(records_of(run / "eval" / "step_000004.jsonl"))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (("mesh.coordinator_address=127.0.0.1:9",), "also set mesh.num_processes and mesh.process_id"),
        (("mesh.coordinator_address=127.0.0.1:9", "mesh.num_processes=2", "mesh.process_id=2"), "is too large for"),
    ],
)
def test_unusable_settings_of_hosts_are_refused_before_hosts_join(
    chosen: tuple[str, ...], message: str, finished: Path, tmp_path: Path
) -> None:
    result = here("rollout", "--checkpoint", finished, "--out", tmp_path / "x.jsonl", *settings(*chosen))
    assert result.exit_code == 2 and message in result.stderr
