from collections.abc import Callable
from pathlib import Path

import pytest

from app.records.run_directory import Resume, RunDirectory, check_run_directory, lock_run_directory
from settings import InputError, load
from tests.program import digest_of, train_here

RESUMES: tuple[Resume, ...] = ("never", "auto", "must")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "tiny")


@pytest.fixture
def occupied(run: RunDirectory) -> RunDirectory:
    run.path.mkdir(parents=True)
    run.write_settings(load(None, [], {}))
    return run


def accepted(run: RunDirectory) -> list[Resume]:
    """Returns the values of --resume with which a run may start."""

    def is_accepted(resume: Resume) -> bool:
        try:
            check_run_directory(run, resume)
        except InputError:
            return False
        return True

    return [resume for resume in RESUMES if is_accepted(resume)]


def test_new_directories_and_those_of_failed_starts_are_free(run: RunDirectory, tmp_path: Path) -> None:
    assert accepted(run) == ["never", "auto"]
    assert list(tmp_path.iterdir()) == [], "looking does not make it"
    lock_run_directory(run).close()
    run.checkpoints_dir.mkdir()
    (run.path / ".sessions.jsonl.77.partial").touch()  # killed while it wrote its first file
    assert accepted(run) == ["never", "auto"]


def test_a_run_is_continued_only_if_asked(occupied: RunDirectory) -> None:
    # An unfinished save has another name until it is whole.
    (occupied.checkpoints_dir / "3.orbax-checkpoint-tmp").mkdir(parents=True)
    assert accepted(occupied) == ["auto"]
    with pytest.raises(InputError, match=r"already holds a run.*start it over.*--resume auto"):
        check_run_directory(occupied, "never")
    with pytest.raises(InputError, match=r"--resume must: .* has no checkpoint"):
        check_run_directory(occupied, "must")
    (occupied.checkpoints_dir / "3").mkdir()
    assert accepted(occupied) == ["auto", "must"]
    with pytest.raises(InputError, match=r"already holds a run.*continue it with --resume auto"):
        check_run_directory(occupied, "never")
    occupied.settings_path.unlink()
    assert accepted(occupied) == ["auto", "must"]


@pytest.mark.parametrize("name", ["thesis.tex", ".thesis.tex.77.partial", "checkpoints/model.safetensors"])
def test_a_folder_with_other_files_is_refused(run: RunDirectory, name: str) -> None:
    (run.path / name).parent.mkdir(parents=True)
    (run.path / name).touch()
    with pytest.raises(InputError, match="exists and is not a run directory"):
        check_run_directory(run, "auto")


def replace_by_folder(run: RunDirectory) -> Path:
    run.settings_path.unlink()
    run.settings_path.mkdir()
    return run.settings_path


def link_a_file(run: RunDirectory) -> Path:
    run.metrics_path.symlink_to(run.path.parent)
    return run.metrics_path


def link_checkpoints(run: RunDirectory) -> Path:
    (run.checkpoints_dir / "3").mkdir(parents=True)
    run.checkpoints_dir.rename(run.path.parent / "moved")
    run.checkpoints_dir.symlink_to(run.path.parent / "moved")
    return run.checkpoints_dir


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_by_folder, "is a folder instead of a file"),
        (link_a_file, "is a symbolic link"),
        (link_checkpoints, "is a symbolic link"),
    ],
)
def test_links_and_folders_in_place_of_files_are_refused(
    occupied: RunDirectory, change: Callable[[RunDirectory], Path], message: str
) -> None:
    path = change(occupied)
    with pytest.raises(InputError, match=f"{path} {message}"):
        check_run_directory(occupied, "auto")


def test_directories_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, message in (
        # Not a matter of who runs the tests, as a permission is.
        (tmp_path / ("x" * 300) / "tiny", r"run\.dir: cannot read .*: File name too long; choose another run\.dir"),
        (file, r"is a file; choose another run\.name"),
        (file / "runs" / "tiny", r"run\.dir: .*file is not a directory that this user may write to"),
    ):
        with pytest.raises(InputError, match=message):
            check_run_directory(RunDirectory(path), "auto")
    with pytest.raises(InputError, match=r"run\.dir: cannot write to /proc/self/runs/tiny: .*; choose another run\."):
        lock_run_directory(RunDirectory(Path("/proc/self/runs/tiny")))


def test_a_run_directory_is_locked_by_one_process_at_a_time(finished: Path, config: Path) -> None:
    run = RunDirectory(finished)
    with lock_run_directory(run):
        with pytest.raises(InputError, match="another process is running in"):
            lock_run_directory(run)
        before = digest_of(finished)
        result = train_here(config, f"run.dir={finished.parent}", resume="auto")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: run.name: another process is running in")
    assert digest_of(finished) == before
    lock_run_directory(run).close()


def test_settings_are_written_with_their_sources_and_load_again(run: RunDirectory) -> None:
    resolved = load(None, ["run.seed=7", "optimizer.learning_rate=1e-3"], {"NUM_PRE_Q": "5"})
    run.path.mkdir(parents=True)
    run.write_settings(resolved)
    assert [path.name for path in run.path.iterdir()] == ["settings.yaml"]
    lines = run.settings_path.read_text().splitlines()
    assert {"  seed: 7  # set", "  group_size: 5  # env:NUM_PRE_Q", "  name: quickstart-seed7  # derived"} <= {*lines}
    assert load(str(run.settings_path), [], {}).settings == resolved.settings
