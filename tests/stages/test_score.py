"""Tests `grpo score`: every role and strategy, the check of packed rows, windows, and invalid input."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import app.model.decoder as decoder
from app.batching.micro_batcher import FixedRowBatcher
from app.model.segment_layout import single_segment_layout
from app.prompts.tokenizer import Tokenizer
from app.records.jsonl import write_jsonl
from app.records.sample import Prompt, Sample
from app.records.sample_json import LocatedSample, sample_to_record
from app.runtime.model_spec import read_model_spec
from app.runtime.scoring import ScoringSession
from app.stages.rollout import PromptShard
from app.stages.sample_reader import SampleFileExtent, SampleReader
from app.stages.sample_text import SampleEncoder
from app.stages.score import WindowScorer, check_packing
from app.stages.score_rewards import sample_indices_by_host
from settings import Settings, load
from settings.errors import InputError
from settings.schema.data import DataSettings
from settings.schema.rollout import RolloutSettings
from tests.program import DEADLINE_S, digest_of, here, of_tiny, records_of, settings, started, succeeded
from tests.tiny import ODD, make_sample, random_samples

QUOTA = "score.max_tokens_per_device"


def score(model: Path, source: Path, out: Path, role: str, *overrides: str, overwrites: bool = False) -> Any:
    arguments = ("--input", source, "--out", out, "--role", role, "--json", *(["--overwrite"] * overwrites))
    return here("score", *of_tiny(model), *settings(*overrides), *arguments)


def test_scoring_roles_chained_by_files_add_their_fields_and_keep_other_fields(
    sampled, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setattr("app.stages.score.WINDOW_SAMPLES", 5)
    records = [
        record | {"note": [1, {"a": None}], "weight": 1e-30, "my_scores": [0.5]} for record in records_of(sampled)
    ]
    write_jsonl(tmp_path / "0.jsonl", records)
    for step, role in enumerate(("policy", "reference", "reward")):
        result = succeeded(score(tiny_model, tmp_path / f"{step}.jsonl", tmp_path / f"{step + 1}.jsonl", role))
        assert json.loads(result.stdout)["samples"] == 24
        assert ("scored 20 of 24 samples" in result.stderr) == (role != "reward")
    for before, after in zip(records, records_of(tmp_path / "3.jsonl"), strict=True):
        added = {name: after.pop(name) for name in ("policy_logprobs", "reference_logprobs", "rewards", "reward")}
        assert after == before
        np.testing.assert_allclose(added["policy_logprobs"], before["behavior_logprobs"], atol=1e-4)
        assert added["policy_logprobs"] == added["reference_logprobs"]
        assert added["reward"] == added["rewards"]["arithmetic"]


def test_score_summary_counts_tokens_padding_and_packing(sampled: Path, tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--input", sampled, "--out", tmp_path / "scored.jsonl", "--json", "--check-packing")
    chosen = settings("score.strategy=scan", "score.rows_per_device=1")
    result = here("score", *of_tiny(tiny_model), *chosen, *arguments)
    figures = json.loads(result.stdout)
    tokens = sum(len(r["prompt_token_ids"]) + len(r["completion_token_ids"]) for r in records_of(sampled))
    # 24 samples on 8 devices are in rows of 16 tokens, which fit the longest.
    counts = {"samples": 24, "tokens": tokens, "real tokens": tokens, "padded tokens": 24 * 16 - tokens}
    counts |= {"fill": round(tokens / (24 * 16), 4), "micro-batches": 3, "shapes compiled": 1}
    assert {name: figures[name] for name in counts} == counts
    for name in ("mean |logprob - behavior|", "max |logprob - behavior|", "max |packed - alone|"):
        assert 0 <= figures[name] < 1e-4


def test_scoring_rewards_needs_no_model_and_includes_the_length_penalty(sampled: Path, tmp_path: Path) -> None:
    out = tmp_path / "rewarded.jsonl"
    result = succeeded(score(Path("no/such/model"), sampled, out, "reward", "reward.overlong_buffer=2"))
    records, figures = records_of(out), json.loads(result.stdout)
    costs = [-max(len(record["completion_token_ids"]) - 2, 0) / 2 for record in records]
    assert len(set(costs)) > 1 and [record["rewards"]["overlong"] for record in records] == costs
    assert [record["reward"] - record["rewards"]["arithmetic"] for record in records] == costs
    assert figures["reward/overlong/mean"] == round(float(np.mean(costs)), 4)
    assert figures["reward/mean"] == round(float(np.mean([record["reward"] for record in records])), 4)


def test_scoring_rewards_starts_no_device(sampled: Path, tmp_path: Path) -> None:
    arguments = ("--role", "reward", "--input", sampled, "--out", tmp_path / "rewarded.jsonl")
    with started("score", *arguments, environ={"JAX_PLATFORMS": "no_such_platform"}) as process:
        output = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output


def with_fields(**fields: Any) -> Callable[[str], str]:
    return lambda line: json.dumps(json.loads(line) | fields)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda line: line[:-9], "not JSON"),
        (lambda line: line[:-1] + ', "note": [1, 2e999]}', "note[1] is Infinity, or too large for a float64"),
        (with_fields(completion_token_ids=None, completion=None), "missing completion_token_ids or completion; a"),
        (with_fields(completion="not it"), "completion: 'not it' differs from the decoded completion_token_ids"),
        (with_fields(behavior_logprobs=[0.5] * 4, completion_token_ids=[5] * 4, completion=None), "[0] is 0.5, but a"),
        (with_fields(prompt_token_ids=[2, 24]), "prompt_token_ids[1] is token 24, but the vocabulary of"),
        (with_fields(prompt_token_ids=[2] * 128), "tokens, but the context of model.path is 128; remove the"),
        (with_fields(prompt_token_ids=[2] * 100), "tokens, more than score.policy.max_tokens_per_device = 64 (from"),
    ],
)
def test_score_names_an_unusable_line_before_any_device_work(sampled, tiny_model, tmp_path, spoil, message):
    lines = sampled.read_text().splitlines()
    lines[8] = spoil(lines[8])
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    (tmp_path / "out.jsonl").write_text("what was there before\n")
    before = digest_of(tmp_path)
    paths = tmp_path / "samples.jsonl", tmp_path / "out.jsonl"
    result = score(tiny_model, *paths, "policy", f"{QUOTA}=64", overwrites=True)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'samples.jsonl'}:9: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert digest_of(tmp_path) == before


@pytest.mark.parametrize("role", ["policy", "reward"])
def test_score_refuses_input_that_is_not_a_sample_file(tiny_model: Path, tmp_path: Path, role: str) -> None:
    source = tmp_path / "samples.jsonl"
    for content, message in (
        (None, "samples.jsonl: no such file"),
        ("", "contains no samples"),
        ('{"uid": "p/s0"}\n', "samples.jsonl:1: missing "),
    ):
        if content is not None:
            source.write_text(content)
        result = score(tiny_model, source, tmp_path / "out.jsonl", role)
        assert result.exit_code == 2 and message in result.stderr
    os.mkfifo(tmp_path / "pipe")
    if role == "policy":
        result = score(tiny_model, tmp_path / "pipe", tmp_path / "out.jsonl", role)
        assert result.exit_code == 2 and "is not a regular file, but must be read twice" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_score_refuses_options_that_a_role_cannot_use(finished: Path, sampled: Path, tmp_path: Path) -> None:
    checkpoint = ("--checkpoint", finished)
    for role, options, message in (
        ("critic", checkpoint, "contains no critic, because its run trained none"),
        ("reference", checkpoint, "--role reference uses only the weights of model.path; omit one"),
        ("reward", checkpoint, "--role reward uses only the weights of reward.model; omit one"),
        ("reward", ("--check-packing",), "--check-packing compares logprobs, but --role reward has none"),
        ("critic", ("--check-packing",), "--check-packing compares logprobs, but --role critic has none"),
    ):
        result = here("score", *options, "--input", sampled, "--out", tmp_path / "out.jsonl", "--role", role)
        assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_scoring_several_checkpoints_shares_programs_and_writes_separate_outputs(
    finished: Path, tmp_path: Path
) -> None:
    source = finished / "rollouts" / "step_000003.jsonl"
    earlier, later = (["--checkpoint", finished / "checkpoints" / step] for step in ("2", "4"))
    arguments = ("score", "--input", source, "--json", "--out")
    both = succeeded(here(*arguments, tmp_path / "{run}-{step}.jsonl", *earlier, *later))
    first, second = json.loads(both.stdout)
    # The sampler of step 3 had the weights of step 2.
    difference = "max |logprob - behavior|"
    assert first[difference] < 1e-4 < second[difference]
    assert [first["written to"], second["written to"]] == [str(tmp_path / f"{finished.name}-{s}.jsonl") for s in "24"]
    assert first["shapes compiled"] == second["shapes compiled"] and second["compilations"] == 0
    succeeded(here(*arguments, tmp_path / "{index}.jsonl", *later, *later))
    assert records_of(tmp_path / "0.jsonl") == records_of(tmp_path / "1.jsonl")
    assert records_of(tmp_path / "1.jsonl") == records_of(tmp_path / f"{finished.name}-4.jsonl")
    before = digest_of(tmp_path)
    both_steps, own = ("--checkpoint", finished / "checkpoints" / "2", *later), tmp_path / f"{finished.name}-4.jsonl"
    for out, options, message in (
        ("out.jsonl", both_steps, "out.jsonl would contain the scores of two checkpoints"),
        ("new-{step}.jsonl", (*later, *later), "new-4.jsonl would contain the scores of two checkpoints"),
        ("{run}-{step}.jsonl", both_steps, "exists already"),
        ("{step}.jsonl", (), "--out: {step} is replaced only with --checkpoint"),
        ("{step}.jsonl", ("--role", "reward"), "--out: {step} is replaced only with --checkpoint"),
        ("{run}-{step}.jsonl", (*both_steps, "--input", own, "--overwrite"), "--input and --out both name"),
    ):
        given = ("score", *options, *(() if "--input" in options else ("--input", source)), "--out", tmp_path / out)
        result = here(*given)
        assert result.exit_code == 2 and message in result.stderr, result.stderr
        assert digest_of(tmp_path) == before


@pytest.fixture
def session(tiny_model: Path) -> ScoringSession:
    chosen = load(None, [f"model.path={tiny_model}"], {}).settings
    return ScoringSession.open(chosen, read_model_spec(chosen))


@pytest.fixture
def strangers(session: ScoringSession) -> list[Sample]:
    """Returns three samples, of which the first and the last have the same prompt."""
    first, sibling, second = random_samples(2, 2, vocab_size=session.model_spec.architecture.vocab_size)[:3]
    return [first, second, sibling]


def test_packing_check_accepts_samples_in_a_shared_row(session: ScoringSession, strangers: list[Sample]) -> None:
    params = session.load_params()
    assert check_packing(session, params, strangers) <= 1e-4
    # Weights that give NaN do not count as a leak.
    assert check_packing(session, jax.tree.map(lambda x: jnp.full_like(x, np.nan), params), strangers) == 0.0


def test_packing_check_finds_attention_that_ignores_segments(session, strangers, monkeypatch):
    """The attention treats every row as one sequence, like a backend that ignores segment ids."""
    attention = decoder.packed_attention

    def leaking(query: Any, keys: Any, values: Any, layout: Any, **rest: Any) -> Any:
        everything = single_segment_layout(jnp.ones(layout.segment_ids.shape, bool))
        rest["pairs"] = None
        return attention(query, keys, values, everything, **rest)

    monkeypatch.setattr(decoder, "packed_attention", leaking)
    with pytest.raises(RuntimeError, match=r"attention leaks .* score\.dynamic: false"):
        check_packing(session, session.load_params(), strangers)
    # Three samples of one prompt, or the same sample three times.
    first, _, sibling = strangers
    for related in ([first, sibling, first], [first] * 3):
        with pytest.raises(RuntimeError, match="attention leaks"):
            check_packing(session, session.load_params(), related)


def test_a_score_of_nan_is_reported_with_the_line_of_its_sample(
    session: ScoringSession, strangers: list[Sample]
) -> None:
    nan = jax.tree.map(lambda x: jnp.full_like(x, np.nan), session.load_params())
    scorer = WindowScorer(session, nan, "policy", micro_batcher=FixedRowBatcher(4, trim_tail=False))
    window = [LocatedSample(f"in.jsonl:{i}", {}, sample) for i, sample in enumerate(strangers, start=1)]
    (lines,) = scorer.score_windows([window], num_samples=3)
    with pytest.raises(ValueError, match=r"in\.jsonl:1: policy_logprobs \(no uid\): "):
        list(lines)


def reader(path: Path) -> SampleReader:
    """Returns a reader for a model without a tokenizer."""

    def load_tokenizer() -> Tokenizer:
        raise InputError("there is no tokenizer.json")

    return SampleReader(path, ODD, SampleEncoder(load_tokenizer, DataSettings()))


@pytest.fixture
def drawn() -> list[Sample]:
    return random_samples(5, 2, vocab_size=ODD.vocab_size)


@pytest.fixture
def path(tmp_path: Path, drawn: list[Sample]) -> Path:
    write_jsonl(tmp_path / "samples.jsonl", map(sample_to_record, drawn))
    return tmp_path / "samples.jsonl"


def test_windows_and_extent_of_a_sample_file_match_its_samples(path: Path, drawn: list[Sample]) -> None:
    windows = list(reader(path).windows(4))
    assert list(map(len, windows)) == [4, 4, 2]
    assert [one.sample.uid for window in windows for one in window] == [s.uid for s in drawn]
    lengths = [len(s.prompt.token_ids) + len(s.completion_ids) for s in drawn]
    extent = reader(path).check()
    longest = f"{path}:{lengths.index(max(lengths)) + 1}"
    assert extent == SampleFileExtent(10, max(lengths), longest, max(len(s.completion_ids) for s in drawn))


@pytest.mark.parametrize("change", ["lost", "longer", "later"])
def test_a_sample_file_that_changes_between_passes_or_windows_is_refused(path: Path, change: str) -> None:
    file, status = reader(path), path.stat()
    file.check()
    windows = file.windows(4)
    if change == "later":
        next(windows)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    else:
        content = path.read_text()
        path.unlink()
        if change == "longer":
            path.write_text(content + content)
    with pytest.raises(InputError, match="changed during scoring, so nothing was written"):
        next(windows)


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    return lambda host: monkeypatch.setattr(jax, "process_index", lambda: host)


@pytest.mark.parametrize("num_prompts", [1, 4, 7, 9])
def test_rollout_rounds_of_all_hosts_contain_every_prompt_once_in_order(
    num_prompts: int, two_hosts: Callable[[int], None]
) -> None:
    prompts = [Prompt(str(i), np.array([1], np.int32), "?", None) for i in range(num_prompts)]
    chosen, hosts = Settings(rollout=RolloutSettings(prompts_per_step=2, group_size=2)), []
    for host in range(2):
        two_hosts(host)
        hosts.append(PromptShard.from_prompts(prompts, chosen))
    rounds = list(zip(*(shard.rounds for shard in hosts), strict=True))
    assert [place for of_hosts in rounds for one in of_hosts for place in one] == list(range(num_prompts))


def test_hosts_score_whole_groups_of_a_file(two_hosts: Callable[[int], None]) -> None:
    samples = [make_sample([1], group_id=group) for group in (7, 7, 3, 5, 3, 9, 9, 5, 2)]
    for host in range(2):
        two_hosts(host)
        assert sample_indices_by_host(samples) == [[0, 1, 2, 3, 4, 7], [5, 6, 8]]
