"""Tests samples with several turns, from the command to the file."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.distributed.stop_check import StoppedError
from app.model.io.model_files import open_model
from app.prompts.tokenizer import load_tokenizer
from app.records.jsonl import write_jsonl
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from app.training.inputs import read_training_inputs
from settings import load
from tests.games import SOURCE
from tests.program import here, records_of, settings, succeeded

FEW = {
    "data.max_prompt_length": "16",
    "data.num_problems": "6",
    "rollout.prompts_per_step": "4",
    "rollout.group_size": "4",
    "rollout.max_new_tokens": "48",
    "rollout.segment.min": "4",
    "rollout.slots": "16",
    "model.dtype": "float32",
}
EXACT = ("rollout.mode=exact",)
WORKERS = (
    *("rollout.mode=exact", "rollout.scheduler=adaptive", "rollout.workers.fast.slots=16", "rollout.slots=auto"),
    "rollout.workers.heavy.count=0",
)

SLOW_AND_SHUT = """
class SlowAndShut(Slow, Shut):
    pass


class Closed(Echo):
    def reset(self, **columns):
        raise RuntimeError("closed")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "games.py"
    path.write_text(SOURCE + SLOW_AND_SHUT)
    return path


def few(*overrides: str) -> list[str]:
    """Returns the settings of a small rollout with these overrides."""
    chosen = FEW | dict(one.split("=", maxsplit=1) for one in overrides)
    return settings(*(f"{name}={value}" for name, value in chosen.items()))


def sampled(out: Path, *overrides: str) -> list[dict[str, Any]]:
    succeeded(here("rollout", *few(*overrides), "--out", out))
    return records_of(out)


def bits(records: Sequence[dict[str, Any]]) -> list[tuple[str, list[int], list[float]]]:
    return [(one["uid"], one["completion_token_ids"], one["behavior_logprobs"]) for one in records]


def ends(records: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(one["episode"]["end"], one["finish_reason"]) for one in records}


@pytest.fixture(scope="module")
def echo(file: Path) -> Path:
    """Returns a file with samples of exact mode; tests must not change it."""
    out = file.with_name("samples.jsonl")
    sampled(out, *EXACT, f"env.source={file}:Echo")
    return out


def test_turns_are_joined_by_tokens_of_the_template(echo: Path) -> None:
    records = records_of(echo)
    tokenizer = load_tokenizer(open_model("builtin:tiny"))
    observation = tokenizer.encode_rendered("<|user|>12+3=?<|assistant|>")
    assert len(records) == 24 and ends(records) == {("terminated", "stop")}
    for record in records:
        ids, mask, turns = record["completion_token_ids"], record["loss_mask"], record["episode"]["turns"]
        assert [turn["reward"] for turn in turns] == [1.0, 2.0, 3.0] and record["episode"]["scores"] == {"calm": 0.5}
        written = np.zeros(len(ids), bool)
        for turn, after in zip(turns, [*turns[1:], None], strict=True):
            written[turn["start"] : turn["end"]] = True
            assert ids[turn["end"] - 1] in tokenizer.eos_ids
            assert turn["metrics"] == {"letters": len(turn["text"])}
            assert after is None or ids[turn["end"] : after["start"]] == observation
        assert mask == written.tolist() and record["completion"] == turns[-1]["text"]
        assert not np.asarray(record["behavior_logprobs"])[~written].any()


def test_samples_in_exact_mode_do_not_depend_on_latency_suspension_schedule_or_failures(
    echo, file, tmp_path, monkeypatch
):
    # For one prompt in three, the environment fails to open.
    scarce = ("rollout.kv_blocks=7", "rollout.max_staleness=1", f"env.source={file}:SlowAndShut")
    records = sampled(tmp_path / "workers.jsonl", *WORKERS, *scarce)
    shut = {one["group_id"] for one in records if one["finish_reason"] == "dropped:environment raised"}
    assert 0 < len(shut) < 6
    for one, whole in zip(records, records_of(echo), strict=True):
        if one["group_id"] in shut:
            assert one["finish_reason"].startswith("dropped") and len(one["completion_token_ids"]) == 1
        else:
            assert bits([one]) == bits([whole]) and one["episode"]["end"] == whole["episode"]["end"]
    # Observations are longer than a segment feeds.
    monkeypatch.setattr("app.rollout.engine.shapes.MAX_FORCED", 3)
    slots = ("rollout.kv_blocks=7", "env.max_suspended=0", f"env.source={file}:Slow")
    assert bits(sampled(tmp_path / "slots.jsonl", *EXACT, *slots)) == bits(records_of(echo))


def test_scored_logprobs_equal_sampled_logprobs_after_long_observations(echo, file, tmp_path, monkeypatch):
    # Fast mode prefills observations beyond this length.
    monkeypatch.setattr("app.rollout.engine.shapes.MAX_FORCED", 3)
    records = sampled(tmp_path / "samples.jsonl", f"env.source={file}:Echo", "env.max_turns=2")
    assert ends(records) == {("turns", "length")} and {len(one["episode"]["turns"]) for one in records} == {2}
    write_jsonl(tmp_path / "both.jsonl", [*records, *records_of(echo)])
    result = succeeded(
        here("score", "--input", tmp_path / "both.jsonl", "--json", *few(), "--out", tmp_path / "scored.jsonl")
    )
    assert json.loads(result.stdout)["max |logprob - behavior|"] < 1e-4


def test_a_single_turn_environment_does_not_change_samples(file: Path, tmp_path: Path) -> None:
    alone = sampled(tmp_path / "alone.jsonl", *EXACT)
    judged = sampled(tmp_path / "judged.jsonl", *EXACT, f"env.source={file}:Silent")
    assert bits(judged) == bits(alone)
    for one in judged:
        if one["finish_reason"] == "stop":
            assert one["episode"]["turns"][0]["reward"] == (one["completion"] == one["answer"])


def test_truncated_samples_are_scored_by_their_environment(file: Path, tmp_path: Path) -> None:
    records = sampled(tmp_path / "samples.jsonl", f"env.source={file}:Echo", "rollout.max_new_tokens=12")
    assert ends(records) == {("tokens", "length"), ("observation", "length")}
    assert all(one["episode"]["scores"] == {"calm": 0.5} for one in records)


def test_samples_of_a_prompt_share_an_opening_and_environment_failures_drop_samples(file: Path, tmp_path: Path) -> None:
    records = sampled(tmp_path / "samples.jsonl", f"env.source={file}:Game")
    openings = {one["uid"].rpartition("/")[0]: one["prompt"] for one in records}
    assert len(openings) == 6 and len({opening[0]["content"] for opening in openings.values()}) > 2
    assert all(one["prompt"] == openings[one["uid"].rpartition("/")[0]] for one in records)
    failed = Counter(one["finish_reason"] for one in records)
    assert set(failed) == {"stop", "dropped:environment raised"} and failed["stop"] % 4 == 0


def test_a_rollout_whose_environment_always_fails_ends_with_an_error(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    result = here("rollout", *few(f"env.source={file}:Closed"), "--limit", "1", "--out", out)
    assert result.exit_code == 1 and "closed" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: RuntimeError: all 4 samples were dropped")
    assert len(records_of(out)) == 4


@pytest.mark.parametrize(("name", "overrides"), [("Unborn", ()), ("Asleep", WORKERS)], ids=["opening", "workers"])
def test_a_requested_stop_ends_the_wait_for_environments(name: str, overrides: tuple[str, ...], file: Path) -> None:
    chosen = load(None, few(*overrides, f"env.source={file}:{name}")[1::2], {}).settings
    read = read_training_inputs(chosen)
    with closing(Session.open(ScoringSession.open(chosen, read.model))) as session:
        conversations = session.generator.conversations
        engines = [one.engine for one in session.workers.workers] if session.workers else [session.generator.engine]
        assert conversations is not None

        def stop_requested() -> bool:
            is_waiting = conversations.num_acting > 0 and not any(engine.active_rows for engine in engines)
            return is_waiting or name == "Unborn"

        session.stop_when(stop_requested)
        weights = session.to_decode_weights(session.scoring.load_params())
        with pytest.raises(StoppedError):
            session.generator.generate(weights, read.prompts[:1], session.rollout_request())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("env.source={file}:Nobody",), "env.source: "),
        (("env.source={file}:Echo", "rollout.placement=global"), "an environment answers only its own host's samples"),
        (("env.source={file}:Echo", "rollout.stop=['=']"), "remove the stop strings"),
        (("env.source=chess",), "expected one of calculator"),
        (("env.tools=[calculator]",), "does not list tools"),
    ],
)
def test_rollout_refuses_an_unusable_environment(overrides, message, file, tmp_path):
    result = here("rollout", *few(*(one.format(file=file) for one in overrides)), "--out", tmp_path / "samples.jsonl")
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.stderr
    assert not any(tmp_path.iterdir())
