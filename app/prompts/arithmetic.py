"""A generator of arithmetic problems such as `47 + 38 = ?`.

Problems of level n have numbers of up to n digits, at least one of them with exactly n. A fixed hash of the problem
determines its split, so that training and test never share a problem, whatever the seed. `38 + 47` and `47 + 38` are in
the same split.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from app.prompts.dataset import Dataset, DatasetRow
from settings.errors import InputError

SPLITS = ("train", "test")
OPERATORS = ("+", "-", "*")
TEST_SPLIT_MODULUS = 5
"""One in this many problems is held out."""
Problems = Int64[np.ndarray, "P 3"]
"""Columns: index in `OPERATORS`, left operand, right operand."""


def make_problems(
    *, difficulty: Sequence[int], operators: Sequence[str], num_problems: int, split: str, seed: int
) -> Dataset:
    """Returns up to `num_problems` different problems, spread evenly over the levels in `difficulty`, in random order.

    If a level has fewer problems than its share, all of them are used, and harder levels make up the difference.

    Raises:
        InputError: `split` is neither `train` nor `test`.
    """
    if split not in SPLITS:
        raise InputError(f"data.split: expected {' or '.join(SPLITS)} for builtin:arithmetic, got {split!r}")
    rng = np.random.default_rng([seed, SPLITS.index(split)])
    codes = np.array(sorted({OPERATORS.index(operator) for operator in operators}))
    levels = sorted(set(difficulty))
    rows: list[DatasetRow] = []
    for index, level in enumerate(levels):
        share = (num_problems - len(rows)) // (len(levels) - index)
        rows += [_to_row(problem, level) for problem in _sample(rng, level, codes, share, split).tolist()]
    order = rng.permutation(len(rows))
    return Dataset(
        rows=[rows[i] for i in order],
        column_mapping={"prompt": "prompt", "answer": "answer"},
        source="builtin:arithmetic",
    )


def _to_row(problem: list[int], level: int) -> DatasetRow:
    code, left, right = problem
    operator = OPERATORS[code]
    answer = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return DatasetRow(
        uid=f"arithmetic/{left}{operator}{right}",
        prompt=f"{left} {operator} {right} = ?",
        answer=str(answer),
        extra={"difficulty": level, "operator": operator},
    )


def _sample(rng: np.random.Generator, level: int, codes: np.ndarray, count: int, split: str) -> Problems:
    operands = np.arange(10**level)
    grid = np.stack(np.meshgrid(codes, operands, operands, indexing="ij"), axis=-1).reshape(-1, 3)
    is_of_level = grid[:, 1:].max(axis=1) >= (10 ** (level - 1) if level > 1 else 0)
    problems = grid[is_of_level & _is_in_split(grid, split)]
    return problems[rng.permutation(len(problems))[:count]]


def _is_in_split(problems: Problems, split: str) -> Bool[np.ndarray, "P"]:
    code, left, right = problems.T
    commutes = code != OPERATORS.index("-")
    swap = commutes & (left > right)
    left, right = np.where(swap, right, left), np.where(swap, left, right)
    key = ((code * 10**6 + left) * 10**6 + right).astype(np.uint64)
    is_test = _splitmix64(key) % np.uint64(TEST_SPLIT_MODULUS) == 0
    return is_test if split == "test" else ~is_test


def _splitmix64(key: UInt64[np.ndarray, "P"]) -> UInt64[np.ndarray, "P"]:
    """Hashes with SplitMix64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014."""
    key = key + np.uint64(0x9E3779B97F4A7C15)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))
