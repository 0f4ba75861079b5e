"""`grpo gae`: samples and matrices, windows of bounded size, whole files or none, and input that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.jsonl import write_jsonl
from app.sample_records import steps_from_record
from app.training.gae_estimator import Estimator, HostCredit, Window
from app.training.gae_file import MatrixFile, Placed, SampleFile, packed, sample_windows, whitener
from settings.errors import InputError
from tests.training.program import here, records_of

GAMMA, LAM = 0.9, 0.8
RULE = ("--gamma", str(GAMMA), "--lam", str(LAM))


def expected(
    rewards: Any, values: Any, *, mask: Any = None, bootstrap: float = 0.0, lam: float = LAM
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of one sequence in float64; masked tokens are no steps."""
    rewards, values = np.asarray(rewards, float), np.asarray(values, float)
    advantages, returns = np.zeros((2, len(rewards)))
    after, next_value = 0.0, bootstrap
    for t in reversed(np.flatnonzero(np.ones(len(rewards), bool) if mask is None else mask)):
        after = rewards[t] + GAMMA * next_value - values[t] + GAMMA * lam * after
        advantages[t], returns[t], next_value = after, after + values[t], values[t]
    return advantages, returns


def gae(source: Path, out: Path, *arguments: Any) -> Any:
    return here("gae", "--input", source, "--out", out, *map(str, RULE), *arguments, "--json")


def ragged_samples(count: int, *, longest: int = 20) -> list[dict[str, Any]]:
    """Masked, bootstrapped and empty ones among them; each with fields that are not for this verb."""
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


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("extra_column", [0, 1])
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
    files = {"npz": MatrixFile, "jsonl": SampleFile}
    file = files[kind](tmp_path / f"in.{kind}", rule(), window_tokens=32)
    file.write(tmp_path / f"out.{kind}", whitener(file.advantage_moments()))
    assert file.tally.num_windows == 4
    if kind == "npz":
        written = np.load(tmp_path / "out.npz")["advantages"]
    else:
        written = np.array([record["advantages"] for record in records_of(tmp_path / "out.jsonl")])
    assert abs(written.mean()) < 1e-6
    assert abs(written.var(ddof=1) - 1) < 1e-5


def rule() -> Estimator:
    return Estimator(
        gamma=GAMMA,
        lam=LAM,
        critic_lam=None,
        length_adaptive_lam=None,
        mask_mode="skip",
        backend="auto",
        chunk_size=None,
    )


class Watched(Estimator):
    """Writes down how much it is given at a time."""

    shapes: list[tuple[int, ...]]

    def credit(self, window: Window) -> HostCredit:
        self.shapes.append(window.rewards.shape)
        return super().credit(window)


def watched() -> Watched:
    estimator = Watched(**rule().__dict__)
    object.__setattr__(estimator, "shapes", [])
    return estimator


def test_no_more_rows_are_held_than_a_window_has_tokens_for(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", rewards=np.ones((50, 16)), values=np.ones((50, 16)))
    estimator = watched()
    MatrixFile(tmp_path / "in.npz", estimator, window_tokens=100).write(tmp_path / "out.npz", whitener(None))
    assert estimator.shapes == [(6, 16)] * 8 + [(2, 16)]


def test_no_more_samples_are_held_than_a_window_has_tokens_for_and_few_lengths_are_compiled(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", ragged_samples(60))
    estimator = watched()
    file = SampleFile(tmp_path / "in.jsonl", estimator, window_tokens=64)
    file.write(tmp_path / "out.jsonl", whitener(None))
    assert len(estimator.shapes) == file.tally.num_windows > 6
    assert set(estimator.shapes) == {(1, 1024)}

    def of(length: int) -> Placed:
        steps = steps_from_record({"values": [0.0] * length, "reward": 0.0}, where="")
        return Placed("", {}, steps)

    lengths = [30, 30, 30, 64, 65, 1, 0, 100, 2]
    windows = [[len(one.steps.rewards) for one in window] for window in sample_windows(map(of, lengths), 64)]
    assert windows == [[30, 30], [30], [64], [65], [1, 0], [100], [2]]


def test_reading_goes_no_further_than_the_window_that_is_worked_on() -> None:
    taken = 0

    def samples() -> Any:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield Placed("", {}, steps_from_record({"values": [0.0] * 10, "reward": 0.0}, where=""))

    windows = sample_windows(samples(), 30)
    seen = [taken for _ in windows]
    assert seen[0] == 4
    assert all(later - earlier == 3 for earlier, later in pairwise(seen[:-1]))


def test_samples_in_one_row_end_where_they_end() -> None:
    steps = [
        steps_from_record(record, where="")
        for record in (
            {"values": [1.0, 2.0], "reward": 3},
            {"values": [], "completion_token_ids": []},
            {"values": [4.0, 5.0], "completion_token_ids": [7], "reward": 6},
        )
    ]
    window = packed(steps)
    assert window.rewards.shape == (1, 1024)
    assert window.rewards[0, :4].tolist() == [0, 3, 6, 0]
    assert window.values[0, :4].tolist() == [1, 2, 4, 0]
    assert window.ends is not None and window.bootstrap is not None
    assert np.flatnonzero(window.ends).tolist() == [1, 2]
    assert np.flatnonzero(window.bootstrap).tolist() == [2]
    assert window.mask is not None and window.mask.sum() == 3


BAD_LINES: list[tuple[dict[str, Any] | str, str]] = [
    ({"reward": 1.0}, "in.jsonl:2: missing values"),
    ({"values": [1.0, 2.0]}, "in.jsonl:2: missing reward, or token_rewards"),
    (
        {"values": [1.0] * 4, "token_rewards": [1.0] * 2},
        "in.jsonl:2: values has 4 entries, expected 2 or 3: one per completion token, as token_rewards has 2",
    ),
    (
        {"values": [1.0] * 2, "completion_token_ids": [1, 2], "token_rewards": [1.0] * 3},
        "in.jsonl:2: token_rewards has 3 entries, expected 2: one per completion token",
    ),
    ({"values": [1.0], "reward": 1.0, "loss_mask": [1]}, "in.jsonl:2: loss_mask[0]: expected booleans, got int 1"),
    ({"values": [1.0, "a"], "reward": 1.0}, "in.jsonl:2: values[1]: expected finite float32 numbers, got str 'a'"),
    ({"values": [1e39], "reward": 1.0}, "in.jsonl:2: values[0]: expected finite float32 numbers"),
    ({"values": [1.0], "reward": 1e39}, "in.jsonl:2: reward: expected a finite float32 number"),
    ({"values": [3e38], "reward": -3e38}, "in.jsonl:2: rewards or values are too large"),
    ('{"values": [1.0, NaN], "reward": 1.0}', "in.jsonl:2: not usable JSON: values[1] is NaN, which is no number"),
    ('{"values": [1.0,', "in.jsonl:2: not JSON"),
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


def with_number(number: float, shape: tuple[int, int] = (2, 3)) -> np.ndarray:
    """Zeros, but for the last column of the last row."""
    array = np.zeros(shape)
    array[-1, -1] = number
    return array


BAD_MATRICES: list[tuple[dict[str, np.ndarray], str]] = [
    ({"rewards": ZEROS}, "in.npz: missing values; it holds rewards"),
    (
        {"rewards": ZEROS, "values": np.zeros((2, 5))},
        "in.npz: values: shape [2, 5] beside rewards of shape [2, 3], expected [2, 3] or [2, 4]",
    ),
    (
        {"rewards": ZEROS, "values": ZEROS, "mask": np.ones((3, 3), bool)},
        "in.npz: mask: shape [3, 3] beside rewards of shape [2, 3], expected [2, 3]",
    ),
    ({"rewards": with_number(np.nan), "values": ZEROS}, "in.npz: rewards: row 1, index 2 is nan"),
    ({"rewards": ZEROS, "values": with_number(np.inf, (2, 4))}, "in.npz: values: row 1, index 3 is inf"),
    ({"rewards": with_number(1e300), "values": ZEROS}, "in.npz: rewards: row 1, index 2 is inf"),
    ({"rewards": ZEROS, "values": ZEROS, "mask": with_number(2)}, "in.npz: mask: row 1, index 2 is 2.0, expected 0 or"),
    ({"rewards": ZEROS, "values": ZEROS, "mask": ZEROS}, "in.npz: the mask of all 2 rows is False throughout"),
    ({"rewards": np.array([[None]]), "values": ZEROS}, "in.npz: rewards: an array of Python objects"),
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


def test_a_row_of_a_later_window_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    values = np.zeros((50, 4))
    values[33, 2] = np.nan
    np.savez(tmp_path / "in.npz", rewards=np.zeros((50, 4)), values=values)
    with pytest.raises(InputError, match="values: row 33, index 2 is nan"):
        MatrixFile(tmp_path / "in.npz", rule(), window_tokens=40).write(tmp_path / "out.npz", whitener(None))


@pytest.mark.parametrize(("mode", "is_read"), [("skip", False), ("zero", False), ("through", True)])
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


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
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
    message = "in.jsonl: the mask of all 1 samples is False throughout"
    assert_refused(gae(tmp_path / "in.jsonl", tmp_path / "out.jsonl"), message, tmp_path)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_samples_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    assert_refused(gae(tmp_path / "in.jsonl", tmp_path / "out.jsonl"), "holds no samples", tmp_path)


def test_the_output_may_replace_the_input(tmp_path: Path) -> None:
    write: Callable[..., None] = write_jsonl
    write(tmp_path / "in.jsonl", [{"values": [1.0], "reward": 2.0}])
    assert gae(tmp_path / "in.jsonl", tmp_path / "in.jsonl").exit_code == 0
    (record,) = records_of(tmp_path / "in.jsonl")
    assert record["advantages"] == [1.0]
