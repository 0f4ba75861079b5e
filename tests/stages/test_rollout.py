"""Tests of `grpo rollout`: its samples and timeline, and how a killed one continues."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.checkpoint.saved_policy import PolicyCheckpoint, read_policy_source
from app.records.identity import Identity
from app.records.partial_samples import PartFile, PartialSamples
from app.report.matplotlib_figures import check_picture_path
from app.rollout.scheduling.schedule_metrics import Span
from app.runtime.model_spec import ModelSpec, read_model_spec
from app.stages.rollout import rollout_identity
from app.stages.rollout_timeline import SUPPORTED_SUFFIXES, Timeline, render_timeline, write_timeline
from app.training.inputs import read_training_inputs
from settings import Settings, load
from settings.errors import InputError
from tests.program import DEADLINE_S, NUM_DEVICES, digest_of, here, of_tiny, records_of, settings, started, wait_until


def test_limit_counts_prompts(sampled: Path) -> None:
    records = records_of(sampled)
    assert len({record["uid"] for record in records}) == len(records) == 24
    assert [record["group_id"] for record in records] == [group for group in range(6) for _ in range(4)]


def test_prompts_of_a_file_are_sampled_greedily(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"question": "1 + 2 = ?", "answer": "3", "level": 7}\n')
    result = here(
        *("rollout", *of_tiny(tiny_model), *settings("rollout.temperature=0")),
        *("--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "samples.jsonl"),
    )
    assert result.exit_code == 0, result.stderr
    records = records_of(tmp_path / "samples.jsonl")
    assert len(records) == 4 and len({record["completion"] for record in records}) == 1
    assert records[0]["prompt"] == "1 + 2 = ?" and records[0]["answer"] == "3"
    assert records[0]["columns"] == {"level": 7}


def test_samples_do_not_depend_on_the_prompts_of_a_round(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    # Two prompts at a time this time: what stands beside a prompt does not change its samples.
    again = tmp_path / "again.jsonl"
    arguments = [*of_tiny(tiny_model), "--limit", "6", "--out", again]
    arguments[arguments.index("rollout.prompts_per_step=4")] = "rollout.prompts_per_step=2"
    assert here("rollout", *arguments).exit_code == 0
    for record, other in zip(records_of(sampled), records_of(again), strict=True):
        assert record["completion_token_ids"] == other["completion_token_ids"]


def by_uid(path: Path) -> dict[str, dict[str, Any]]:
    return {record["uid"]: record for record in records_of(path)}


def test_checkpoint_samples_what_its_run_sampled_next(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    result = here("rollout", "--checkpoint", finished / "checkpoints" / "2", "--limit", "40", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "--checkpoint: using the settings in" in result.stderr
    samples, of_run = by_uid(out), by_uid(finished / "rollouts" / "step_000003.jsonl")
    assert len(samples) == 160 and len(of_run) == 16
    for uid, record in of_run.items():
        assert samples[uid]["completion_token_ids"] == record["completion_token_ids"]
        assert samples[uid]["policy_version"] == record["policy_version"] == 2
        np.testing.assert_allclose(samples[uid]["behavior_logprobs"], record["behavior_logprobs"], atol=1e-4)
    # Without it, the model samples as it came.
    other = tmp_path / "untrained.jsonl"
    untrained = here("rollout", "--config", finished / "settings.yaml", "--limit", "40", "--out", other)
    assert untrained.exit_code == 0, untrained.stderr
    assert {record["policy_version"] for record in records_of(other)} == {0}


def test_adapters_of_a_checkpoint_are_sampled_and_scored(adapted: Path, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    drawn = here("rollout", "--checkpoint", adapted, "--limit", "4", "--out", samples)
    assert drawn.exit_code == 0, drawn.stderr
    differences = {}
    for name, option in {"adapters": "--checkpoint", "none": "--config"}.items():
        path = adapted if option == "--checkpoint" else adapted / "settings.yaml"
        result = here("score", option, path, "--input", samples, "--out", tmp_path / f"{name}.jsonl", "--json")
        assert result.exit_code == 0, result.stderr
        differences[name] = json.loads(result.stdout)["max |logprob - behavior|"]
    assert differences["adapters"] < 1e-4 < differences["none"]


def timeline(**changes) -> Timeline:
    values = {
        "heading": "tiny: 2 workers",
        "figures": "adaptive: 4 s",
        "slots": {"fast-0": 2, "heavy-0": 1},
        "spans": (
            Span("fast-0", 0, 0.0, 1.0, "probe", "a"),
            Span("fast-0", 0, 1.0, 2.0, "probe", "a"),
            Span("fast-0", 1, 0.0, 3.0, "fast", "b"),
            Span("fast-0", -1, 2.0, 2.5, None, "a"),
            Span("heavy-0", 0, 2.5, 4.0, "heavy", "a"),
        ),
        "makespan_s": 4.0,
    }
    return Timeline(**(values | changes))


def drawn(one: Timeline) -> str:
    return render_timeline(one, kind="svg").decode()


def test_every_role_and_suspension_has_its_color() -> None:
    svg = drawn(timeline())
    for color in ("#e69f00", "#1f7fc4", "#d55e00", "#cc79a7"):
        assert svg.count(color) > drawn(timeline(spans=())).count(color)


def test_consecutive_segments_of_a_sample_are_one_bar() -> None:
    twice = timeline(spans=timeline().spans[:2])
    once = timeline(spans=(Span("fast-0", 0, 0.0, 2.0, "probe", "a"),))
    other = timeline(spans=(timeline().spans[0], timeline().spans[1]._replace(uid="b")))
    assert drawn(twice) == drawn(once) != drawn(other)


def test_page_escapes_its_heading_and_loads_nothing(tmp_path: Path) -> None:
    write_timeline(tmp_path / "a.html", timeline(heading='one <b> & "two"'))
    page = (tmp_path / "a.html").read_text()
    assert "<h1>one &lt;b&gt; &amp; &#34;two&#34;</h1>" in page
    assert page.count("<svg") == 1 and page.count("adaptive: 4 s") == 1 and "#d55e00" in page
    assert "currentColor" in page and "default-src 'none'" in page
    assert not re.findall(r"url\((?!#)|@import|<(?:script|link|iframe|object)|src=", page)


def test_suffix_chooses_png_or_html(tmp_path: Path) -> None:
    for name, head in (("a.PNG", b"\x89PNG"), ("a.html", b"<!doctype html>")):
        write_timeline(tmp_path / name, timeline())
        assert (tmp_path / name).read_bytes().startswith(head)
    with pytest.raises(InputError, match=r"--timeline: .* ending in \.png or \.html, got a\.pdf"):
        check_picture_path(Path("a.pdf"), "--timeline", SUPPORTED_SUFFIXES)


SMALL = ("data.max_prompt_length=16", "rollout.group_size=4", "rollout.max_new_tokens=48", "rollout.top_k=20")
SCHEDULED = (
    *("rollout.scheduler=adaptive", "rollout.mode=exact", "rollout.segment.min=1", "rollout.segment.max=2"),
    *("rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4", f"mesh.cpu_devices={NUM_DEVICES}"),
)
SCHEDULE_FIELDS = ("worker", "segments", "elapsed_s")
"""Fields that depend on the schedule."""


def command(model: Path, out: Path, *overrides: str, limit: int = 16) -> list[str | Path]:
    chosen = settings(f"model.path={model}", *SMALL, *overrides)
    return ["rollout", *chosen, "--limit", str(limit), "--out", out]


def content(out: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in one.items() if name not in SCHEDULE_FIELDS} for one in records_of(out)]


def facts_of(model: Path, *overrides: str) -> Identity:
    chosen = load(None, [f"model.path={model}", "rollout.scheduler=adaptive", *overrides], {}).settings
    return rollout_identity(chosen, read_model_spec(chosen), [])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with the part file of a scheduled rollout that was killed; tests must not change it."""
    folder = tmp_path_factory.mktemp("killed")
    part = folder / "samples.jsonl.part"
    with started(*command(tiny_model, folder / "samples.jsonl", *SCHEDULED)) as process:
        wait_until(process, lambda: part.exists() and part.read_bytes().count(b"\n") >= 9)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=DEADLINE_S)
    assert not (folder / "samples.jsonl").exists()
    return part


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The output of the same rollout without a kill; tests must not change it."""
    out = tmp_path_factory.mktemp("undisturbed") / "samples.jsonl"
    result = here(*command(tiny_model, out, *SCHEDULED), "--timeline", out.with_name("slots.html"))
    assert result.exit_code == 0, result.stderr
    assert {path.name for path in out.parent.iterdir()} == {"samples.jsonl", "slots.html"}
    return out


def test_killed_rollout_continues_with_the_same_samples(
    tiny_model: Path, undisturbed: Path, killed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "samples.jsonl"
    header, *lines = killed.read_bytes().splitlines(keepends=True)
    finished = [{**json.loads(line), "elapsed_s": 123.0} for line in lines if line.endswith(b"\n")]
    assert 8 <= len(finished) < 64
    # The last line is torn, as a kill in the middle of a write leaves it.
    stored = header + b"".join(json.dumps(one).encode() + b"\n" for one in finished) + lines[0][:50]
    (tmp_path / killed.name).write_bytes(stored)
    (tmp_path / ".samples.jsonl.4.partial").touch()
    result = here(*command(tiny_model, out, *SCHEDULED))
    assert result.exit_code == 0, result.stderr
    assert f"continuing: {len(finished)} of 64 samples are done" in result.stderr and "sampled before" in result.stdout
    assert content(out) == content(undisturbed)
    assert sum(record["elapsed_s"] == 123.0 for record in records_of(out)) == len(finished)
    assert {path.name for path in tmp_path.iterdir()} == {"samples.jsonl"}


def header_of(chosen: Settings, model: ModelSpec, *saved: PolicyCheckpoint | None, limit: int) -> str:
    """Returns the header of this rollout's part file."""
    prompts = read_training_inputs(chosen).prompts[:limit]
    return PartialSamples(Path(), rollout_identity(chosen, model, prompts, *saved)).header


def test_only_missing_samples_are_drawn_again(tiny_model: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "samples.jsonl", tmp_path / "whole.jsonl"
    arguments = ("rollout", "--json", *of_tiny(tiny_model), "--limit", "6", "--out")
    assert here(*arguments, whole).exit_code == 0
    records = [{**record, "elapsed_s": 123.0} for record in records_of(whole)]
    chosen = load(None, [argument for argument in of_tiny(tiny_model) if argument != "--set"], {}).settings
    header = header_of(chosen, read_model_spec(chosen).without_adapters, limit=6)
    # The last sample of the second prompt is missing, and the whole last prompt; or none, if the part was not removed.
    for missing in ((7, 20, 21, 22, 23), ()):
        stored = [json.dumps(record) for i, record in enumerate(records) if i not in missing]
        (tmp_path / "samples.jsonl.part").write_text("".join(f"{line}\n" for line in (header, *stored)))
        result = here(*arguments, out)
        assert result.exit_code == 0, result.stderr
        assert content(out) == content(whole)
        assert [record["elapsed_s"] == 123.0 for record in records_of(out)] == [i not in missing for i in range(24)]
        assert (json.loads(result.stdout)["tokens per second"] == 0) == (not missing)
        assert {path.name for path in tmp_path.iterdir()} == {"samples.jsonl", "whole.jsonl"}
        out.unlink()


UNREAD = (
    *("rollout.max_staleness=2", "rollout.max_length_total=99", "rollout.kv_blocks=64"),
    *("rollout.ray.address=auto", "rollout.devices=0.5"),
    "eval.num_prompts=3",
    "reward.on_error=zero",
    "optimizer.learning_rate=0.1",
    "algorithm.beta=0.5",
    "run.steps=3",
)


def test_identity_holds_only_settings_that_affect_samples(tiny_model: Path) -> None:
    for mode, of_mode in (("exact", ()), ("fast", ("rollout.prompts_per_step=3", "rollout.workers.fast.slots=2"))):
        first = facts_of(tiny_model, f"rollout.mode={mode}", "rollout.ray.address=local")
        assert first == facts_of(tiny_model, f"rollout.mode={mode}", *UNREAD, *of_mode)
        assert first != facts_of(tiny_model, f"rollout.mode={mode}", "rollout.ray.address=local", "rollout.top_k=9")
        # Actors may round otherwise than this host's devices.
        assert (first == facts_of(tiny_model, f"rollout.mode={mode}")) == (mode == "fast")


@pytest.mark.parametrize(
    ("overrides", "limit", "message"),
    [
        (("rollout.temperature=0.5",), 16, "rollout.temperature was 1.0 there, and is 0.5 now."),
        (("run.seed=8",), 15, "the prompts was '16 prompts, "),
    ],
)
def test_part_file_of_another_rollout_is_refused(
    tiny_model: Path, killed: Path, tmp_path: Path, overrides: tuple[str, ...], limit: int, message: str
) -> None:
    (tmp_path / killed.name).write_bytes(killed.read_bytes())
    before = digest_of(tmp_path)
    result = here(*command(tiny_model, tmp_path / "samples.jsonl", *SCHEDULED, *overrides, limit=limit))
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("error: ") == 1
    assert "delete the file to start over, or give another --out" in result.stderr
    assert digest_of(tmp_path) == before


def test_part_file_of_another_checkpoint_is_refused(finished: Path, tmp_path: Path) -> None:
    earlier, later = finished / "checkpoints" / "2", finished / "checkpoints" / "4"
    source = read_policy_source(load(str(finished / "settings.yaml"), [], {}).settings, earlier)
    part = tmp_path / "samples.jsonl.part"
    part.write_text(header_of(source.settings, source.model, source.saved_policy, limit=4) + "\n")
    result = here("rollout", "--checkpoint", later, "--limit", "4", "--out", tmp_path / "samples.jsonl")
    assert result.exit_code == 2 and "the checkpoint was 'step 2, " in result.stderr
    assert list(tmp_path.iterdir()) == [part]


@pytest.mark.parametrize("line", [b"half of a download", b"[]\n"])
def test_file_that_is_no_part_is_left_as_it_is(line: bytes, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl.part").write_bytes(line)
    result = here(*command(tiny_model, tmp_path / "samples.jsonl"))
    assert result.exit_code == 2 and "samples.jsonl.part is not a part file of a rollout" in result.stderr
    assert (tmp_path / "samples.jsonl.part").read_bytes() == line


def test_two_processes_do_not_share_a_part_file(tiny_model: Path, tmp_path: Path) -> None:
    with PartFile(tmp_path / "samples.jsonl.part", header="{}"):
        result = here(*command(tiny_model, tmp_path / "samples.jsonl"))
        assert result.exit_code == 2 and "another process is running this rollout" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (settings(*SCHEDULED, "rollout.workers.fast.count=99"), "workers need a device each"),
        (settings(SCHEDULED[0], "rollout.workers.heavy.slots=6"), "rollout.workers.heavy.slots: 6 cannot be split"),
        (["--timeline", "slots.png"], "--timeline plots the activity of scheduled workers"),
    ],
)
def test_error_before_the_first_sample_leaves_no_file(
    tiny_model: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = here(*command(tiny_model, tmp_path / "samples.jsonl"), *arguments)
    assert result.exit_code == 2 and message in result.stderr
    assert list(tmp_path.iterdir()) == []
