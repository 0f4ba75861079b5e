from __future__ import annotations

from pathlib import Path

import pytest

from app.records.run_directory import Resume, RunDirectory, check_run_directory, lock_run_directory
from settings import InputError, load
from tests.program import digest_of, train_here


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "tiny")


@pytest.fixture
def occupied(run: RunDirectory) -> RunDirectory:
    run.path.mkdir(parents=True)
    run.write_settings(load(None, [], {}))
    return run


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_new_directory_is_free_and_looking_does_not_make_it(
    run: RunDirectory, tmp_path: Path, resume: Resume
) -> None:
    check_run_directory(run, resume)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_is_free(run: RunDirectory) -> None:
    run.path.mkdir(parents=True)
    check_run_directory(run, "never")


def test_never_refuses_a_directory_that_holds_a_run(occupied: RunDirectory) -> None:
    with pytest.raises(InputError, match=r"already holds a run.*--resume auto") as refusal:
        check_run_directory(occupied, "never")
    assert ("start it over" in str(refusal.value)) is not occupied.has_checkpoint


@pytest.mark.parametrize("name", ["thesis.tex", ".thesis.tex.77.partial", "checkpoints/model.safetensors"])
def test_a_folder_with_something_else_in_it_is_refused(run: RunDirectory, name: str) -> None:
    (run.path / name).parent.mkdir(parents=True)
    (run.path / name).touch()
    with pytest.raises(InputError, match="exists and is not a run directory"):
        check_run_directory(run, "auto")


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_what_a_failed_start_leaves_does_not_take_the_name(run: RunDirectory, resume: Resume) -> None:
    lock_run_directory(run).close()
    run.checkpoints_dir.mkdir()
    (run.path / ".sessions.jsonl.77.partial").touch()  # killed while it wrote its first file
    check_run_directory(run, resume)


def test_auto_accepts_a_run_with_or_without_a_checkpoint(occupied: RunDirectory) -> None:
    check_run_directory(occupied, "auto")
    (occupied.checkpoints_dir / "3").mkdir(parents=True)
    check_run_directory(occupied, "auto")
    occupied.settings_path.unlink()
    check_run_directory(occupied, "auto")


@pytest.mark.parametrize("name", ["settings.yaml", "metrics.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_refused(occupied: RunDirectory, name: str) -> None:
    (occupied.path / name).unlink(missing_ok=True)
    (occupied.path / name).mkdir()
    with pytest.raises(InputError, match=rf"{occupied.path / name} is a folder instead of a file"):
        check_run_directory(occupied, "auto")


@pytest.mark.parametrize("resume", ["never", "auto", "must"])
def test_a_directory_that_cannot_be_looked_into_is_refused(tmp_path: Path, resume: Resume) -> None:
    too_long = tmp_path / ("x" * 300)  # not a matter of who runs the tests, as a permission is
    with pytest.raises(InputError, match=r"run\.dir: cannot read .*: File name too long; choose another run\.dir"):
        check_run_directory(RunDirectory(too_long / "tiny"), resume)


def test_must_refuses_a_run_without_a_checkpoint(occupied: RunDirectory) -> None:
    # An unfinished save has another name until it is whole.
    (occupied.checkpoints_dir / "3.orbax-checkpoint-tmp").mkdir(parents=True)
    with pytest.raises(InputError, match=r"--resume must: .* has no checkpoint"):
        check_run_directory(occupied, "must")


def test_must_accepts_a_run_with_a_checkpoint(occupied: RunDirectory) -> None:
    (occupied.checkpoints_dir / "3").mkdir(parents=True)
    check_run_directory(occupied, "must")


def test_a_file_in_the_place_of_the_directory_is_refused(run: RunDirectory) -> None:
    run.path.parent.mkdir()
    run.path.touch()
    with pytest.raises(InputError, match=r"is a file; choose another run\.name"):
        check_run_directory(run, "auto")


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_links_in_a_run_directory_are_refused(occupied: RunDirectory, tmp_path: Path, name: str) -> None:
    (occupied.checkpoints_dir / "3").mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if name == "checkpoints":
        occupied.checkpoints_dir.rename(elsewhere / "moved")
    (occupied.path / name).symlink_to(elsewhere)
    with pytest.raises(InputError, match=rf"{occupied.path / name} is a symbolic link"):
        check_run_directory(occupied, "auto")


def test_a_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"run\.dir: .*file is not a directory that this user may write to"):
        check_run_directory(RunDirectory(tmp_path / "file" / "runs" / "tiny"), "never")


def test_a_directory_that_the_system_will_not_make_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"run\.dir: cannot write to /proc/self/runs/tiny: .*; choose another run\.dir"
    ):
        lock_run_directory(RunDirectory(Path("/proc/self/runs/tiny")))


def test_a_run_directory_is_claimed_by_one_process_at_a_time(run: RunDirectory) -> None:
    with lock_run_directory(run), pytest.raises(InputError, match="another process is running in"):
        lock_run_directory(run)
    lock_run_directory(run).close()


def test_a_second_trainer_is_turned_away(finished: Path, config: Path) -> None:
    run = RunDirectory(finished)
    with lock_run_directory(run):
        before = digest_of(finished)
        result = train_here(config, f"run.dir={finished.parent}", resume="auto")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: run.name: another process is running in")
    assert digest_of(finished) == before


def test_settings_are_written_whole_with_what_set_each_and_can_be_loaded_again(run: RunDirectory) -> None:
    resolved = load(None, ["run.seed=7", "optimizer.learning_rate=1e-3"], {"NUM_PRE_Q": "5"})
    run.path.mkdir(parents=True)
    run.write_settings(resolved)
    assert [path.name for path in run.path.iterdir()] == ["settings.yaml"]
    text = run.settings_path.read_text()
    for line in ("  seed: 7  # set", "  group_size: 5  # env:NUM_PRE_Q", "  name: quickstart-seed7  # derived"):
        assert line in text.splitlines()
    assert load(str(run.settings_path), [], {}).settings == resolved.settings
