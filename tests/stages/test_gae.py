"""Tests `grpo gae`: advantages of samples and matrices, the summary, windows, and unusable input."""

import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.records.jsonl import write_jsonl
from app.records.moments import compute_moments, merge_moments
from app.records.sample import Sample
from app.records.sample_json import sample_for_advantages, sample_to_record
from app.runtime.advantages import make_gae_advantages
from app.stages.gae import WrittenAdvantages
from app.stages.gae_jsonl import GaeSampleFile, LocatedSample, sample_windows
from app.stages.gae_npz import load_matrices
from settings import load
from settings.errors import InputError
from tests.advantage.gae_oracle import Case, oracle
from tests.episodes import with_turns
from tests.program import here, records_of, settings, succeeded
from tests.tiny import make_sample

GAMMA, LAM = 0.9, 0.8


def expected(
    rewards: Any, values: Any, *, mask: Any = None, bootstrap: float = 0.0, lam: float = LAM, mode: str = "skip"
) -> tuple[np.ndarray, np.ndarray]:
    mask = None if mask is None else np.asarray(mask, bool)[None]
    case = Case(np.asarray(rewards, float)[None], np.append(values, bootstrap)[None], mask)
    advantages, returns = oracle(case, gamma=GAMMA, lam=lam, mask_mode=mode)
    return advantages[0], returns[0]


def gae(source: Path, out: Path, *arguments: Any) -> Any:
    return here("gae", "--input", source, "--out", out, "--gamma", str(GAMMA), "--lam", str(LAM), *arguments, "--json")


def ragged_samples(count: int, *, longest: int = 20) -> list[dict[str, Any]]:
    """Returns masked, bootstrapped and empty samples, each with fields that `grpo gae` ignores."""
    rng = np.random.default_rng(0)
    records = []
    for number in range(count):
        length = int(rng.integers(0, longest + 1)) if number else longest
        record = {
            "uid": f"p{number}/s0",
            "completion_token_ids": rng.integers(0, 9, length).tolist(),
            "values": rng.standard_normal(length + number % 2).tolist(),
            "reward": float(rng.standard_normal()),
            "note": {"a": [None, number]},
        }
        if number % 3 == 0:
            record["loss_mask"] = (rng.random(length) < 0.7).tolist()
        records.append(record)
    return records


def expected_of(record: dict[str, Any], *, lam: float = LAM) -> tuple[np.ndarray, np.ndarray]:
    length = len(record["completion_token_ids"])
    mask = np.array(record.get("loss_mask", [True] * length), bool)
    rewards = np.zeros(length)
    if mask.any():
        rewards[np.flatnonzero(mask)[-1]] = record["reward"]
    return expected(rewards, record["values"][:length], mask=mask, bootstrap=sum(record["values"][length:]), lam=lam)


@pytest.mark.parametrize("adaptive", [None, 0.2])
def test_grpo_gae_adds_advantages_and_returns_and_keeps_other_fields(tmp_path: Path, adaptive: float | None) -> None:
    records = ragged_samples(30)
    write_jsonl(tmp_path / "in.jsonl", records)
    own = () if adaptive is None else settings("critic.lam=1", f"algorithm.length_adaptive_lam={adaptive}")
    result = succeeded(gae(tmp_path / "in.jsonl", tmp_path / "out.jsonl", *own))
    figures = json.loads(result.stdout)
    assert (figures["samples"], figures["gamma"]) == (30, GAMMA)
    assert figures["tokens"] == sum(len(r["completion_token_ids"]) for r in records) > figures["trainable tokens"] > 0
    for before, after in zip(records, records_of(tmp_path / "out.jsonl"), strict=True):
        length = sum(before.get("loss_mask", [True] * len(before["completion_token_ids"])))
        lams = (LAM, LAM) if adaptive is None else (max(0.0, 1 - 1 / (adaptive * max(length, 1))), 1.0)
        advantages, returns = after.pop("advantages"), after.pop("returns")
        assert after == before
        np.testing.assert_allclose(advantages, expected_of(before, lam=lams[0])[0], atol=1e-5)
        np.testing.assert_allclose(returns, expected_of(before, lam=lams[1])[1], atol=1e-5)


def test_token_rewards_replace_the_reward_and_the_output_may_replace_the_input(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    masked: dict[str, Any] = {"values": [1.0, 2.0], "loss_mask": [False, False], "reward": None}
    write_jsonl(path, [{"values": [1, 2, 3], "token_rewards": [True, 0, 2], "reward": 100.0}, masked])
    assert gae(path, path, "--overwrite").exit_code == 0
    rewarded, masked = records_of(path)
    np.testing.assert_allclose(rewarded["advantages"], expected([1, 0, 2], [1, 2, 3])[0], atol=1e-6)
    assert masked["advantages"] == masked["returns"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("mode", "backend", "used"),
    [("skip", "chunked", "chunked"), ("zero", "chunked", "chunked"), ("through", "auto", "numpy")],
)
def test_grpo_gae_computes_the_advantages_of_each_matrix_row(
    tmp_path: Path, mode: str, backend: str, used: str
) -> None:
    rng = np.random.default_rng(1)
    rewards, values, mask = rng.integers(0, 3, (5, 40)), rng.standard_normal((5, 41)), rng.random((5, 40)) < 0.6
    np.savez(tmp_path / "in.npz", rewards=rewards, values=values, mask=mask.astype(int))
    # The other hosts that these settings name take no part.
    other_hosts = ("--config", "gsm8k_qwen2_5_3b_v4_16", *settings("mesh.platform=auto"))
    options = (*settings("algorithm.whiten_advantages=false"), "--mask-mode", mode, "--backend", backend)
    result = succeeded(gae(tmp_path / "in.npz", tmp_path / "out.npz", *other_hosts, *options, "--chunk-size", "3"))
    figures = json.loads(result.stdout)
    assert (figures["mask mode"], figures["backend"]) == (mode, "numpy" if backend == "auto" else backend)
    with np.load(tmp_path / "out.npz") as written:
        for row in range(5):
            exact = expected(rewards[row], values[row, :40], mask=mask[row], bootstrap=values[row, 40], mode=mode)
            np.testing.assert_allclose(written["advantages"][row], exact[0], atol=1e-5)
            np.testing.assert_allclose(written["returns"][row], exact[1], atol=1e-5)


REWARDS, VALUES, MASK = [1.0, 3.0, -2.0, 0.5, 4.0], [0.5, -1.0, 0.25, 2.0, 1.0], [1, 0, 1, 1, 0]
"""A sequence with masked tokens in the middle and at the end."""


def holed(folder: Path, kind: str) -> Path:
    if kind == "npz":
        np.savez(folder / "in.npz", rewards=np.array([REWARDS]), values=np.array([VALUES]), mask=np.array([MASK]))
    else:
        write_jsonl(folder / "in.jsonl", [{"token_rewards": REWARDS, "values": VALUES, "loss_mask": MASK}])
    return folder / f"in.{kind}"


def written(path: Path) -> list[np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return [arrays["advantages"][0], arrays["returns"][0]]
    (record,) = records_of(path)
    return [np.array(record["advantages"]), np.array(record["returns"])]


@pytest.mark.parametrize("kind", ["npz", "jsonl"])
def test_gae_summary_shows_moments_before_and_after_whitening(tmp_path: Path, kind: str) -> None:
    source = holed(tmp_path, kind)
    plain = json.loads(gae(source, tmp_path / f"plain.{kind}").stdout)
    assert "before whitening" not in plain
    white = json.loads(gae(source, tmp_path / f"white.{kind}", "--set", "algorithm.whiten_advantages=true").stdout)
    advantages = written(tmp_path / f"white.{kind}")[0][np.array(MASK, bool)]
    assert white["mean advantage"] == pytest.approx(advantages.mean(), abs=1e-6) == pytest.approx(0, abs=1e-6)
    assert white["std of advantages"] == pytest.approx(advantages.std(), abs=1e-5) == pytest.approx((2 / 3) ** 0.5)
    mean, std = plain["mean advantage"], plain["std of advantages"]
    assert white["before whitening"] == f"mean {mean:.6g}, std {std:.6g}"


GOOD: dict[str, Any] = {"values": [1.0], "reward": 1.0}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, {"values": [1.0, 2.0]}], "in.jsonl:2: the fields `reward` and `token_rewards`"),
        ([GOOD, {"values": [1.0] * 4, "token_rewards": [1.0] * 2}], "in.jsonl:2: values has length 4, expected 2 or"),
        ([GOOD, {"values": [3e38], "reward": -3e38}], "in.jsonl:2: rewards or values are so large"),
        ([GOOD, {"values": [float("nan")], "reward": 1.0}], "in.jsonl:2: unusable JSON: values[0] is NaN"),
        ([{"values": [1.0], "loss_mask": [False]}], "in.jsonl: the mask is False at every token of all samples"),
        ([], "contains no samples"),
    ],
)
def test_gae_names_an_unusable_line_and_writes_nothing(tmp_path: Path, lines: list[Any], message: str) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert_refused(gae(tmp_path / "in.jsonl", tmp_path / "out.jsonl"), message, tmp_path)


def with_last(number: float) -> np.ndarray:
    array = np.zeros((2, 3))
    array[-1, -1] = number
    return array


ZEROS = with_last(0)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((ZEROS,), "in.npz: expected an NPZ file with rewards, values and, optionally, mask"),
        ((ZEROS, np.zeros((2, 5))), "values: shape [2, 5] does not match rewards of shape [2, 3], expected [2, 3] or"),
        ((ZEROS, ZEROS, np.ones((3, 3), bool)), "in.npz: mask: shape [3, 3] does not match rewards of shape [2, 3]"),
        ((with_last(np.nan), ZEROS), "in.npz: rewards: row 1, index 2 is nan"),
        ((ZEROS, with_last(1e300)), "in.npz: values: row 1, index 2 is 1e+300"),
        ((ZEROS, ZEROS, with_last(2)), "in.npz: mask: row 1, index 2 is 2.0, expected 0 or"),
        ((ZEROS, ZEROS, ZEROS), "in.npz: the mask is False at every token of all rows"),
        ((ZEROS, ZEROS > 0), "in.npz: values: expected numbers, got dtype bool; save the mask as `mask`"),
        ((np.full((1, 1), -3e38), np.full((1, 1), 3e38)), "in.npz: advantages: row 0, index 0 is -inf"),
    ],
)
def test_gae_names_an_unusable_matrix_entry_and_writes_nothing(tmp_path: Path, arrays: Any, message: str) -> None:
    members: dict[str, Any] = dict(zip(("rewards", "values", "mask"), arrays, strict=False))
    np.savez(tmp_path / "in.npz", **members)
    assert_refused(gae(tmp_path / "in.npz", tmp_path / "out.npz"), message, tmp_path)


def assert_refused(result: Any, message: str, folder: Path) -> None:
    assert result.exit_code == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [path.name.split(".")[0] for path in folder.iterdir()] == ["in"]


def test_masked_tokens_may_have_any_value_unless_the_mask_mode_reads_them(tmp_path: Path) -> None:
    mask = np.array([[True, True, False]])
    np.savez(tmp_path / "in.npz", rewards=np.array([[1, 2, np.nan]]), values=np.array([[0, 0, np.inf]]), mask=mask)
    result = gae(tmp_path / "in.npz", tmp_path / "out.npz", "--mask-mode", "through")
    assert_refused(result, "in.npz: rewards: row 0, index 2 is nan", tmp_path)
    assert gae(tmp_path / "in.npz", tmp_path / "out.npz").exit_code == 0
    np.testing.assert_allclose(written(tmp_path / "out.npz")[0], [1 + 2 * GAMMA * LAM, 2, 0], rtol=1e-6)


def read(record: dict[str, Any]) -> Sample:
    return sample_for_advantages(
        record, where="file:1", bootstrap_truncated=False, needs_logprobs=False, needs_turns=False
    )


def located(length: int) -> LocatedSample:
    record = {"values": [0.0] * length, "reward": 0.0}
    return LocatedSample("", record, read(record))


def test_a_window_of_samples_has_at_most_its_tokens_or_one_sample() -> None:
    taken = 0

    def samples() -> Iterator[LocatedSample]:
        nonlocal taken
        for length in (30, 30, 30, 64, 65, 1, 0, 100, 2):
            taken += 1
            yield located(length)

    found = [
        ([len(one.sample.completion_ids) for one in window], taken)
        for window in sample_windows(samples(), window_tokens=64)
    ]
    # Each window is complete when the next sample does not fit: no more of the file is in memory.
    assert found == [([30, 30], 3), ([30], 4), ([64], 5), ([65], 6), ([1, 0], 8), ([100], 9), ([2], 9)]


def test_advantages_of_windows_are_whitened_over_the_whole_file(tmp_path: Path) -> None:
    rewards, values = np.random.default_rng(2).standard_normal((2, 7, 16))
    records = [{"token_rewards": r.tolist(), "values": v.tolist()} for r, v in zip(rewards, values, strict=True)]
    write_jsonl(tmp_path / "in.jsonl", records)
    file = GaeSampleFile(tmp_path / "in.jsonl", load(None, [], {}).settings, window_tokens=32)
    assert file.check() == (7, 7 * 16, 7 * 16)
    plain = np.concatenate([advantages for advantages, _, _ in file.estimates()])
    written = WrittenAdvantages(merge_moments(compute_moments(a, mask) for a, _, mask in file.estimates()))
    file.write(tmp_path / "out.jsonl", written)
    assert written.advantages.count == written.returns.count == 7 * 16
    found = np.concatenate([record["advantages"] for record in records_of(tmp_path / "out.jsonl")])
    np.testing.assert_allclose(found, (plain - plain.mean()) / plain.std(ddof=1), atol=1e-5)


def drawn() -> list[Sample]:
    """Returns a finished sample, a truncated one, and one with masked tokens; all have a value after the last token."""
    rng = np.random.default_rng(0)
    return [
        make_sample(
            np.zeros(6),
            sample_index=i,
            reward=float(rng.normal()),
            policy_logprobs=rng.normal(-1, 0.3, 6).astype(np.float32),
            reference_logprobs=rng.normal(-1, 0.3, 6).astype(np.float32),
            values=rng.normal(0, 1, 7).astype(np.float32),
            loss_mask=np.array([1, 1, i != 2, 1, 1, 1], bool),
        )
        for i in range(3)
    ]


RUN = ("--config", "smollm2_gsm8k_ppo", "--set", "algorithm.whiten_advantages=false")


@pytest.mark.parametrize("bootstraps", ["true", "false"])
def test_grpo_gae_gives_the_advantages_of_training(tmp_path: Path, bootstraps: str) -> None:
    samples = [replace(one, finish_reason=end) for one, end in zip(drawn(), ("stop", "length", "stop"), strict=True)]
    write_jsonl(tmp_path / "in.jsonl", map(sample_to_record, samples))
    truncation = f"algorithm.bootstrap_truncated={bootstraps}"
    arguments = (*RUN, "--set", truncation, "--set", "critic.lam=0.5", "--lam", "0.9")
    succeeded(here("gae", "--input", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", *arguments))
    chosen = load("smollm2_gsm8k_ppo", [truncation, "critic.lam=0.5", "algorithm.lam=0.9"], {}).settings
    # The KL penalty matters: without it, the numbers differ.
    trained, unpenalised = (make_gae_advantages(chosen)(samples, beta) for beta in (chosen.algorithm.beta, 0.0))
    for record, one, other in zip(records_of(tmp_path / "out.jsonl"), trained, unpenalised, strict=True):
        assert one.advantages is not None and one.returns is not None and other.advantages is not None
        np.testing.assert_array_equal(np.float32(record["advantages"]), one.advantages)
        np.testing.assert_array_equal(np.float32(record["returns"]), one.returns)
        assert not np.allclose(one.advantages, other.advantages, atol=1e-4)
    in_advantage = (*arguments, "--set", "algorithm.kl_in=advantage")
    refused = here("gae", "--input", tmp_path / "in.jsonl", "--out", tmp_path / "none.jsonl", *in_advantage)
    assert refused.exit_code == 2 and "algorithm.kl_in: advantage is not supported by grpo gae" in refused.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference_logprobs": None}, "the field `reference_logprobs` is missing, which the KL penalty in the reward"),
        ({"policy_logprobs": [0.0]}, "policy_logprobs has length 1, expected 6"),
        ({"finish_reason": "length", "values": [0.0] * 6}, "values has length 6, expected 7: the sample was"),
        ({"values": None}, "the field `values` is missing (one number per completion token); add it with `grpo"),
    ],
)
def test_grpo_gae_refuses_samples_without_a_field_that_training_needs(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_jsonl(tmp_path / "in.jsonl", [sample_to_record(drawn()[0]) | changes])
    arguments = (*RUN, "--set", "algorithm.bootstrap_truncated=true")
    result = here("gae", "--input", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", *arguments)
    assert result.exit_code == 2
    assert f"in.jsonl:1: {message}" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_sample_without_finish_reason_is_bootstrapped_if_it_has_an_extra_value() -> None:
    record = {"reward": 1.0, "completion_token_ids": [7, 8]}
    assert read(record | {"values": [0.0, 0.0, 0.0]}).finish_reason == "length"
    assert read(record | {"values": [0.0, 0.0]}).finish_reason == "stop"
    assert read(record | {"values": [0.0, 0.0, 0.0], "finish_reason": "length"}).finish_reason == "stop"


def test_grpo_gae_discounts_the_rewards_of_later_turns(tmp_path: Path) -> None:
    played = with_turns([(1, 1), (1, 0)], values=np.zeros(3, np.float32), token_rewards=np.array([1, 0, 4], np.float32))
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(json.dumps(sample_to_record(played)) + "\n")
    for discount, first in (("0.5", 3.0), ("1.0", 5.0)):
        chosen = settings(f"env.turn_discount={discount}")
        succeeded(here("gae", *chosen, "--lam", "1", "--input", path, "--out", out, "--overwrite", "--gamma", "1"))
        assert records_of(out)[0]["returns"] == [first, 0.0, 4.0]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_an_npz_file_without_matrices_of_numbers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, rewards=np.zeros((3, 2)), values=np.zeros((3, 2)))
    flipped = bytearray(path.read_bytes())
    flipped[flipped.index(b"\x93NUMPY") + 130] ^= 1
    files = [(flipped, "Bad CRC"), (b"", "expected an NPZ file"), (npy(np.zeros((1, 1))), "expected an NPZ file")]
    for member, message in (
        (npy(np.array([[None]])), "Object arrays cannot be loaded when allow_pickle=False"),
        (npy(np.array([["text"]])), r"rewards: expected numbers or booleans of shape \[B, T\], got <U4"),
        (npy(np.zeros(3)), r"got float64 of shape \[3\]"),
        (npy(np.zeros((3, 2))).replace(b"(3, 2)", b"(9, 9)"), "expected an NPZ file"),
        (b"no array", r"got \|S8 of shape \[1\]"),
    ):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("rewards.npy", member)
            file.writestr("values.npy", npy(np.zeros((3, 2))))
        files.append((path.read_bytes(), message))
    for content, message in files:
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            load_matrices(path)
