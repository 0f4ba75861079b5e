"""Tests that `grpo evaluate` gives the metrics of training, and continues from its file."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import shutil
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from app.checkpoint.policy_weights import read_policy_source
from app.evaluation.metadata import JUDGE, EvaluationMetadata
from app.evaluation.results_file import open_part_file
from app.records.jsonl import write_jsonl
from app.records.partial_samples import PartialSamples
from app.runtime.session import Session
from settings import InputError, load
from tests.program import digest_of, here, metrics_of, records_of, settings, train_here
from tests.tiny_directory import write_model


def evaluated(*arguments: str | Path) -> dict[str, Any]:
    result = here("evaluate", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*arguments: str | Path) -> str:
    result = here("evaluate", *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def logged(run: Path, step: int) -> dict[str, Any]:
    """Returns the metrics that a run logged for its evaluation, without its number of prompts."""
    (line,) = [line for line in metrics_of(run) if line["step"] == step]
    return {k: value for k, value in line.items() if k.startswith("eval/") and k != "eval/num_prompts"}


def without_clock(path: Path) -> list[dict[str, Any]]:
    return [{**record, "elapsed_s": 0} for record in records_of(path)]


@pytest.fixture(scope="module")
def result(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results file of an evaluation of the smallest run's last checkpoint, which tests must not change."""
    out = tmp_path_factory.mktemp("evaluated") / "after.jsonl"
    evaluated("--checkpoint", finished, "--out", out)
    return out


def copied(result: Path, folder: Path) -> Path:
    for path in result.parent.iterdir():
        shutil.copy2(path, folder)
    return folder / result.name


def test_a_checkpoint_is_worth_bit_for_bit_what_its_run_has_logged(finished: Path, result: Path) -> None:
    assert evaluated("--checkpoint", finished, "--out", result)["metrics"] == logged(finished, 4)
    assert without_clock(result) == without_clock(finished / "eval" / "step_000004.jsonl")
    # Of an older checkpoint, and of the model as it came; neither keeps anything.
    older = evaluated("--checkpoint", finished / "checkpoints" / "2")
    assert (older["metrics"], older["step"]) == (logged(finished, 2), 2)
    base = evaluated("--config", finished / "settings.yaml")
    assert (base["metrics"], base["step"], base["written to"]) == (logged(finished, 0), None, None)


def test_several_samples_through_slots_are_worth_the_same_too(config: Path, tmp_path: Path) -> None:
    several = ("run.steps=1", "eval.num_samples=2", "eval.temperature=1", "eval.num_prompts=5")
    result = train_here(config, "rollout.slots=8", "rollout.mode=exact", *several)
    assert result.exit_code == 0, result.stderr
    run, out = config.parent / "runs" / "tiny", tmp_path / "out.jsonl"
    assert evaluated("--checkpoint", run, "--out", out)["metrics"] == logged(run, 1)
    saved, fresh = (
        [(r["uid"], r["group_id"], r["completion_token_ids"], r["behavior_logprobs"], r["rewards"]) for r in records]
        for records in (records_of(run / "eval" / "step_000001.jsonl"), records_of(out))
    )
    assert fresh == saved and len(fresh) == 10
    assert {"eval/pass@2", "eval/maj@2"} <= logged(run, 1).keys()


def part_header(result: Path) -> str:
    """Returns the header of the part files of an evaluation, in a line."""
    facts = json.loads(Path(f"{result}.facts.json").read_text())["facts"]
    return PartialSamples(result, "evaluation", facts).header + "\n"


def test_a_killed_evaluation_asks_only_what_is_missing(finished: Path, result: Path, tmp_path: Path) -> None:
    # What a kill in the middle of the second batch's first line leaves.
    lines = [json.dumps({**record, "elapsed_s": 123.0}) + "\n" for record in records_of(result)]
    out = tmp_path / result.name
    part = tmp_path / f"{result.name}.part"
    part.write_text(part_header(result) + "".join(lines[:16]) + lines[16][:100])
    evaluation = here("evaluate", "--checkpoint", finished, "--out", out)
    assert evaluation.exit_code == 0, evaluation.stderr
    assert "continuing: 16 of 20 prompts are done" in evaluation.stderr
    assert [record["elapsed_s"] == 123.0 for record in records_of(out)] == [True] * 16 + [False] * 4
    assert without_clock(out) == without_clock(result)
    assert {path.name for path in tmp_path.iterdir()} == {out.name, f"{out.name}.facts.json"}


def test_a_part_that_does_not_even_say_of_what_it_is_is_begun_again(
    finished: Path, result: Path, tmp_path: Path
) -> None:
    facts, out = part_header(result), tmp_path / result.name
    (tmp_path / f"{result.name}.part").write_text(facts[: len(facts) // 2])
    evaluated("--checkpoint", finished, "--out", out)
    assert without_clock(out) == without_clock(result)
    assert {path.name for path in tmp_path.iterdir()} == {out.name, f"{out.name}.facts.json"}


def test_lines_that_are_taken_from_a_file_are_filled_in(finished: Path, result: Path, tmp_path: Path) -> None:
    out = copied(result, tmp_path)
    whole = records_of(out)
    write_jsonl(out, [{**record, "elapsed_s": 123.0} for record in whole if record["group_id"] not in (0, 3, 19)])
    evaluated("--checkpoint", finished, "--out", out)
    assert [r["group_id"] for r in records_of(out) if r["elapsed_s"] != 123.0] == [0, 3, 19]
    assert without_clock(out) == without_clock(result)


def test_lines_too_many_are_taken_out_again(finished: Path, result: Path, tmp_path: Path) -> None:
    out = copied(result, tmp_path)
    whole = out.read_text()
    lines = whole.splitlines(keepends=True)
    for more in (lines[3], lines[3][:50] + "\n", json.dumps({**records_of(result)[3], "sample_index": 1}) + "\n"):
        out.write_text(whole + more)
        evaluated("--checkpoint", finished, "--out", out)
        assert out.read_text() == whole


def test_an_evaluation_that_is_done_is_only_read(finished: Path, result: Path, tmp_path: Path) -> None:
    out = copied(result, tmp_path)
    before = digest_of(tmp_path)
    # What a kill between writing the file and clearing up leaves.
    (tmp_path / f"{out.name}.part").write_text(part_header(out))
    evaluation = here("evaluate", "--checkpoint", finished, "--out", out)
    assert evaluation.exit_code == 0, evaluation.stderr
    assert digest_of(tmp_path) == before
    assert "step 4: 20 prompts of builtin:arithmetic (test), greedy, judged by arithmetic" in evaluation.stdout
    assert "compared by grpo evaluate --compare BEFORE AFTER" in evaluation.stdout
    accuracy = logged(finished, 4)["eval/accuracy"]
    assert any(
        line.split()[:3] == ["accuracy", f"{100 * accuracy:.1f}", "%"] for line in evaluation.stdout.splitlines()
    )


def test_what_several_hosts_have_trained_is_evaluated_by_one(finished: Path, result: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    hosts = ["mesh.coordinator_address=127.0.0.1:9", "mesh.num_processes=2", "mesh.process_id=1"]
    (run / "settings.yaml").write_text(load(str(finished / "settings.yaml"), hosts, {}).to_yaml())
    assert evaluated("--checkpoint", run, "--out", copied(result, tmp_path))["metrics"] == logged(finished, 4)


def test_adapters_are_worth_what_their_run_has_logged_and_nothing_without_it(adapted: Path, tmp_path: Path) -> None:
    files = {0: tmp_path / "0.jsonl", 2: tmp_path / "2.jsonl"}
    assert evaluated("--checkpoint", adapted, "--out", files[2])["metrics"] == logged(adapted, 2)
    # Without a checkpoint there are none, whatever rank is asked for.
    base = here("evaluate", "--config", adapted / "settings.yaml", "--out", files[0])
    assert base.exit_code == 0, base.stderr
    assert "model.lora.rank" in base.stderr and "has no effect here" in base.stderr
    found, expected = (
        {step: [record["behavior_logprobs"] for record in records_of(path)] for step, path in paths.items()}
        for paths in (files, {step: adapted / "eval" / f"step_00000{step}.jsonl" for step in files})
    )
    assert found == expected and expected[0] != expected[2]


def test_a_judge_that_fails_costs_no_sample(config: Path, tmp_path: Path) -> None:
    judge, out, part = (tmp_path / name for name in ("judge.py", "out.jsonl", "out.jsonl.part"))
    judge.write_text("def judge(completion):\n    raise ValueError('not yet')\n")
    chosen = settings(f"reward.functions=['{judge}:judge']", "eval.num_samples=2", "eval.temperature=1")
    arguments = ("--config", config, *chosen, *settings("eval.num_prompts=4"), "--out", out)
    failed = here("evaluate", *arguments)
    assert failed.exit_code == 1 and "not yet" in failed.stderr
    assert not out.exists()
    head, *drawn = records_of(part)
    write_jsonl(part, [head, *({**record, "elapsed_s": 123.0} for record in drawn)])
    judge.write_text("def judge(completion):\n    return 0.5 * len(completion)\n")
    again = here("evaluate", *arguments)
    assert again.exit_code == 0, again.stderr
    assert [record["elapsed_s"] for record in records_of(out)] == [123.0] * 8
    lengths = [len(record["completion"]) for record in records_of(out)]
    found = evaluated(*arguments)
    assert len(lengths) == 8 and found["metrics"]["eval/accuracy"] == pytest.approx(0.5 * np.mean(lengths))
    assert found["metrics"]["eval/format_rate"] is None and found["metrics"]["eval/pass@2"] is None
    assert [line.split(":")[0] for line in found["not measured"]] == ["pass@k", "maj@k"]
    for function, name in ((f"{judge}:other", "other"), ("module:judge", "module:judge")):
        other = settings(f"reward.functions=[{{name: judge, function: '{function}'}}]")
        message = refused("--config", config, *other, *arguments[4:])
        assert f"the judge's function was 'judge' there, and is '{name}' now" in message
    judge.write_text("def judge(completion):\n    return 0.25 * len(completion)\n")
    assert "the judge's file was" in refused(*arguments), "what is judged is not judged anew"


def test_samples_that_a_judge_failed_on_are_judged_anew_by_one_that_was_mended(config: Path, tmp_path: Path) -> None:
    judge, out = tmp_path / "judge.py", tmp_path / "out.jsonl"
    judge.write_text("def judge(completion, answer):\n    return 1 / (int(answer) % 2)\n")
    chosen = settings("reward.on_error=zero", "eval.num_prompts=8")
    unjudged = ("--config", config, *chosen, "--out", out)
    arguments = (*unjudged, *settings(f"reward.functions=['{judge}:judge']"))
    failed = evaluated(*arguments)["metrics"]
    assert failed["eval/error_count"] > 0 and failed["eval/accuracy"] < 1
    records = [{**record, "elapsed_s": 123.0} for record in records_of(out)]
    write_jsonl(out, records)
    assert "the judge was 'judge' there, and is 'arithmetic' now" in refused(*unjudged)
    judge.write_text("def judge(completion, answer):\n    return 1\n")
    mended = evaluated(*arguments)["metrics"]
    assert (mended["eval/error_count"], mended["eval/accuracy"]) == (0, 1)
    assert [record["elapsed_s"] for record in records_of(out)] == [123.0] * 8
    message = refused(*arguments, *settings("reward.batch_size=9"))
    assert "reward.batch_size was '64' there, and is '9' now" in message


def test_null_asks_the_whole_data_set(config: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{i} + {i} = ?", "answer": str(2 * i)} for i in range(9)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    chosen = settings(f"data.eval_source={tmp_path / 'rows.jsonl'}", "eval.num_prompts=null", "eval.every_steps=0")
    found = evaluated("--config", config, *chosen)
    assert (found["prompts"], found["data"]) == (9, str(tmp_path / "rows.jsonl"))


def test_another_column_of_the_data_is_another_evaluation(config: Path, tmp_path: Path) -> None:
    chosen = settings(f"data.eval_source={tmp_path / 'rows.jsonl'}", "eval.num_prompts=null", "eval.every_steps=0")
    rows = [{"question": f"{i} + {i} = ?", "answer": str(2 * i), "tests": "old"} for i in range(4)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    arguments = ("--config", config, *chosen, "--out", tmp_path / "out.jsonl")
    evaluated(*arguments)
    write_jsonl(tmp_path / "rows.jsonl", [*rows[:3], {**rows[3], "tests": "new"}])
    assert "the prompts was" in refused(*arguments)


def test_another_evaluation_is_refused_by_what_differs(finished: Path, result: Path, tmp_path: Path) -> None:
    out = copied(result, tmp_path)
    before = digest_of(tmp_path)
    of_run = ("--checkpoint", finished, "--out", out)
    for arguments, name in (
        ((*of_run, *settings("eval.num_prompts=8")), "the prompts was"),
        ((*of_run, *settings("eval.temperature=0.5")), "eval.temperature was 0.0 there, and is 0.5 now"),
        (("--checkpoint", finished / "checkpoints" / "2", "--out", out), "the checkpoint was 'step 4, "),
        (("--config", finished / "settings.yaml", "--out", out), "the checkpoint was 'step 4, "),
    ):
        assert name in refused(*arguments)
    # Before any device is looked for: there are no such ones here.
    elsewhere = settings("eval.temperature=0.5", "mesh.platform=tpu")
    assert "eval.temperature was 0.0" in refused(*of_run, *elsewhere)
    out.rename(tmp_path / "other.jsonl")
    (tmp_path / "after.jsonl.part").write_text(part_header(tmp_path / "after.jsonl"))
    (tmp_path / "after.jsonl.facts.json").unlink()
    assert "eval.temperature was 0.0" in refused(*of_run, *elsewhere)
    (tmp_path / "after.jsonl.part").unlink()
    assert "other.jsonl exists without other.jsonl.facts.json" in refused(
        "--checkpoint", finished, "--out", tmp_path / "other.jsonl"
    )
    (name,) = {path.name for path in tmp_path.iterdir()}
    assert digest_of(tmp_path)[name].split()[1] == before["after.jsonl"].split()[1]


def test_input_that_cannot_be_evaluated(config: Path, finished: Path, tmp_path: Path) -> None:
    of_run = ("--checkpoint", finished, "--out", tmp_path / "out.jsonl")
    other = write_model(tmp_path / "other", seed=5)
    assert "was trained from another model" in refused(*of_run, *settings(f"model.path={other}"))
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "1 + 1 = ?"}])
    unanswered = f"data.eval_source={tmp_path / 'rows.jsonl'}"
    assert (
        f"{tmp_path / 'rows.jsonl'}:1 of the evaluation set ({unanswered.replace('=', ': ')}) has no answer"
        in refused(*of_run, *settings(unanswered))
    )
    assert "--checkpoint: there is no folder" in refused("--checkpoint", finished / "checkpoints" / "3")
    part = tmp_path / "out.jsonl.part"
    part.write_bytes(b"half of a download")
    assert f"{part} is not a part file of this kind of work (evaluation" in refused(*of_run)
    part.unlink()
    assert "the folder" in refused("--checkpoint", finished, "--out", tmp_path / "no" / "out.jsonl")
    assert not list(tmp_path.glob("out*"))


def test_only_one_at_a_time_is_at_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, subject = tmp_path / "out.jsonl", EvaluationMetadata("tiny", None, "rows.jsonl", {JUDGE: "arithmetic"})
    with (
        closing(open_part_file(out, subject)),
        pytest.raises(InputError, match="another process is running this evaluation"),
    ):
        open_part_file(out, subject)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(InputError, match=r"part cannot be written or locked: No locks available; give another --out"):
        open_part_file(out, subject)


def test_nothing_of_the_model_stays_on_the_devices_beside_what_decodes(adapted: Path) -> None:
    source = read_policy_source(load(str(adapted / "settings.yaml"), [], {}).settings, adapted)
    with closing(Session.open(source.settings, source.model)) as session:
        frozen = [weakref.ref(array) for array in jax.tree.leaves(session.frozen_params)]
        weights = source.load_decode_weights(session)
        gc.collect()
        decoding = {id(array) for array in jax.tree.leaves(weights)}
        assert {id(array) for found in frozen if (array := found()) is not None} <= decoding
