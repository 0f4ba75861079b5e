"""Tests a run's directory: who may use it, and the settings of its steps, read from its files."""

from pathlib import Path

import pytest

from app.records.jsonl import write_jsonl
from app.records.run_directory import Resume, RunDirectory, check_run_directory, lock_run_directory, with_run_name
from app.records.settings_history import SettingsHistory
from settings import InputError, load
from tests.program import digest_of, records_of, train_here

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


def test_a_run_can_use_a_new_directory_or_the_directory_of_a_failed_start(run: RunDirectory, tmp_path: Path) -> None:
    assert accepted(run) == ["never", "auto"]
    assert list(tmp_path.iterdir()) == [], "the check does not create it"
    lock_run_directory(run).close()
    run.checkpoints_dir.mkdir()
    (run.path / ".sessions.jsonl.77.partial").touch()  # killed while it wrote its first file
    assert accepted(run) == ["never", "auto"]


def test_runs_without_a_name_are_numbered_and_the_newest_is_continued(tmp_path: Path) -> None:
    def name(resume: Resume, *overrides: str) -> str | None:
        return with_run_name(load(None, [f"run.dir={tmp_path}", *overrides], {}), resume).settings.run.name

    first, names = "quickstart-seed0", list[str | None]()
    for taken in ("", first, f"{first}-3", f"{first}-12", f"{first}-best", f"{first}0"):
        if taken:
            (tmp_path / taken).mkdir()
            (tmp_path / taken / "settings.yaml").touch()
        (tmp_path / f"{first}-20").mkdir(exist_ok=True)  # a failed start, which a resume continues
        names += [name("never"), name("auto")]
    new = ("", "-2", "-4", "-13", "-13", "-13")
    assert names == [f"{first}{number}" for one in new for number in (one, "-20")]
    assert name("never", "run.name=quickstart-seed0") == first and name("must", "run.seed=1") == "quickstart-seed1"


def test_a_run_is_continued_only_on_request(occupied: RunDirectory) -> None:
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
def test_a_folder_with_other_files_is_refused_as_run_directory(run: RunDirectory, name: str) -> None:
    (run.path / name).parent.mkdir(parents=True)
    (run.path / name).touch()
    with pytest.raises(InputError, match="exists and is not a run directory"):
        check_run_directory(run, "auto")


def test_links_and_folders_in_place_of_a_runs_files_are_refused(occupied: RunDirectory) -> None:
    (occupied.path.parent / "moved" / "3").mkdir(parents=True)
    for path in (occupied.checkpoints_dir, occupied.metrics_path):
        path.symlink_to(occupied.path.parent / "moved")
        with pytest.raises(InputError, match=f"{path} is a symbolic link"):
            check_run_directory(occupied, "auto")
        path.unlink()
    occupied.settings_path.unlink()
    occupied.settings_path.mkdir()
    with pytest.raises(InputError, match=f"{occupied.settings_path} is a folder instead of a file"):
        check_run_directory(occupied, "auto")


def test_unusable_run_directories_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, message in (
        # Unlike a permission, this does not depend on the user who runs the tests.
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
        result = train_here(config, f"run.dir={finished.parent}", "run.steps=5", resume="auto")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: run.name: another process is running in")
    assert digest_of(finished) == before
    lock_run_directory(run).close()


# Settings by step -----------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path) -> RunDirectory:
    """Returns a run of two sessions with different settings, the second of which began after step 3."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    resolved = [load(None, [f"optimizer.learning_rate={rate}"], {}) for rate in (0.1, 0.2)]
    lines = [{"after_step": step, "settings": one.to_yaml()} for step, one in zip((0, 3), resolved, strict=True)]
    write_jsonl(run.sessions_path, lines)
    run.write_settings(resolved[-1])
    return run


def rates_of(history: SettingsHistory) -> dict[int, float]:
    return {period.first_step: period.settings["optimizer.learning_rate"][0] for period in history.periods}


def test_steps_have_the_settings_of_their_session(trained: RunDirectory) -> None:
    history = SettingsHistory.read(trained)
    assert rates_of(history) == {1: 0.1, 4: 0.2} and history.gaps == []
    assert history.periods[-1].file.name == str(trained.settings_path)
    assert [history.period_of(step).first_step for step in (0, 1, 3, 4, 9)] == [1, 1, 1, 4, 4]


def test_retrained_steps_have_the_settings_of_the_later_session(trained: RunDirectory) -> None:
    resolved = load(None, ["optimizer.learning_rate=0.3"], {})
    again = {"after_step": 2, "settings": resolved.to_yaml()}
    write_jsonl(trained.sessions_path, [*records_of(trained.sessions_path), again])
    trained.write_settings(resolved)
    assert rates_of(SettingsHistory.read(trained)) == {1: 0.1, 3: 0.3}


def test_sessions_without_valid_settings_are_reported_as_gaps(trained: RunDirectory) -> None:
    first, second = records_of(trained.sessions_path)
    for lines, rates in (
        ([first, {**second, "after_step": "3"}], {1: 0.2}),
        ([first, {"after_step": 2}, second], {1: 0.1, 4: 0.2}),
    ):
        write_jsonl(trained.sessions_path, lines)
        history = SettingsHistory.read(trained)
        assert rates_of(history) == rates
        assert history.gaps == ["sessions.jsonl has no valid settings in line 2; other lines are used instead"]


def test_changed_and_lost_settings_are_taken_from_the_last_session(trained, caplog):
    text = trained.settings_path.read_text()
    trained.settings_path.write_text(text.replace("learning_rate: 0.2", "learning_rate: 0.5"))
    assert rates_of(SettingsHistory.read(trained)) == {1: 0.1, 4: 0.2}
    assert f"{trained.settings_path} was changed" in caplog.text
    trained.settings_path.unlink()
    assert rates_of(SettingsHistory.read(trained)) == {1: 0.1, 4: 0.2}
    trained.sessions_path.unlink()
    with pytest.raises(InputError, match=r"sessions\.jsonl next to it has no settings either"):
        SettingsHistory.read(trained)


@pytest.mark.parametrize("has_sessions", [True, False])
def test_a_run_of_another_version_is_refused_and_unchanged(trained: RunDirectory, has_sessions: bool) -> None:
    text = load(None, [], {}).to_yaml().replace("rollout:\n", "rollout:\n  decode_layout: gathered  # default\n")
    trained.settings_path.write_text(text)
    write_jsonl(trained.sessions_path, [{"after_step": 0, "settings": text}] if has_sessions else [])
    before = trained.settings_path.read_bytes(), trained.sessions_path.read_bytes()
    with pytest.raises(InputError, match=r"rollout\.decode_layout, unknown to this version of grpo; use the version"):
        SettingsHistory.read(trained)
    assert (trained.settings_path.read_bytes(), trained.sessions_path.read_bytes()) == before
