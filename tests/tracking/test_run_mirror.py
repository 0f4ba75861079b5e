"""Tests the copy of a run in a bucket: its files, its lease, and faults of the network."""

import itertools
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from aiohttp import ClientPayloadError
from botocore.exceptions import ClientError
from fsspec import get_filesystem_class
from fsspec.config import conf as fsspec_options
from gcsfs.retry import HttpError
from google.auth.exceptions import TransportError
from s3fs.errors import translate_boto_error

from app.commands.addresses import name_run
from app.records.run_directory import FETCHED, Resume, RunDirectory, check_run_directory
from app.tracking import bucket as bucket_module
from app.tracking import run_mirror
from app.tracking.bucket import (
    BEST,
    LEASE,
    MULTIPART_BYTES,
    Bucket,
    BucketUnreachableError,
    complete_steps,
    fetch_run,
    replace_checkpoint,
)
from app.tracking.run_mirror import LeaseLostError, RunMirror
from settings import load
from settings.errors import InputError
from tests.program import (
    DEADLINE_S,
    UNJUDGED,
    assert_same_run,
    here,
    metrics_of,
    settings,
    started,
    succeeded,
    wait_for,
    wait_until,
)
from tests.tracking.buckets import Network, bucket_server, reached_at, reader_of
from tests.two_hosts import HOSTS_PROGRAM, blind_host, ended, run_on_two_hosts, two_hosts


@pytest.fixture(scope="module", params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    with bucket_server(request.param) as url:
        yield request.param, url


@pytest.fixture
def address(server: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(run_mirror, "RENEW_S", 0.2)
    monkeypatch.setattr(run_mirror, "LEASE_S", 3.0)
    monkeypatch.setattr(run_mirror, "MAX_DELAY_S", 0.2)
    return f"{server[0]}://bucket/{tmp_path.name}"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    save(made, 1)
    made.sessions_path.write_text("{}\n")
    (made.path / ".lock").touch()
    return made


PARTS = ("progress/metadata", "state/d/0", "state/d/1")


def save(run: RunDirectory, step: int) -> None:
    """Writes a line and a checkpoint, which appears whole, and removes the oldest of three."""
    for name in PARTS:
        path = run.checkpoints_dir / ".saving" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(f"{step} {name}").randbytes(50_000))
    path.parents[2].rename(run.checkpoints_dir / str(step))
    with run.metrics_path.open("a") as file:
        file.write(f'{{"step": {step}}}\n')
    for old in sorted(run.checkpoint_steps)[:-2]:
        shutil.rmtree(run.checkpoints_dir / str(old))


def checkpoints_of(run: RunDirectory) -> dict[str, bytes]:
    files = (path for path in run.checkpoints_dir.rglob("*") if path.is_file())
    return {str(path.relative_to(run.checkpoints_dir)): path.read_bytes() for path in files}


def bucket_behind(network: Network, scheme: str, address: str) -> Bucket:
    """Returns a bucket whose connections all pass through the network."""
    # Otherwise gcsfs looks for its server's address at every request.
    conf = {"gs": {"endpoint_url": network.url}} if scheme == "gs" else {}
    with reached_at(scheme, network.url), mock.patch.dict(fsspec_options, conf):
        bucket = Bucket(address)
        bucket.sizes()  # It connects at the first request.
    return bucket


def test_the_mirror_uploads_each_checkpoint_and_is_downloaded_once(
    run: RunDirectory, address: str, tmp_path: Path
) -> None:
    bucket, elsewhere = Bucket(address), RunDirectory(tmp_path / "elsewhere")
    bucket.check("never", run)
    with RunMirror(run, bucket) as mirror:
        mirror.start()
        for step in (2, 3):
            save(run, step)
            mirror.request()
            wait_for(lambda step=step: f"checkpoints/{step}.complete" in bucket.sizes())
    assert {name for name in bucket.sizes() if "/" not in name} == {"metrics.jsonl", "sessions.jsonl"}
    assert fetch_run(bucket, elsewhere) == f"fetched from {address}: step 3"
    assert checkpoints_of(elsewhere) == {k: v for k, v in checkpoints_of(run).items() if k.startswith("3/")}
    assert metrics_of(elsewhere.path) == metrics_of(run.path) and elsewhere.has_settings
    assert fetch_run(bucket, elsewhere) == ""


# aiohttp warns of gcsfs's large requests.
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_every_byte_of_a_file_arrives_in_the_bucket(run: RunDirectory, address: str) -> None:
    ends = b"", b"\r", b"\n", b"\r\n", b"\r\r", b"\n--==0==--", b"\r\n--==0==\n\nmore"
    contents = {f"{n}-{size}": bytes(size) + ends[n] for n in range(len(ends)) for size in (0, MULTIPART_BYTES)}
    for name, content in contents.items():
        (run.checkpoints_dir / "1" / "state" / name).write_bytes(content)
    bucket = Bucket(address)
    with RunMirror(run, bucket) as mirror:
        mirror.start()
    assert complete_steps(bucket, bucket.sizes()).keys() == {1}
    for name, content in contents.items():
        bucket.write("written", content)
        assert bucket.read("written") == bucket.read(f"checkpoints/1/state/{name}") == content, name


def test_files_with_unusual_names_are_copied_fetched_and_deleted(run, address, tmp_path) -> None:
    names = (
        "a b",
        "#",
        "x#1",
        "%41",
        "a%2Fb",
        "+",
        "&=",
        "é",
        "漢",
        "🎉",
        ".hidden",
        "[a]",
        "*",
        "?",
        "'\"",
        "\\",
        ":",
        "~",
    )
    for name in names:
        (run.checkpoints_dir / "1" / "state" / name).write_bytes(os.urandom(random.randrange(3)))
    place, elsewhere = f"{address}/my runs [1] #2 %20+é", RunDirectory(tmp_path / "elsewhere")
    with RunMirror(run, bucket := Bucket(f"{place}/run")) as mirror:
        mirror.start()
    fetch_run(bucket, elsewhere)
    assert checkpoints_of(elsewhere) == checkpoints_of(run) and len(checkpoints_of(run)) == len(PARTS + names)
    assert Bucket(place).run_names("r*") == ["run"]
    save(run, 2)
    shutil.rmtree(run.checkpoints_dir / "1")
    with RunMirror(run, bucket) as mirror:
        mirror.start()
    kept = {f"checkpoints/2/{part}" for part in PARTS} | {"checkpoints/2.complete"}
    assert bucket.sizes().keys() == {*kept, "metrics.jsonl", "sessions.jsonl"}


def test_a_fetch_ignores_objects_that_are_not_files_of_a_run(run, address, tmp_path) -> None:
    with RunMirror(run, bucket := Bucket(address)) as mirror:
        mirror.start()
    # With such objects, web consoles make folders.
    for name in ("", "eval/", "checkpoints/", "checkpoints/1/"):
        bucket.write(name, b"")
    if address.startswith("s3"):  # The server of gs refuses them.
        for name in ("eval/../../outside", "checkpoints/1/../../../outside"):
            bucket.write(name, b"x")
    fetch_run(bucket, elsewhere := RunDirectory(tmp_path / "elsewhere"))
    assert checkpoints_of(elsewhere) == checkpoints_of(run) and not [*tmp_path.rglob("outside")]


# aiohttp warns of gcsfs's large requests.
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_large_file_may_grow_while_it_is_copied(run, address, caplog) -> None:
    run.metrics_path.write_bytes(bytes(MULTIPART_BYTES))
    has_ended = threading.Event()

    def grow() -> None:
        while not has_ended.wait(0.0005):
            with run.metrics_path.open("ab") as file:
                file.write(b"{}\n")

    thread = threading.Thread(target=grow)
    with RunMirror(run, bucket := Bucket(address)) as mirror:
        thread.start()
        try:
            mirror.start()
            wait_for(lambda: "checkpoints/1.complete" in bucket.sizes())
        finally:
            has_ended.set()
            thread.join()
    assert bucket.read("metrics.jsonl") == run.metrics_path.read_bytes()
    assert "cannot be written" not in caplog.text


def test_the_time_to_download_many_small_objects_is_not_limited_by_their_sizes(address, tmp_path, monkeypatch) -> None:
    bucket = Bucket(address)
    for name in range(20):
        bucket.write(str(name), b"")
    sizes = bucket.sizes()
    monkeypatch.setattr(bucket_module, "TIMEOUT_S", 0.01)
    bucket.download(sizes, tmp_path / "fetched")
    assert len([*(tmp_path / "fetched").iterdir()]) == 20


def test_a_download_that_is_cut_is_started_again(address, tmp_path, monkeypatch) -> None:
    library, cuts = get_filesystem_class(address.partition("://")[0]), iter(range(2))
    get_file = library._get_file

    async def cut(self: Any, source: str, target: str, **options: Any) -> None:
        if next(cuts, None) is not None:
            raise ClientPayloadError
        await get_file(self, source, target, **options)

    monkeypatch.setattr(library, "_get_file", cut)
    bucket = Bucket(address)
    bucket.write("file", b"content")
    bucket.download(bucket.sizes(), tmp_path)
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_file_that_was_not_stored_whole_is_sent_again(run, address, monkeypatch, caplog) -> None:
    bucket, upload, name = Bucket(address), Bucket.upload, f"checkpoints/1/{PARTS[2]}"

    def upload_in_part(self: Bucket, source: Path, target: str) -> None:
        upload(self, source, target)
        if target == name and "not stored whole" not in caplog.text:
            self.write(name, b"cut")

    monkeypatch.setattr(Bucket, "upload", upload_in_part)
    with RunMirror(run, bucket) as mirror:
        mirror.start()
    assert f"cannot be written (OSError: {name}: not stored whole); " in caplog.text
    assert complete_steps(bucket, bucket.sizes()).keys() == {1}


def test_a_run_that_does_not_fit_on_the_disk_is_not_fetched(run, address, tmp_path, monkeypatch) -> None:
    bucket, elsewhere = Bucket(address), RunDirectory(tmp_path / "elsewhere")
    with RunMirror(run, bucket) as mirror:
        mirror.start()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(InputError, match=r"takes 0.1 MiB, but only 97.7 KiB are free on the disk of .*elsewhere"):
        fetch_run(bucket, elsewhere)
    assert not elsewhere.path.exists()


def test_only_one_process_at_a_time_mirrors_a_run(run: RunDirectory, address: str) -> None:
    with RunMirror(run, Bucket(address)) as first:
        with pytest.raises(InputError, match="is being written by another process, on "):
            RunMirror(run, Bucket(address)).__enter__()
        # Another process may have started before the first one renewed its lease; a renewal at this very moment would
        # replace the other lease, so it is written until it is seen.
        other = Bucket(address)
        with pytest.raises(LeaseLostError, match="on vm-2, has started to write"):
            wait_for(lambda: other.write(LEASE, b'{"owner": "another", "host": "vm-2"}') or first.request())
        with pytest.raises(LeaseLostError, match="on vm-2"):
            first.__exit__(None, None, None)
    # The process that held the lease is gone.
    with pytest.raises(LeaseLostError, match="another process has written"), RunMirror(run, Bucket(address)):
        # Another process may write and end while this one is cut off.
        for _ in range(10):
            other.delete(LEASE)
            time.sleep(0.2)
    assert LEASE not in Bucket(address).sizes()


# The server of gs answers one request at a time.
@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_a_lease_is_renewed_while_a_slow_upload_takes_longer(run, server, address) -> None:
    (run.path / "large").write_bytes(bytes(900_000))
    network = Network(server[1])
    with RunMirror(run, bucket_behind(network, server[0], address)) as mirror:
        network.delay_s = 2.0
        mirror.start()
        with pytest.raises(InputError, match="is being written by another process, on "):
            RunMirror(run, Bucket(address)).__enter__()
        assert "large" not in Bucket(address).sizes()
        network.delay_s = 0.0
    network.close()


def test_a_slow_copy_is_completed_although_the_run_deletes_its_checkpoints_meanwhile(
    run, server, address, caplog
) -> None:
    network, bucket = Network(server[1]), Bucket(address)
    with RunMirror(run, bucket_behind(network, server[0], address)) as mirror:
        network.delay_s = 0.5
        mirror.start()
        for step in itertools.count(2):
            save(run, step)
            mirror.request()
            # The first checkpoint existed before the mirror started.
            if {*complete_steps(bucket, bucket.sizes())} - {1, *run.checkpoint_steps}:
                break
        network.delay_s = 0.0
    assert f"{address} falls behind: the checkpoint of step " in caplog.text
    assert complete_steps(bucket, bucket.sizes()).keys() == set(run.checkpoint_steps)
    network.close()


def test_a_continued_run_uploads_only_the_files_that_its_copy_lacks(run, address, monkeypatch) -> None:
    bucket, sent, upload = Bucket(address), [], Bucket.upload
    save(run, 2)
    for step in (2, 3):
        with RunMirror(run, bucket) as mirror:
            mirror.start()
        if step == 2:
            monkeypatch.setattr(Bucket, "upload", lambda *arguments: (sent.append(arguments[2]), upload(*arguments)))
            # The response to the deletion was lost.
            bucket.delete("checkpoints/1.complete")
            save(run, 3)
    assert {name.split("/")[1] for name in bucket.sizes() if "/" in name} == {"2", "2.complete", "3", "3.complete"}
    assert sorted({*sent} - {"metrics.jsonl", "sessions.jsonl"}) == [f"checkpoints/3/{part}" for part in PARTS]


def test_an_interrupted_fetch_is_completed_by_the_next_one(run, address, tmp_path, monkeypatch) -> None:
    bucket, elsewhere, download = Bucket(address), RunDirectory(tmp_path / "elsewhere"), Bucket.download
    save(run, 2)
    with RunMirror(run, bucket) as mirror:
        mirror.start()

    def cut(self: Bucket, sizes: dict[str, int], folder: Path) -> None:
        download(self, sizes, folder)
        name = list(sizes)[-1]
        os.truncate(folder / name, sizes[name] // 2)
        raise OSError("cut")

    for number in range(2):
        calls = iter([download] * number + [cut])
        monkeypatch.setattr(Bucket, "download", lambda *arguments, calls=calls: next(calls)(*arguments))
        with pytest.raises(InputError, match="cannot be fetched"):
            fetch_run(bucket, elsewhere)
        assert not elsewhere.has_checkpoint and elsewhere.metrics_path.exists() == bool(number)
        check_run_directory(elsewhere, "auto")
    monkeypatch.undo()
    assert fetch_run(bucket, elsewhere) == f"fetched from {address}: step 2"
    assert checkpoints_of(elsewhere) == {k: v for k, v in checkpoints_of(run).items() if k.startswith("2/")}
    assert not (elsewhere.path / FETCHED).exists()


def test_a_damaged_checkpoint_on_the_disk_is_replaced_by_its_copy(run, address) -> None:
    save(run, 2)
    expected, damaged = checkpoints_of(run), run.checkpoints_dir / "2" / PARTS[1]
    with RunMirror(run, bucket := Bucket(address)) as mirror:
        mirror.start()
    os.truncate(damaged, 0)
    assert fetch_run(bucket, run) == f"fetched from {address}: step 2"
    assert checkpoints_of(run) == expected
    # If its size is unchanged, only a restore finds the damage.
    damaged.write_bytes(bytes(50_000))
    assert fetch_run(bucket, run) == "" and replace_checkpoint(bucket, run, 2)
    assert {k: v for k, v in checkpoints_of(run).items() if "damaged" not in k} == expected
    assert not replace_checkpoint(bucket, run, 3)


def test_only_the_newest_the_best_or_a_named_checkpoint_is_fetched(run, address, tmp_path) -> None:
    for step in (2, 3):
        shutil.copytree(run.checkpoints_dir / "1", run.checkpoints_dir / str(step))
    (run.path / BEST).symlink_to("1")
    with RunMirror(run, bucket := Bucket(address)) as mirror:
        mirror.start()
    for steps, expected in (((2,), {2}), ((), set()), (None, {1, 3})):
        elsewhere = RunDirectory(tmp_path / f"for {steps}")
        fetch_run(bucket, elsewhere, steps=steps)
        assert {*elsewhere.checkpoint_steps} == expected and elsewhere.has_settings
    assert (elsewhere.path / BEST).readlink() == Path("1")
    # The newest alone is not all that a run continues from.
    fetch_run(bucket, named := RunDirectory(tmp_path / "named"), steps=(3,))
    fetch_run(bucket, named)
    assert {*named.checkpoint_steps} == {1, 3}


def test_a_fetch_leaves_the_lines_of_a_directory_that_is_ahead(run, address) -> None:
    save(run, 2)
    with RunMirror(run, bucket := Bucket(address)) as mirror:
        mirror.start()
    for step in (3, 4):
        save(run, step)
    lines = run.metrics_path.read_bytes()
    fetch_run(bucket, run, steps=(2,))
    assert {*run.checkpoint_steps} == {2, 3, 4} and run.metrics_path.read_bytes() == lines
    assert replace_checkpoint(bucket, run, 2) and run.metrics_path.read_bytes() == lines


def test_a_checkpoint_that_is_deleted_during_a_fetch_is_replaced_by_a_newer_one(
    run, address, tmp_path, monkeypatch
) -> None:
    bucket, elsewhere, download = Bucket(address), RunDirectory(tmp_path / "elsewhere"), Bucket.download

    def download_late(self: Bucket, sizes: dict[str, int], folder: Path) -> None:
        if any(name.startswith("checkpoints/1/") for name in sizes):
            save(run, 2)
            shutil.rmtree(run.checkpoints_dir / "1")
            mirror.request()
            wait_for(lambda: "checkpoints/2.complete" in bucket.sizes() and not bucket.sizes("checkpoints/1"))
        download(self, sizes, folder)

    with RunMirror(run, Bucket(address)) as mirror:
        mirror.start()
        wait_for(lambda: "checkpoints/1.complete" in bucket.sizes())
        monkeypatch.setattr(Bucket, "download", download_late)
        assert fetch_run(bucket, elsewhere) == f"fetched from {address}: step 2"


def test_fetching_a_run_over_another_run_is_refused(run, address, tmp_path) -> None:
    other = RunDirectory(tmp_path / "other")
    other.path.mkdir()
    other.sessions_path.write_text('{"started": "later"}\n')
    with RunMirror(run, bucket := Bucket(address)) as mirror:
        mirror.start()
    for step in (1, 5):
        with pytest.raises(
            InputError, match=r"^run\.dir: .* and .*other hold different runs; choose another run\.name, or"
        ):
            fetch_run(bucket, other)
        save(other, step)


def test_a_run_that_is_started_over_replaces_its_copy(run, address) -> None:
    shutil.rmtree(run.checkpoints_dir)
    (run.path / "rollouts").mkdir()
    (run.path / "rollouts" / "1").touch()
    for start in (1, 2):
        run.sessions_path.write_text(f'{{"started": {start}}}\n')  # of equal size
        assert fetch_run(Bucket(address), run) == ""
        with RunMirror(run, Bucket(address)) as mirror:
            mirror.start()
        shutil.rmtree(run.path / "rollouts", ignore_errors=True)
    assert Bucket(address).read("sessions.jsonl") == run.sessions_path.read_bytes()
    assert Bucket(address).sizes().keys() == {"sessions.jsonl", "metrics.jsonl"}


def test_a_growing_file_is_sent_less_often_the_larger_it_is(run, address, monkeypatch) -> None:
    sent, upload = [], Bucket.upload
    monkeypatch.setattr(Bucket, "upload", lambda *arguments: (sent.append(arguments[2]), upload(*arguments)))
    monkeypatch.setattr(run_mirror, "GROWTH_BYTES_PER_S", 0.1)
    with RunMirror(run, bucket := Bucket(address)) as mirror:
        mirror.start()
        wait_for(lambda: "checkpoints/1.complete" in bucket.sizes())
        before = bucket.sizes()["metrics.jsonl"]
        for step in (2, 3):
            with run.metrics_path.open("a") as file:
                file.write(f'{{"step": {step}}}\n')
            (run.path / f"new{step}").touch()
            mirror.request()
            wait_for(lambda step=step: f"new{step}" in bucket.sizes())
        assert bucket.sizes()["metrics.jsonl"] == before and sent.count("metrics.jsonl") == 1
    assert bucket.read("metrics.jsonl") == run.metrics_path.read_bytes()


def test_a_stalled_connection_is_given_up(run, server, address, monkeypatch, caplog) -> None:
    network = Network(server[1])
    with RunMirror(run, bucket_behind(network, server[0], address)) as mirror:
        # Not for other requests: looking for an account takes longer, and so may an emulator that is stalled, too.
        with monkeypatch.context() as short:
            short.setattr(bucket_module, "TIMEOUT_S", 2.0)
            network.is_stalled = True
            mirror.start()
            wait_for(lambda: "cannot be written" in caplog.text)
            network.is_stalled = False
        wait_for(lambda: "checkpoints/1.complete" in Bucket(address).sizes())
    assert network.num_stalls and "can be written again" in caplog.text
    network.close()


@pytest.mark.parametrize("server", ["s3"], indirect=True)
@pytest.mark.parametrize(
    "error",
    [
        HttpError({"code": 503, "message": "busy"}),
        translate_boto_error(ClientError({"Error": {"Code": "SlowDown"}}, "PutObject")),
        translate_boto_error(ClientError({"Error": {"Code": "InternalError"}}, "PutObject")),
    ],
)
def test_a_busy_server_is_no_fault_of_the_settings(error: Exception, address: str) -> None:
    with pytest.raises(BucketUnreachableError, match="start again"), Bucket(address).explain_failure("read"):
        raise error


@pytest.mark.slow
def test_cut_connections_leave_no_partial_checkpoint(run, server, address, tmp_path):
    network, steps = Network(server[1]), random.Random(0)
    with RunMirror(run, bucket_behind(network, server[0], address)) as mirror:
        mirror.start()
        for step in itertools.count(2):
            if network.num_faults > 5 and step > 8:
                break
            network.fault_rate = steps.choice([0.05, 0.1, 0.2])
            save(run, step)
            mirror.request()
            time.sleep(steps.random())
            # If the machine failed now, every checkpoint in the bucket would be complete.
            network.fault_rate = 1.0
            time.sleep(0.1)
            kept, bucket = RunDirectory(tmp_path / f"kept{step}"), Bucket(address)
            fetch_run(bucket, kept, steps=complete_steps(bucket, bucket.sizes()))
            for found in kept.checkpoint_steps:
                for path in (kept.checkpoints_dir / str(found) / "state" / "d").iterdir():
                    assert path.read_bytes() == random.Random(f"{found} state/d/{path.name}").randbytes(50_000)
        network.fault_rate = 0.0
    whole = RunDirectory(tmp_path / "whole")
    fetch_run(Bucket(address), whole, steps=run.checkpoint_steps)
    assert checkpoints_of(whole) == checkpoints_of(run)
    network.close()


def test_an_unusable_bucket_gives_one_error_before_jax_is_loaded(server, in_folder: None, tmp_path: Path) -> None:
    nowhere = f"{server[0]}://nowhere/folder"
    # Without a name, runs are listed first, where s3fs 2025.3 finds none in a bucket that does not exist.
    unnamed = "( |/quickstart-seed0 )cannot be read(, written and cleared)?"
    for overrides, what in ((("run.name=x",), "/x cannot be read, written and cleared"), ((), unnamed)):
        result = here("train", *settings(f"run.dir={nowhere}", *overrides))
        assert result.exit_code == 2 and result.stderr.count("\n") == 1 and not any(tmp_path.iterdir())
        assert re.match(rf"error: run\.dir: {nowhere}{what} \(FileNotFoundError: ", result.stderr), result.stderr
        assert "); check that the bucket exists and that this machine's account has access" in result.stderr


def test_a_bucket_without_write_permission_gives_one_error(in_folder: None, tmp_path: Path) -> None:
    with bucket_server("s3") as url, reader_of(url):
        result = here("train", *settings("run.dir=s3://bucket/folder", "run.name=x"))
    message = (
        "error: run.dir: s3://bucket/folder/x cannot be read, written and cleared (PermissionError: Access Denied); "
    )
    assert result.exit_code == 2 and result.stderr.startswith(message), result.stderr
    assert result.stderr.count("\n") == 1 and not any(tmp_path.iterdir())


def test_a_bucket_in_which_nothing_may_be_deleted_gives_an_error(run: RunDirectory) -> None:
    message = re.escape("s3://bucket/x cannot be read, written and cleared (PermissionError: Access Denied)")
    with (
        bucket_server("s3") as url,
        reader_of(url, "s3:PutObject"),
        pytest.raises(InputError, match=message),
    ):
        Bucket("s3://bucket/x").check("auto", run)


def test_an_unreachable_server_of_accounts_is_an_error_of_the_network(address: str) -> None:
    with pytest.raises(BucketUnreachableError), Bucket(address).explain_failure("read"):
        raise TransportError


@pytest.mark.parametrize(("package", "place", "extra"), [("s3fs", "s3://a", "s3"), ("gcsfs", "gs://a", "gcs")])
def test_error_about_a_missing_bucket_library_names_the_extra(
    package: str, place: str, extra: str, tmp_path: Path
) -> None:
    without = "-c", f"import sys; sys.modules['{package}'] = None; import cli; cli.main()"
    with started("train", *settings(f"run.dir={place}"), cwd=tmp_path, program=without) as process:
        _, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2 and error.count("\n") == 1 and not any(tmp_path.iterdir())
    assert error.startswith(f"error: run.dir: {place} cannot be opened without the package {package}; ")
    assert error.endswith(f"; run pip install 'grpo-jax[{extra}]'\n")


def test_a_derived_run_name_considers_runs_in_the_bucket(address: str) -> None:
    def name(resume: Resume, *overrides: str) -> str | None:
        return name_run(load(None, [f"run.dir={address}", *overrides], {}), resume).settings.run.name

    first = "quickstart-seed0"
    assert (name("never"), name("auto")) == (first, first)
    for run in (first, f"{first}-3", f"{first}-best", f"{first}0"):
        Bucket(f"{address}/{run}").write("sessions.jsonl", b"{}")
    assert (name("never"), name("auto"), name("never", "run.seed=1")) == (
        f"{first}-4",
        f"{first}-3",
        "quickstart-seed1",
    )


@pytest.mark.slow
def test_doctor_checks_access_to_the_bucket_and_its_lease(
    config: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(place: str) -> tuple[str, str]:
        result = here("doctor", "--json", "--config", config, *settings(f"run.dir={place}", "run.name=x"))
        (check,) = (check for check in json.loads(result.stdout)["checks"] if check["check"] == "bucket")
        return check["verdict"], check["found"]

    monkeypatch.chdir(config.parent)
    bucket = Bucket(f"{address}/x")
    assert found(address) == ("ok", f"{bucket.address} can be written to, and no other process writes there")
    bucket.write("sessions.jsonl", b"{}")
    assert found(address) == ("warn", f"{bucket.address} already holds a run")
    with RunMirror(RunDirectory(config.parent / "run"), bucket):
        verdict, text = found(address)
        assert verdict == "fail" and "is being written by another process, on " in text
    assert found(f"{address.partition('://')[0]}://nowhere")[0] == "fail"
    assert not (config.parent / "runs").exists()


@pytest.mark.two_hosts
def test_a_bucket_that_does_not_exist_gives_one_error_on_all_hosts(config: Path, server: tuple[str, str]) -> None:
    hosts = run_on_two_hosts("train", "--config", config, *settings(f"run.dir={server[0]}://nowhere"))
    assert [host.exit_code for host in hosts] == [2, 2], hosts
    errors = [[line for line in host.stderr.splitlines() if line.startswith("error: ")] for host in hosts]
    message = f"run.dir: {server[0]}://nowhere/tiny cannot be read, written and cleared (FileNotFoundError: "
    assert [len(lines) for lines in errors] == [1, 1] and all(message in lines[0] for lines in errors)
    assert "on host 0 (" in errors[1][0]


@pytest.mark.two_hosts
@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_all_hosts_wait_for_the_end_of_the_copy_to_the_bucket(
    config: Path, server: tuple[str, str], address: str
) -> None:
    network, run = Network(server[1]), RunDirectory(config.parent / "runs" / address.replace("://", "/") / "tiny")
    # JAX waits only this long for a host that ends later.
    hurry = "from app.mesh import jax_startup; jax_startup.SHUTDOWN_TIMEOUT_S = 2\n"
    first, second = (("-c", f"{hurry}{code}") for _, code in (HOSTS_PROGRAM, blind_host(config.parent / "runs")))
    apart = ("rollout.scheduler=adaptive", "rollout.max_staleness=1", "rollout.devices=0.5", "mesh.shape=1,4,1")
    (config.parent / "runs").mkdir()
    overrides = settings("run.steps=1", *UNJUDGED, *apart, f"run.dir={address}")
    with (
        reached_at(server[0], network.url),
        two_hosts("train", "--config", config, *overrides, programs=(first, second), cwd=config.parent) as hosts,
    ):
        wait_until(hosts[0], lambda: run.sessions_path.exists())
        network.fault_rate = 1.0
        wait_until(hosts[0], lambda: run.has_checkpoint)
        time.sleep(8.0)
        network.fault_rate = 0.0
        found = ended(hosts)
    assert [host.exit_code for host in found] == [0, 0], found
    assert complete_steps(Bucket(f"{address}/tiny"), Bucket(f"{address}/tiny").sizes()).keys() == {1}


@pytest.mark.slow
def test_a_run_continues_from_its_copy_on_an_empty_disk(config, address, monkeypatch):
    chosen = ("run.steps=5", "checkpoint.every_steps=1", "eval.every_steps=0", "checkpoint.keep=9")
    whole = config.parent / "whole"
    succeeded(here("train", "--config", config, *settings(*chosen, f"run.dir={whole}", "run.name=x")))
    for place, steps, resume in (("one", 2, "never"), ("two", 4, "must")):
        (config.parent / place).mkdir()
        monkeypatch.chdir(config.parent / place)
        overrides = settings(*chosen, f"run.steps={steps}", f"run.dir={address}", "run.name=x")
        dry = here("train", "--config", config, "--resume", "must", "--dry-run", *overrides)
        if resume == "must":
            succeeded(dry)
        else:
            assert dry.exit_code == 2 and f"/x nor {address}/x has a complete checkpoint; use --res" in dry.stderr
        assert not Path("runs").exists()
        result = succeeded(here("train", "--config", config, "--resume", resume, *overrides))
    assert f"fetched from {address}/x: step 2" in result.stderr
    run = Path("runs", *address.split("://"), "x").absolute()
    # The machine is reset: its disk keeps the size of the newest checkpoint's files, and loses their content.
    damaged = max(
        (run / "checkpoints" / "4" / "state").rglob("*"), key=lambda path: path.is_file() * path.stat().st_size
    )
    damaged.write_bytes(bytes(damaged.stat().st_size))
    overrides = settings(*chosen, f"run.dir={address}", "run.name=x")
    result = succeeded(here("train", "--config", config, "--resume", "auto", *overrides))
    assert "continuing after step 4" in result.stderr and (run / "checkpoints" / "damaged-4").is_dir()
    assert_same_run(run, whole / "x", step=5)
    # The run was killed after its last step, before the copy was complete.
    Bucket(f"{address}/x").delete("checkpoints/5.complete")
    succeeded(here("train", "--config", config, "--resume", "auto", *overrides))
    bucket = Bucket(f"{address}/x")
    assert 5 in complete_steps(bucket, bucket.sizes())
    again = here("train", "--config", config, *settings(*chosen, f"run.dir={address}", "run.name=x"))
    assert again.exit_code == 2 and f"{address}/x already holds a run" in again.stderr
