"""Tests `grpo rollout`: its samples and timeline, and how a killed rollout continues."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.checkpoint.saved_policy import PolicySource, read_policy_source
from app.prompts.data_sources import load_training_data
from app.prompts.encode import encode_prompts
from app.records.identity import Identity
from app.records.jsonl import write_jsonl
from app.records.partial_samples import PartFile, PartialSamples
from app.report.matplotlib_figures import check_picture_path
from app.rollout.scheduling.schedule_metrics import Span
from app.runtime.model_spec import read_model_spec
from app.stages.rollout import few_slots, rollout_identity
from app.tracking.rollout_timeline import SUPPORTED_SUFFIXES, Timeline, write_timeline
from settings import load
from settings.errors import InputError
from tests.program import NUM_DEVICES, digest_of, here, of_tiny, records_of, settings, succeeded
from tests.tiny import make_sample


def test_rollout_samples_prompts_of_a_file_greedily_and_keeps_their_columns(tiny_model: Path, tmp_path: Path) -> None:
    row = {"question": "1 + 2 = ?", "answer": "3", "level": 7}
    write_jsonl(tmp_path / "prompts.jsonl", [row, row | {"level": 8, "tests": "x" * 300}])
    greedy = *of_tiny(tiny_model), *settings("rollout.temperature=0"), "--prompts", tmp_path / "prompts.jsonl"
    succeeded(here("rollout", *greedy, "--out", tmp_path / "samples.jsonl"))
    records = records_of(tmp_path / "samples.jsonl")
    assert len(records) == 8 and len({record["completion"] for record in records[:4]}) == 1
    assert records[0]["prompt"] == "1 + 2 = ?" and records[0]["answer"] == "3"
    assert [record.get("columns", record.get("row_of")) for record in records] == [
        *[{"level": 7}] * 4,
        {"level": 8, "tests": "x" * 300},
        *[records[4]["uid"]] * 3,
    ]
    # Reward functions get the row of every sample, and other fields are written unchanged.
    (tmp_path / "plug.py").write_text("def f(completion, level, tests=''): return level + len(tests or '')")
    of_plug = settings(f"reward.functions=[{tmp_path / 'plug.py'}:f]")
    succeeded(
        here(
            *("score", "--role", "reward", "--input", tmp_path / "samples.jsonl", "--out", tmp_path / "scored.jsonl"),
            *of_plug,
        )
    )
    scored = records_of(tmp_path / "scored.jsonl")
    assert [record.pop("reward") for record in scored] == [7.0] * 4 + [308.0] * 4
    assert [{**record, "rewards": None} for record in scored] == [{**record, "rewards": None} for record in records]


def test_rollout_of_a_checkpoint_equals_the_next_step_of_its_run(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    result = succeeded(here("rollout", "--checkpoint", finished / "checkpoints" / "2", "--limit", "40", "--out", out))
    assert "--checkpoint: using the settings in" in result.stderr
    samples = {record["uid"]: record for record in records_of(out)}
    of_run = records_of(finished / "rollouts" / "step_000003.jsonl")
    assert len(samples) == 160 and len(of_run) == 16
    for record in of_run:
        again = samples[record["uid"]]
        assert again["completion_token_ids"] == record["completion_token_ids"]
        assert again["policy_version"] == record["policy_version"] == 2
        np.testing.assert_allclose(again["behavior_logprobs"], record["behavior_logprobs"], atol=1e-4)


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
        "last_verdict_s": 2.0,
    }
    return Timeline(**(values | changes))


def test_timeline_suffix_selects_png_or_self_contained_html(tmp_path: Path) -> None:
    for name, head in (("a.PNG", b"\x89PNG"), ("a.html", b"<!doctype html>")):
        write_timeline(tmp_path / name, timeline(heading='one <b> & "two"'))
        assert (tmp_path / name).read_bytes().startswith(head)
    page = (tmp_path / "a.html").read_text()
    assert "<h1>one &lt;b&gt; &amp; &#34;two&#34;</h1>" in page
    assert page.count("<svg") == 1 and page.count("adaptive: 4 s") == page.count("last verdict") == 1
    assert "currentColor" in page and "default-src 'none'" in page
    assert not re.findall(r"url\((?!#)|@import|<(?:script|link|iframe|object)|src=", page)
    with pytest.raises(InputError, match=r"--timeline: .* ending in \.png or \.html, got a\.pdf"):
        check_picture_path(Path("a.pdf"), "--timeline", SUPPORTED_SUFFIXES)


SMALL = ("data.max_prompt_length=16", "rollout.group_size=4", "rollout.max_new_tokens=48", "rollout.top_k=20")
SCHEDULED = (
    *("rollout.scheduler=adaptive", "rollout.mode=exact", "rollout.segment.min=4"),
    *("rollout.workers.fast.slots=8", "rollout.workers.heavy.count=0", f"mesh.cpu_devices={NUM_DEVICES}"),
)


def command(model: Path, out: Path, *overrides: str, limit: int = 6) -> list[str | Path]:
    chosen = settings(f"model.path={model}", *SMALL, *overrides)
    return ["rollout", *chosen, "--limit", str(limit), "--out", out]


def content(out: Path) -> list[dict[str, Any]]:
    """Returns the samples without the fields that depend on the schedule."""
    of_schedule = ("worker", "segments", "elapsed_s")
    return [{name: value for name, value in one.items() if name not in of_schedule} for one in records_of(out)]


def facts_of(model: Path, *overrides: str) -> Identity:
    chosen = load(None, [f"model.path={model}", "rollout.scheduler=adaptive", *overrides], {}).settings
    return rollout_identity(PolicySource(chosen, read_model_spec(chosen), None), [])


def header_of(source: PolicySource, *, limit: int = 6) -> str:
    chosen = source.settings
    rows = load_training_data(chosen.data, seed=chosen.run.seed).rows[:limit]
    prompts, _ = encode_prompts(rows, source.model.tokenizer, chosen.data)
    return PartialSamples(Path(), rollout_identity(source, prompts)).header


def header_under(overrides: list[str]) -> str:
    chosen = load(None, [one for one in overrides if one != "--set"], {}).settings
    return header_of(PolicySource(chosen, read_model_spec(chosen).without_adapters, None))


def test_a_killed_rollout_of_workers_continues_with_the_same_samples(tiny_model, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "samples.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("app.stages.rollout.remove_parts", lambda path: None)
        result = here(*command(tiny_model, whole, *SCHEDULED), "--timeline", tmp_path / "slots.html")
    assert result.exit_code == 0, result.stderr
    header, *lines = (tmp_path / "whole.jsonl.part").read_bytes().splitlines(keepends=True)
    assert len(lines) == 24
    finished = [{**json.loads(line), "elapsed_s": 123.0} for line in lines[:9]]
    # The last line is torn, as a kill in the middle of a write leaves it.
    stored = header + b"".join(json.dumps(one).encode() + b"\n" for one in finished) + lines[9][:50]
    (tmp_path / "samples.jsonl.part").write_bytes(stored)
    (tmp_path / ".samples.jsonl.4.partial").touch()
    (tmp_path / "whole.jsonl.part").unlink()
    result = succeeded(here(*command(tiny_model, out, *SCHEDULED)))
    assert "continuing: 9 of 24 samples are done" in result.stderr and "sampled before" in result.stdout
    assert content(out) == content(whole)
    assert sum(record["elapsed_s"] == 123.0 for record in records_of(out)) == 9
    assert {path.name for path in tmp_path.iterdir()} == {"samples.jsonl", "whole.jsonl", "slots.html"}


def test_a_continued_rollout_generates_only_missing_samples_in_rounds_of_any_size(sampled, tiny_model, tmp_path):
    records = [{**record, "elapsed_s": 123.0} for record in records_of(sampled)]
    assert [(record["group_id"], record["policy_version"]) for record in records] == [(i // 4, 0) for i in range(24)]
    assert len({record["uid"] for record in records}) == 24
    out, header = tmp_path / "samples.jsonl", header_under(of_tiny(tiny_model))
    # No sample is missing if a kill came before the part file was removed.
    for missing, prompts_per_step in (((7, *range(12, 24)), 2), ((), 4)):
        stored = [json.dumps(record) for i, record in enumerate(records) if i not in missing]
        (tmp_path / "samples.jsonl.part").write_text("".join(f"{line}\n" for line in (header, *stored)))
        of_step = f"rollout.prompts_per_step={prompts_per_step}"
        chosen = [of_step if "prompts_per_step" in one else one for one in of_tiny(tiny_model)]
        result = succeeded(here("rollout", "--json", *chosen, "--limit", "6", "--out", out))
        for record, other in zip(content(out), content(sampled), strict=True):
            np.testing.assert_allclose(record.pop("behavior_logprobs"), other.pop("behavior_logprobs"), atol=1e-5)
            assert record == other
        assert [record["elapsed_s"] == 123.0 for record in records_of(out)] == [i not in missing for i in range(24)]
        assert (json.loads(result.stdout)["tokens per second"] == 0) == (not missing)
        assert {path.name for path in tmp_path.iterdir()} == {"samples.jsonl"}
        out.unlink()


def test_a_part_file_is_locked_and_each_sample_is_written_at_once(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl.part"
    with PartFile(path, header="{}") as part:
        result = here(*command(tiny_model, tmp_path / "samples.jsonl"))
        assert result.exit_code == 2 and "another process is running this rollout" in result.stderr
        for num_lines in (2, 3):
            part.append(make_sample([1]))
            assert path.read_bytes().count(b"\n") == num_lines
    with PartFile(path.with_name("empty.part"), header="{}"):
        pass
    assert list(tmp_path.iterdir()) == [path]


UNREAD = (
    *("rollout.max_staleness=2", "rollout.max_length_total=99", "rollout.kv_blocks=64"),
    *("rollout.ray.address=auto", "rollout.devices=0.5"),
    *("eval.num_prompts=3", "reward.on_error=zero", "optimizer.learning_rate=0.1"),
    *("algorithm.beta=0.5", "run.steps=3"),
)


@pytest.mark.parametrize(("mode", "num_slots"), [("exact", 12), ("fast", 9)])
def test_auto_slots_are_limited_to_the_samples_except_in_exact_mode(mode: str, num_slots: int) -> None:
    step = ["rollout.prompts_per_step=4", "rollout.group_size=3", f"rollout.mode={mode}"]
    few = few_slots(load(None, step, {}).settings, [make_sample([1]).prompt] * 3)
    assert few.rollout.num_rows == num_slots


def test_rollout_identity_contains_only_settings_that_affect_samples(tiny_model: Path) -> None:
    for mode, of_mode in (("exact", ()), ("fast", ("rollout.prompts_per_step=3", "rollout.workers.fast.slots=2"))):
        first = facts_of(tiny_model, f"rollout.mode={mode}", "rollout.ray.address=local")
        assert first == facts_of(tiny_model, f"rollout.mode={mode}", *UNREAD, *of_mode)
        for read in ("rollout.top_k=9", "model.eos_tokens=[7]"):
            assert first != facts_of(tiny_model, f"rollout.mode={mode}", "rollout.ray.address=local", read)
        # Actors may round differently from this host's devices.
        assert (first == facts_of(tiny_model, f"rollout.mode={mode}")) == (mode == "fast")


@pytest.mark.parametrize(
    ("overrides", "limit", "message"),
    [
        (("rollout.temperature=0.5",), 6, "rollout.temperature was 1.0 there, and is 0.5 now."),
        (("run.seed=8",), 5, "the prompts was '6 prompts, "),
    ],
)
def test_a_part_file_of_another_rollout_is_refused(tiny_model, tmp_path, overrides, limit, message):
    chosen = settings(f"model.path={tiny_model}", *SMALL)
    (tmp_path / "samples.jsonl.part").write_text(header_under(chosen) + "\n")
    before = digest_of(tmp_path)
    result = here(*command(tiny_model, tmp_path / "samples.jsonl", *overrides, limit=limit))
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("error: ") == 1
    assert "delete the file to start over, or give another --out" in result.stderr
    assert digest_of(tmp_path) == before


def test_a_part_file_of_another_checkpoint_is_refused(finished: Path, tmp_path: Path) -> None:
    earlier, later = finished / "checkpoints" / "2", finished / "checkpoints" / "4"
    source = read_policy_source(load(str(finished / "settings.yaml"), [], {}).settings, earlier)
    part = tmp_path / "samples.jsonl.part"
    part.write_text(header_of(source, limit=4) + "\n")
    result = here("rollout", "--checkpoint", later, "--limit", "4", "--out", tmp_path / "samples.jsonl")
    assert result.exit_code == 2 and "the checkpoint was 'step 2, " in result.stderr
    assert list(tmp_path.iterdir()) == [part]


@pytest.mark.parametrize("line", [b"half of a download", b"[]\n"])
def test_a_file_that_is_not_a_part_file_is_left_unchanged(line: bytes, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl.part").write_bytes(line)
    result = here(*command(tiny_model, tmp_path / "samples.jsonl"))
    assert result.exit_code == 2 and "samples.jsonl.part is not a part file of a rollout" in result.stderr
    assert (tmp_path / "samples.jsonl.part").read_bytes() == line


def test_a_timeline_needs_scheduled_workers(tiny_model: Path, tmp_path: Path) -> None:
    result = here(*command(tiny_model, tmp_path / "samples.jsonl"), "--timeline", "slots.png")
    assert result.exit_code == 2 and "--timeline plots the activity of scheduled workers" in result.stderr
    assert list(tmp_path.iterdir()) == []
