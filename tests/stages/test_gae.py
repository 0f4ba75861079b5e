"""Tests of `grpo gae`: samples and matrices, memory, complete output files, and invalid input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.records.jsonl import write_jsonl
from app.records.moments import compute_moments, merge_moments
from app.stages.gae import WrittenAdvantages
from app.stages.gae_jsonl import GaeSampleFile
from app.stages.gae_npz import GaeMatrixFile
from settings import Settings, load
from tests.advantage.gae_oracle import Case, oracle
from tests.program import here, records_of

GAMMA, LAM = 0.9, 0.8
RULE = ("--gamma", str(GAMMA), "--lam", str(LAM))


def expected(
    rewards: Any, values: Any, *, mask: Any = None, bootstrap: float = 0.0, lam: float = LAM, mode: str = "skip"
) -> tuple[np.ndarray, np.ndarray]:
    """Computes advantages and returns of one sequence in float64."""
    case = Case(
        np.asarray(rewards, float)[None],
        np.append(values, bootstrap)[None],
        None if mask is None else np.asarray(mask, bool)[None],
    )
    advantages, returns = oracle(case, gamma=GAMMA, lam=lam, mask_mode=mode)
    return advantages[0], returns[0]


def gae(source: Path, out: Path, *arguments: Any) -> Any:
    return here("gae", "--input", source, "--out", out, *map(str, RULE), *arguments, "--json")


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


def credit_of(record: dict[str, Any], *, lam: float = LAM) -> tuple[np.ndarray, np.ndarray]:
    length = len(record["completion_token_ids"])
    mask = np.array(record.get("loss_mask", [True] * length), bool)
    rewards = np.zeros(length)
    if mask.any():
        rewards[np.flatnonzero(mask)[-1]] = record["reward"]
    return expected(rewards, record["values"][:length], mask=mask, bootstrap=sum(record["values"][length:]), lam=lam)


def test_samples_go_through_with_their_other_fields_and_get_credit_by_their_masks(tmp_path: Path) -> None:
    records = ragged_samples(30)
    write_jsonl(tmp_path / "in.jsonl", records)
    result = gae(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.stderr
    figures = json.loads(result.stdout)
    assert (figures["samples"], figures["gamma"], figures["lambda"]) == (30, GAMMA, LAM)
    assert figures["tokens"] == sum(len(r["completion_token_ids"]) for r in records) > figures["trainable tokens"] > 0
    for before, after in zip(records, records_of(tmp_path / "out.jsonl"), strict=True):
        got = after.pop("advantages"), after.pop("returns")
        assert after == before
        for array, exact in zip(got, credit_of(before), strict=True):
            np.testing.assert_allclose(array, exact, atol=1e-5)


def test_token_rewards_come_before_the_reward_and_booleans_are_numbers(tmp_path: Path) -> None:
    record = {"values": [1, 2, 3], "token_rewards": [True, 0, 2], "reward": 100.0}
    write_jsonl(tmp_path / "in.jsonl", [record])
    assert gae(tmp_path / "in.jsonl", tmp_path / "out.jsonl").exit_code == 0
    (written,) = records_of(tmp_path / "out.jsonl")
    np.testing.assert_allclose(written["advantages"], expected([1, 0, 2], [1, 2, 3])[0], atol=1e-6)


@pytest.mark.parametrize(("with_mask", "extra_column"), [(False, 0), (True, 1)])
def test_matrices_get_the_credit_of_their_rows(tmp_path: Path, with_mask: bool, extra_column: int) -> None:
    rng = np.random.default_rng(1)
    rewards, values = rng.integers(0, 3, (5, 40)), rng.standard_normal((5, 40 + extra_column))
    mask = rng.random((5, 40)) < 0.6 if with_mask else np.ones((5, 40), bool)
    members: dict[str, Any] = {"mask": mask.astype(int)} if with_mask else {}
    np.savez(tmp_path / "in.npz", rewards=rewards, values=values, **members)
    result = gae(tmp_path / "in.npz", tmp_path / "out.npz")
    assert result.exit_code == 0, result.stderr
    with np.load(tmp_path / "out.npz") as written:
        for row in range(5):
            exact = expected(rewards[row], values[row, :40], mask=mask[row], bootstrap=values[row, 40:].sum())
            np.testing.assert_allclose(written["advantages"][row], exact[0], atol=1e-5)
            np.testing.assert_allclose(written["returns"][row], exact[1], atol=1e-5)


def test_another_lambda_for_the_returns_and_one_by_length(tmp_path: Path) -> None:
    records = ragged_samples(6)
    write_jsonl(tmp_path / "in.jsonl", records)
    settings = ("--set", "critic.lam=1", "--set", "algorithm.length_adaptive_lam=0.2")
    assert gae(tmp_path / "in.jsonl", tmp_path / "out.jsonl", *settings).exit_code == 0
    for before, after in zip(records, records_of(tmp_path / "out.jsonl"), strict=True):
        length = sum(before.get("loss_mask", [True] * len(before["completion_token_ids"])))
        adapted = max(0.0, 1 - 1 / (0.2 * max(length, 1)))
        np.testing.assert_allclose(after["advantages"], credit_of(before, lam=adapted)[0], atol=1e-5)
        np.testing.assert_allclose(after["returns"], credit_of(before, lam=1.0)[1], atol=1e-5)


@pytest.mark.parametrize("kind", ["npz", "jsonl"])
def test_whitened_advantages_have_mean_0_and_variance_1_over_the_whole_file(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(2)
    rewards, values = rng.standard_normal((2, 7, 16))
    np.savez(tmp_path / "in.npz", rewards=rewards, values=values)
    write_jsonl(
        tmp_path / "in.jsonl",
        [{"token_rewards": r.tolist(), "values": v.tolist()} for r, v in zip(rewards, values, strict=True)],
    )
    source = tmp_path / f"in.{kind}"
    file = (
        GaeMatrixFile(source, settings_of())
        if kind == "npz"
        else GaeSampleFile(source, settings_of(), window_tokens=32)
    )
    whitening = merge_moments(compute_moments(advantages, mask) for advantages, _, mask in file.estimates())
    file.write(tmp_path / f"out.{kind}", WrittenAdvantages(whitening))
    if kind == "npz":
        written = np.load(tmp_path / "out.npz")["advantages"]
    else:
        written = np.array([record["advantages"] for record in records_of(tmp_path / "out.jsonl")])
    assert abs(written.mean()) < 1e-6
    assert abs(written.var(ddof=1) - 1) < 1e-5


def settings_of(*overrides: str) -> Settings:
    return load(None, (f"algorithm.gamma={GAMMA}", f"algorithm.lam={LAM}", *overrides), {}).settings


def holed(folder: Path, kind: str) -> Path:
    """Returns a sequence with masked tokens in the middle and at the end."""
    if kind == "npz":
        rewards, values, mask = (np.array([HOLED[name]]) for name in ("token_rewards", "values", "mask"))
        np.savez(folder / "in.npz", rewards=rewards, values=values, mask=mask)
    else:
        record = {name: HOLED[name] for name in ("values", "token_rewards")} | {"loss_mask": HOLED["mask"]}
        write_jsonl(folder / "in.jsonl", [record])
    return folder / f"in.{kind}"


HOLED: dict[str, list[Any]] = {
    "values": [0.5, -1.0, 0.25, 2.0, 1.0],
    "token_rewards": [1.0, 3.0, -2.0, 0.5, 4.0],
    "mask": [1, 0, 1, 1, 0],
}


def credit_in(path: Path) -> dict[str, np.ndarray]:
    """Returns the advantages of the first sequence of a file."""
    if path.suffix == ".npz":
        with np.load(path) as written:
            return {name: written[name][0] for name in ("advantages", "returns")}
    (record,) = records_of(path)
    return {name: np.array(record[name]) for name in ("advantages", "returns")}


@pytest.mark.parametrize(("kind", "mode"), [("npz", "skip"), ("jsonl", "through"), ("jsonl", "zero")])
def test_masked_tokens_mean_what_the_mode_says(tmp_path: Path, kind: str, mode: str) -> None:
    result = gae(holed(tmp_path, kind), tmp_path / f"out.{kind}", "--mask-mode", mode)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["mask mode"] == mode
    exact = expected(HOLED["token_rewards"], HOLED["values"], mask=HOLED["mask"], mode=mode)
    for array, of_oracle in zip(credit_in(tmp_path / f"out.{kind}").values(), exact, strict=True):
        np.testing.assert_allclose(array, of_oracle, atol=1e-6)
    # The modes differ at the first token, by what the second one means.
    step = GAMMA * LAM
    third = {"skip": -2 + 0.9 * 2 - 0.25 + step * (0.5 - 2.0), "zero": -2 + 0.9 * 2 - 0.25 + step * (0.5 - 2.0)}
    third["through"] = third["skip"] + step * (0.9 * 1.0 + step * 3.0)
    first = {
        "skip": 1 + 0.9 * 0.25 - 0.5 + step * third["skip"],
        "zero": 1 - 0.5 + step * (0.9 * 0.25 + step * third["zero"]),
        "through": 1 - 0.9 - 0.5 + step * (3 + 0.9 * 0.25 + 1 + step * third["through"]),
    }
    assert exact[0][0] == pytest.approx(first[mode])


@pytest.mark.parametrize(("kind", "backend"), [("npz", "chunked"), ("jsonl", "chunked"), ("jsonl", "auto")])
def test_every_backend_is_told_and_computes_the_same(tmp_path: Path, kind: str, backend: str) -> None:
    result = gae(holed(tmp_path, kind), tmp_path / f"out.{kind}", "--backend", backend, "--chunk-size", "3")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["backend"] == ("chunked" if backend == "chunked" else "numpy")
    exact = expected(HOLED["token_rewards"], HOLED["values"], mask=HOLED["mask"])
    for array, of_oracle in zip(credit_in(tmp_path / f"out.{kind}").values(), exact, strict=True):
        np.testing.assert_allclose(array, of_oracle, atol=1e-6)


BAD_LINES: list[tuple[dict[str, Any] | str, str]] = [
    ({"reward": 1.0}, "in.jsonl:2: missing values"),
    ({"values": [1.0, 2.0]}, "in.jsonl:2: missing reward, or token_rewards"),
    (
        {"values": [1.0] * 4, "token_rewards": [1.0] * 2},
        "in.jsonl:2: values has 4 entries, expected 2 or 3: one per completion token, as token_rewards has 2",
    ),
    (
        {"values": [1.0], "reward": 1.0, "loss_mask": [2]},
        "in.jsonl:2: loss_mask[0]: expected booleans, or 0 and 1, got int 2",
    ),
    ({"values": [1e39], "reward": 1.0}, "in.jsonl:2: values[0]: expected finite float32 numbers"),
    ({"values": [3e38], "reward": -3e38}, "in.jsonl:2: rewards or values are too large"),
    (
        '{"values": [1.0, NaN], "reward": 1.0}',
        "in.jsonl:2: not usable JSON: values[1] is NaN",
    ),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_line_that_cannot_be_used_is_named_and_nothing_is_written(
    tmp_path: Path, line: dict[str, Any] | str, message: str
) -> None:
    good = {"values": [1.0], "reward": 1.0}
    lines = [json.dumps(good), line if isinstance(line, str) else json.dumps(line)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert_refused(gae(tmp_path / "in.jsonl", tmp_path / "out.jsonl"), message, tmp_path)


ZEROS = np.zeros((2, 3))


def with_number(number: float) -> np.ndarray:
    """Returns zeros, except for the last column of the last row."""
    array = np.zeros((2, 3))
    array[-1, -1] = number
    return array


BAD_MATRICES: list[tuple[dict[str, np.ndarray], str]] = [
    ({"rewards": ZEROS}, "in.npz: expected an NPZ file with rewards, values and, optionally, mask"),
    (
        {"rewards": ZEROS, "values": np.zeros((2, 5))},
        "in.npz: values: shape [2, 5] does not match rewards of shape [2, 3], expected [2, 3] or [2, 4]",
    ),
    (
        {"rewards": ZEROS, "values": ZEROS, "mask": np.ones((3, 3), bool)},
        "in.npz: mask: shape [3, 3] does not match rewards of shape [2, 3], expected [2, 3]",
    ),
    ({"rewards": with_number(np.nan), "values": ZEROS}, "in.npz: rewards: row 1, index 2 is nan"),
    ({"rewards": with_number(1e300), "values": ZEROS}, "in.npz: rewards: row 1, index 2 is 1e+300"),
    ({"rewards": ZEROS, "values": ZEROS, "mask": with_number(2)}, "in.npz: mask: row 1, index 2 is 2.0, expected 0 or"),
    ({"rewards": ZEROS, "values": ZEROS, "mask": ZEROS}, "in.npz: the mask of all rows is False throughout"),
    ({"rewards": ZEROS, "values": ZEROS > 0}, "in.npz: values: expected numbers, got dtype bool; is it the mask?"),
    (
        {"rewards": np.full((1, 1), -3e38), "values": np.full((1, 1), 3e38)},
        "in.npz: advantages: row 0, index 0 is -inf",
    ),
]


@pytest.mark.parametrize(("members", "message"), BAD_MATRICES)
def test_matrices_that_cannot_be_used_are_named_and_nothing_is_written(
    tmp_path: Path, members: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "in.npz", **members)
    assert_refused(gae(tmp_path / "in.npz", tmp_path / "out.npz"), message, tmp_path)


def assert_refused(result: Any, message: str, folder: Path) -> None:
    assert result.exit_code == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [path.name.split(".")[0] for path in folder.iterdir()] == ["in"]


@pytest.mark.parametrize(("mode", "is_read"), [("skip", False), ("through", True)])
def test_what_stands_at_masked_tokens_may_be_anything_unless_it_is_read(
    tmp_path: Path, mode: str, is_read: bool
) -> None:
    mask = np.array([[True, True, False]])
    np.savez(tmp_path / "in.npz", rewards=np.array([[1, 2, np.nan]]), values=np.array([[0, 0, np.inf]]), mask=mask)
    result = gae(tmp_path / "in.npz", tmp_path / "out.npz", "--mask-mode", mode)
    assert result.exit_code == (2 if is_read else 0), result.stderr
    if not is_read:
        written = np.load(tmp_path / "out.npz")["advantages"]
        np.testing.assert_allclose(written, [[1 + 2 * GAMMA * LAM, 2, 0]], rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_matrices_without_tokens_give_matrices_without_tokens(tmp_path: Path, shape: tuple[int, int]) -> None:
    np.savez(tmp_path / "in.npz", rewards=np.zeros(shape), values=np.zeros(shape))
    result = gae(tmp_path / "in.npz", tmp_path / "out.npz")
    assert result.exit_code == 0, result.stderr
    with np.load(tmp_path / "out.npz") as written:
        assert written["advantages"].shape == written["returns"].shape == shape


def test_a_row_or_sample_without_a_trainable_token_gets_zeros(tmp_path: Path) -> None:
    dropped: dict[str, Any] = {"values": [1.0, 2.0], "loss_mask": [False, False], "reward": None}
    write_jsonl(tmp_path / "in.jsonl", [dropped, {"values": [1.0], "reward": 2.0}])
    assert gae(tmp_path / "in.jsonl", tmp_path / "out.jsonl").exit_code == 0
    first, second = records_of(tmp_path / "out.jsonl")
    assert first["advantages"] == first["returns"] == [0.0, 0.0]
    assert second["returns"] == [2.0]


def test_a_file_of_dropped_samples_alone_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"values": [1.0, 2.0], "loss_mask": [False, False]}])
    message = "in.jsonl: the mask of all samples is False throughout"
    assert_refused(gae(tmp_path / "in.jsonl", tmp_path / "out.jsonl"), message, tmp_path)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_samples_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    assert_refused(gae(tmp_path / "in.jsonl", tmp_path / "out.jsonl"), "holds no samples", tmp_path)


def test_the_output_may_replace_the_input(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"values": [1.0], "reward": 2.0}])
    assert gae(tmp_path / "in.jsonl", tmp_path / "in.jsonl", "--overwrite").exit_code == 0
    (record,) = records_of(tmp_path / "in.jsonl")
    assert record["advantages"] == [1.0]


@pytest.mark.parametrize("kind", ["npz", "jsonl"])
def test_the_summary_tells_what_is_written_and_what_it_was_before_whitening(tmp_path: Path, kind: str) -> None:
    source = holed(tmp_path, kind)
    plain = json.loads(gae(source, tmp_path / f"plain.{kind}").stdout)
    assert "before whitening" not in plain
    white = json.loads(gae(source, tmp_path / f"white.{kind}", "--set", "algorithm.whiten_advantages=true").stdout)
    written = credit_in(tmp_path / f"white.{kind}")["advantages"][np.array(HOLED["mask"], bool)]
    assert white["mean advantage"] == pytest.approx(written.mean(), abs=1e-6) == pytest.approx(0, abs=1e-6)
    assert white["std of advantages"] == pytest.approx(written.std(), abs=1e-5) == pytest.approx((2 / 3) ** 0.5)
    mean, std = plain["mean advantage"], plain["std of advantages"]
    assert white["before whitening"] == f"mean {mean:.6g}, std {std:.6g}"


V4_16 = ("--config", "gsm8k_qwen2_5_3b_v4_16", "--set", "mesh.platform=auto")


def test_other_hosts_have_no_part_in_a_file(tmp_path: Path) -> None:
    result = gae(holed(tmp_path, "npz"), tmp_path / "out.npz", *V4_16)
    assert result.exit_code == 0, result.stderr
