"""Tests the properties that two hosts must share, and that an error on one host ends both."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.distributed.host_consistency import HostFact, describe_difference
from app.model.architecture import Architecture
from app.records.run_directory import RunDirectory
from app.records.versions import code_digest
from app.runtime.mesh_checks import check_tp_divides_heads, replicated_dim_notes
from settings.errors import InputError
from tests.program import digest_of, settings
from tests.tiny import EVEN, make_mesh
from tests.two_hosts import KEEPING, run_on_two_hosts

HOSTS = ("host 0 (a)", "host 1 (b)", "host 2 (c)")


def test_error_about_differing_hosts_lists_values_and_origins():
    same = {"rollout.group_size": HostFact("8", "--set")}, {"rollout.group_size": HostFact("8", "env:NUM_PRE_Q")}
    assert describe_difference(HOSTS[:2], same) is None
    text = describe_difference(
        HOSTS,
        [
            {"a": HostFact("1"), "rollout.group_size": HostFact("8", "--set"), "run.seed": HostFact("0")},
            {"a": HostFact("1"), "rollout.group_size": HostFact("4", "env:NUM_PRE_Q"), "run.seed": HostFact("1")},
            {"a": HostFact("1"), "rollout.group_size": HostFact("8", "--set"), "run.seed": HostFact("0")},
        ],
    )
    assert text is not None
    assert text.startswith(
        "rollout.group_size: the hosts differ: 8 (from --set) on host 0 (a), host 2 (c); "
        "4 (from env:NUM_PRE_Q) on host 1 (b) (they also differ in run.seed). Start the same command"
    )
    told = describe_difference(HOSTS[:2], [{"critic": HostFact("x" * 500)}, {}])
    assert told is not None
    assert "missing on host 1 (b)" in told
    assert f"{'x' * 117}... on host 0 (a)" in told


def test_the_code_digest_depends_only_on_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("cli.py", "app/commands/train.py", "app/records/sample.py", "settings/schema/settings.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert code_digest() == code_digest()
    monkeypatch.setattr("app.records.versions.SOURCE_ROOT", tmp_path)
    before = code_digest()
    (tmp_path / "app" / "flow.py").write_text("another flow")
    assert code_digest() != before


def test_the_newest_checkpoint_has_the_highest_step(tmp_path: Path):
    run = RunDirectory(tmp_path)
    assert run.describe_newest_checkpoint() == "none"
    for name in ("8", "10", "damaged-12", "best"):
        (run.checkpoints_dir / name).mkdir(parents=True)
    assert run.describe_newest_checkpoint() == "step 10"


def test_tp_must_divide_query_heads_and_uneven_key_heads_are_noted():
    # Six query heads on two kv heads.
    check_tp_divides_heads(make_mesh((1, 2, 2)), grouped(6, 2), path="model")
    check_tp_divides_heads(make_mesh((1, 1, 3)), grouped(6, 2), path="model")
    message = r"tp = 4 divides neither the 6 query heads nor the 2 kv heads of model; set tp to .* 3 or 6"
    with pytest.raises(InputError, match=message):
        check_tp_divides_heads(make_mesh((1, 2, 4)), grouped(6, 2), path="model")
    assert replicated_dim_notes(make_mesh((1, 8, 1)), grouped(6, 2)) == ()
    notes = replicated_dim_notes(make_mesh((1, 1, 3)), grouped(6, 2))
    assert notes[0].startswith("mesh.shape: tp = 3 does not divide the 2 kv heads, so every device holds them all")
    assert notes[0].endswith("the nearest tp that does: 2")


def grouped(num_query_heads: int, num_kv_heads: int) -> Architecture:
    return replace(EVEN, num_query_heads=num_query_heads, num_kv_heads=num_kv_heads)


IN_TURN = """
import json, os, sys
from pathlib import Path

host, other, joins = int(os.environ["THIS_HOST"]), Path(sys.argv[1]), sys.argv[3::2]
os.environ["HOME"] = str(other / str(host))

import jax, numpy as np
from app.mesh.device_mesh import make_mesh
from app.mesh.jax_startup import initialize_distributed
from app.mesh.placement import check_tp_within_hosts, row_sharding, to_global, to_local
from app.distributed.host_consistency import check_hosts_agree
from app.distributed.host_files import sees_folder
from app.distributed.collectives import error_barrier
from settings import load
from settings.errors import InputError
from tests.two_hosts import hide

resolved = load(None, joins, {})
initialize_distributed(resolved.settings.mesh)
report = {}

def note(name, look):
    try:
        report[name] = look()
    except InputError as error:
        report[name] = f"refused: {error}"
    except Exception as error:
        report[name] = f"{type(error).__name__}: {error}"

def fail_there(error):
    with error_barrier():
        if host == 1 and error:
            raise error
    return host

def rows_of(shape):
    mesh = make_mesh(resolved.settings.mesh.model_copy(update={"shape": shape}))
    check_tp_within_hosts(mesh)
    own = np.arange(8) + 8 * host
    assert to_local(to_global(mesh, own)).tolist() == own.tolist()
    numbers = jax.jit(lambda: jax.numpy.arange(16), out_shardings=row_sharding(mesh))()
    return [dict(mesh.shape), to_local(numbers).tolist()]

note("same", lambda: check_hosts_agree(resolved, {"data": "abc"}))
note("data", lambda: check_hosts_agree(resolved, {"data": f"abc{host}"}))
note("one fails", lambda: fail_there(InputError("model.path: no such folder")))
note("one has a bug", lambda: fail_there(KeyError("x")))
note("none fails", lambda: fail_there(None))
note("seen", lambda: sees_folder(other / "runs" / "new"))
if host == 1:
    hide(str(other / "0"))
note("hidden", lambda: sees_folder(other / "0" / "runs" / "new"))
for shape in ("2,4,1", "1,-1,1", "2,2,2", "1,2,4", "auto", "1,1,8"):
    note(shape, lambda: rows_of(shape))
Path(other / f"report{host}.json").write_text(json.dumps(report))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the errors that each of two hosts reports, check by check."""
    folder, program = tmp_path_factory.mktemp("hosts"), ("-c", KEEPING + IN_TURN)
    for host in ("0", "1"):
        (folder / host).mkdir()
    hosts = run_on_two_hosts(folder, programs=(program, program))
    assert [host.exit_code for host in hosts] == [0, 0], hosts
    assert sorted(path.name for path in folder.rglob("*")) == ["0", "1", "report0.json", "report1.json"]
    return [json.loads((folder / f"report{host}.json").read_text()) for host in (0, 1)]


@pytest.mark.two_hosts
def test_error_on_both_hosts_names_their_differing_data(reports):
    assert [one["same"] for one in reports] == [None, None], "whatever their numbers and homes"
    assert reports[0]["data"] == reports[1]["data"]
    assert reports[0]["data"].startswith("refused: data: the hosts differ: abc0 on host 0 (")
    assert "; abc1 on host 1 (" in reports[0]["data"]


@pytest.mark.two_hosts
def test_an_error_on_one_host_is_raised_on_both(reports):
    assert reports[0]["one fails"].startswith("refused: on host 1 (")
    assert reports[0]["one fails"].endswith("): model.path: no such folder")
    assert reports[1]["one fails"] == "refused: model.path: no such folder"
    assert reports[0]["one has a bug"].startswith("RuntimeError: on host 1 (")
    assert reports[0]["one has a bug"].endswith("): KeyError: 'x'")
    assert reports[1]["one has a bug"] == "KeyError: 'x'"
    assert [one["none fails"] for one in reports] == [0, 1]


@pytest.mark.two_hosts
def test_each_host_knows_whether_it_and_all_hosts_see_a_folder(reports):
    seen, hidden = [True, True], [True, False]
    assert [(one["seen"], one["hidden"]) for one in reports] == [(seen, hidden), (seen, [False, False])]


SHAPES = {"2,4,1": (2, 4, 1), "1,-1,1": (1, 8, 1), "2,2,2": (2, 2, 2), "1,2,4": (1, 2, 4), "auto": (2, 4, 1)}


@pytest.mark.two_hosts
def test_each_host_holds_a_contiguous_part_of_the_rows_in_host_order(reports):
    for shape, sizes in SHAPES.items():
        named = dict(zip(("dp", "fsdp", "tp"), sizes, strict=True))
        assert reports[0][shape] == [named, list(range(8))]
        assert reports[1][shape] == [named, list(range(8, 16))]
    for one in reports:
        assert one["1,1,8"].startswith("refused: mesh.shape: tp = 8 spans hosts 0 and 1 with 4 devices each")


@pytest.mark.two_hosts
def test_hosts_with_different_settings_exit_before_anything_is_written(config: Path):
    before = digest_of(config.parent)
    hosts = run_on_two_hosts(
        *("train", "--config", config, "--dry-run", *settings("mesh.expect_processes=2", "mesh.start_timeout_s=60")),
        of_each=((), settings("optimizer.learning_rate=2e-3")),
        # gRPC would try forever to reach the other host through this proxy.
        environ={"http_proxy": "http://proxy.invalid:3128"},
    )
    for code, stdout, stderr in hosts:
        assert code == 2
        assert stderr.count("warning: http_proxy is set; hosts connect to 127.0.0.1 without a proxy") == 1
        assert "Traceback" not in stderr and "Check failure" not in stderr
        errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
        (error,) = errors
        assert error.startswith("error: optimizer.learning_rate: the hosts differ: 0.001 (from yaml:")
        assert "0.002 (from --set) on host 1 (" in error
        assert "mesh" not in stdout
    assert digest_of(config.parent) == before
