"""Tests that `grpo evaluate` gives the metrics of training."""

import gc
import json
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from app.checkpoint.saved_policy import read_policy_source
from app.records.jsonl import write_jsonl
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from settings import load
from tests.program import here, metrics_of, records_of, settings, succeeded, train_here, without_clock
from tests.tiny_directory import write_model


def evaluated(*arguments: str | Path) -> dict[str, Any]:
    result = succeeded(here("evaluate", "--json", *arguments))
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


def test_evaluating_a_checkpoint_equals_its_run_bit_for_bit(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "after.jsonl"
    printed = succeeded(here("evaluate", "--checkpoint", finished, "--out", out))
    assert {path.name for path in tmp_path.iterdir()} == {out.name, f"{out.name}.facts.json"}
    facts = json.loads((tmp_path / f"{out.name}.facts.json").read_text())["facts"]
    assert facts["model.eos_tokens"] is None, "earlier versions left it out, which counts as None"
    # The step is stored in the metadata file, because a base model has no step.
    of_run = without_clock(finished / "eval" / "step_000004.jsonl")
    assert [{"step": 4, **record} for record in without_clock(out)] == of_run
    assert "step 4: 20 prompts of builtin:arithmetic (test), greedy, graded by arithmetic" in printed.stdout
    assert "to compare two such files: grpo evaluate --compare BEFORE AFTER" in printed.stdout
    shown = f"{100 * logged(finished, 4)['eval/accuracy']:.1f}"
    assert any(line.split()[:3] == ["accuracy", shown, "%"] for line in printed.stdout.splitlines())
    # Without --out, an evaluation of the original model writes no files.
    base = evaluated("--config", finished / "settings.yaml")
    assert (base["metrics"], base["step"], base["written to"]) == (logged(finished, 0), None, None)


def test_several_samples_per_prompt_in_slots_equal_the_run(config: Path, tmp_path: Path) -> None:
    several = ("run.steps=1", "eval.num_samples=2", "eval.temperature=1", "eval.num_prompts=5")
    succeeded(train_here(config, "rollout.slots=8", "rollout.mode=exact", *several))
    run, out = config.parent / "runs" / "tiny", tmp_path / "out.jsonl"
    assert evaluated("--checkpoint", run, "--out", out)["metrics"] == logged(run, 1)
    saved, fresh = (
        [(r["uid"], r["group_id"], r["completion_token_ids"], r["behavior_logprobs"], r["rewards"]) for r in records]
        for records in (records_of(run / "eval" / "step_000001.jsonl"), records_of(out))
    )
    assert fresh == saved and len(fresh) == 10
    assert {"eval/pass@2", "eval/maj@2"} <= logged(run, 1).keys()


def test_evaluating_adapters_equals_their_run(adapted: Path, tmp_path: Path) -> None:
    files = {0: tmp_path / "0.jsonl", 2: tmp_path / "2.jsonl"}
    assert evaluated("--checkpoint", adapted, "--out", files[2])["metrics"] == logged(adapted, 2)
    # Without a checkpoint there are no adapters, whatever the rank.
    base = succeeded(here("evaluate", "--config", adapted / "settings.yaml", "--out", files[0]))
    assert "model.lora.rank" in base.stderr and "has no effect here" in base.stderr
    found, expected = (
        {step: [record["behavior_logprobs"] for record in records_of(path)] for step, path in paths.items()}
        for paths in (files, {step: adapted / "eval" / f"step_00000{step}.jsonl" for step in files})
    )
    assert found == expected and expected[0] != expected[2]


def test_a_plug_in_judges_an_evaluation_and_its_failure_writes_no_file(config: Path, tmp_path: Path) -> None:
    judge, out = tmp_path / "judge.py", tmp_path / "out.jsonl"
    judge.write_text("def judge(completion):\n    raise ValueError('not yet')\n")
    chosen = settings(f"reward.functions=['{judge}:judge']", "eval.num_samples=2", "eval.temperature=1")
    rows = tmp_path / "rows.jsonl"
    write_jsonl(rows, [{"question": f"{i} + {i} = ?", "answer": str(2 * i)} for i in range(4)])
    # Null selects the whole data set.
    whole = settings(f"data.eval_source={rows}", "eval.num_prompts=null", "eval.every_steps=0")
    arguments = ("--config", config, *chosen, *whole, "--out", out)
    failed = here("evaluate", *arguments)
    assert failed.exit_code == 1 and "not yet" in failed.stderr
    assert not out.exists()
    judge.write_text("def judge(completion):\n    return 0.5 * len(completion)\n")
    found = evaluated(*arguments)
    assert (found["prompts"], found["data"]) == (4, str(rows))
    lengths = [len(record["completion"]) for record in records_of(out)]
    assert len(lengths) == 8 and found["metrics"]["eval/accuracy"] == pytest.approx(0.5 * np.mean(lengths))
    assert found["metrics"]["eval/format_rate"] is None and found["metrics"]["eval/pass@2"] is None
    assert [line.split(":")[0] for line in found["not measured"]] == ["pass@k", "maj@k"]


def test_evaluations_with_unusable_inputs_are_refused(finished: Path, tmp_path: Path) -> None:
    of_run = ("--checkpoint", finished, "--out", tmp_path / "out.jsonl")
    other = write_model(tmp_path / "other", seed=5)
    assert "was trained from another model" in refused(*of_run, *settings(f"model.path={other}"))
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "1 + 1 = ?"}])
    unanswered = f"data.eval_source={tmp_path / 'rows.jsonl'}"
    assert (
        f"{tmp_path / 'rows.jsonl'}:1 of the evaluation set ({unanswered.replace('=', ': ')}) has no answer"
        in refused(*of_run, *settings(unanswered))
    )
    assert "3: no such file or folder" in refused("--checkpoint", finished / "checkpoints" / "3")
    assert "the folder" in refused("--checkpoint", finished, "--out", tmp_path / "no" / "out.jsonl")
    assert not list(tmp_path.glob("out*"))
    (tmp_path / "out.jsonl").write_text("")
    assert "out.jsonl exists already; delete it or give another name, or add --overwrite" in refused(*of_run)


def test_only_decode_weights_stay_on_the_devices_during_an_evaluation(adapted: Path) -> None:
    source = read_policy_source(load(str(adapted / "settings.yaml"), [], {}).settings, adapted)
    with closing(Session.open(ScoringSession.open(source.settings, source.model))) as session:
        frozen = [weakref.ref(array) for array in jax.tree.leaves(session.scoring.frozen_params)]
        weights = source.load_decode_weights(session)
        gc.collect()
        decoding = {id(array) for array in jax.tree.leaves(weights)}
        assert {id(array) for found in frozen if (array := found()) is not None} <= decoding
