import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.prompts.arithmetic import make_problems
from settings.errors import InputError


def make(**changes):
    return make_problems(
        **{
            "difficulty": (1, 2),
            "operators": ("+",),
            "num_problems": 300,
            "split": "train",
            "seed": 0,
            **changes,
        }
    )


def parse(row):
    match = re.fullmatch(r"(\d+) ([-+*]) (\d+) = \?", row.prompt)
    assert match, row.prompt
    return int(match[1]), match[2], int(match[3])


def canonical(row):
    left, operator, right = parse(row)
    return (left, operator, right) if operator == "-" else (min(left, right), operator, max(left, right))


LEVELS = st.sets(st.integers(1, 3), min_size=1).map(tuple)
OPERATORS = st.sets(st.sampled_from("+-*"), min_size=1).map(tuple)


@settings(max_examples=25, deadline=None)
@given(LEVELS, OPERATORS, st.integers(1, 500), st.sampled_from(["train", "test"]), st.integers(0, 2**31 - 1))
def test_problems_are_right_unique_and_of_their_level(difficulty, operators, num_problems, split, seed):
    rows = make(difficulty=difficulty, operators=operators, num_problems=num_problems, split=split, seed=seed).rows
    assert len({row.uid for row in rows}) == len(rows) <= num_problems
    for row in rows:
        left, operator, right = parse(row)
        assert operator in operators and row.extra["operator"] == operator
        assert max(len(str(left)), len(str(right))) == row.extra["difficulty"] in difficulty
        expected = {"+": left + right, "-": left - right, "*": left * right}[operator]
        assert row.answer == str(expected)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), LEVELS, OPERATORS)
def test_training_and_test_never_share_a_problem_whatever_the_seeds(seed, other_seed, difficulty, operators):
    train = make(split="train", seed=seed, difficulty=difficulty, operators=operators, num_problems=2000)
    test = make(split="test", seed=other_seed, difficulty=difficulty, operators=operators, num_problems=2000)
    assert not {canonical(row) for row in train.rows} & {canonical(row) for row in test.rows}


@pytest.mark.parametrize("operator", ["+", "-", "*"])
@pytest.mark.parametrize(("level", "total"), [(1, 100), (2, 9_900)])
def test_both_splits_together_hold_every_problem_of_a_small_level(operator, level, total):
    sizes = [
        len(make(split=split, difficulty=(level,), operators=(operator,), num_problems=10**6).rows)
        for split in ("train", "test")
    ]
    assert sum(sizes) == total
    assert 0.1 < sizes[1] / total < 0.3


def test_the_test_split_is_a_fifth_of_every_level():
    test = make(split="test", difficulty=(3,), num_problems=10**6)
    assert len(test.rows) / 990_000 == pytest.approx(0.2, abs=0.005)


def test_levels_share_evenly_and_harder_ones_fill_in():
    counts = Counter(row.extra["difficulty"] for row in make(difficulty=(2, 3), num_problems=301).rows)
    assert counts == {2: 150, 3: 151}
    counts = Counter(row.extra["difficulty"] for row in make(difficulty=(1, 3), num_problems=1000).rows)
    assert counts[1] + counts[3] == 1000 and 70 <= counts[1] <= 90


@pytest.mark.parametrize("level", [2, 3])
def test_the_same_seed_makes_the_same_problems_and_another_seed_others(level):
    first, same, other = (make(difficulty=(level,), seed=seed) for seed in (7, 7, 8))
    assert first.fingerprint == same.fingerprint != other.fingerprint


def test_an_unknown_split_is_an_input_error():
    with pytest.raises(InputError, match=r"data.split: expected train or test .*, got 'validation'"):
        make(split="validation")
