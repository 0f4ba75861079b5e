"""Tests the order of prompts, and the built-in arithmetic problems."""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.prompts.arithmetic import make_problems
from app.prompts.prompt_order import MixtureOrder, PromptOrder
from settings.errors import InputError


@st.composite
def orders(draw, max_rows=40):
    """Strategy that draws an order, and a step size that does not exceed the data set."""
    num_rows = draw(st.integers(1, max_rows))
    order = PromptOrder(seed=draw(st.integers(0, 2**31 - 1)), num_rows=num_rows, shuffle=draw(st.booleans()))
    return order, draw(st.integers(1, num_rows))


def take_steps(order, count, num_steps, start=0):
    return [order.row_indices(start + step * count, count) for step in range(num_steps)]


def queued_steps(order, count, num_steps):
    """Computes the order with a queue that defers prompts already in the step."""
    epoch, queue, steps = 0, [], []
    for _ in range(num_steps):
        step = []
        while len(step) < count:
            if not queue:
                # A step that is a whole epoch defers nothing.
                queue = order.row_indices(epoch * order.num_rows, order.num_rows).tolist()
                assert sorted(queue) == list(range(order.num_rows))
                epoch += 1
            step.append(queue.pop(next(i for i, index in enumerate(queue) if index not in step)))
        steps.append(step)
    return steps


@settings(max_examples=50)
@given(orders(max_rows=25))
def test_each_epoch_is_a_permutation_that_defers_prompts_already_in_the_step(drawn):
    order, count = drawn
    num_steps = 6 * order.num_rows // count + 2
    # Steps are computed backwards, each by a new object: they depend only on their position, as after a resume.
    steps = [replace(order).row_indices(step * count, count).tolist() for step in reversed(range(num_steps))]
    assert steps[::-1] == queued_steps(order, count, num_steps)


@settings(max_examples=50)
@given(orders(), st.integers(0, 1000))
def test_a_step_at_any_position_has_distinct_prompts(drawn, position):
    order, count = drawn
    for step in take_steps(order, count, 10, start=position):
        assert len(set(step.tolist())) == count


@given(st.integers(1, 5), st.integers(6, 30))
def test_rows_repeat_evenly_if_a_step_needs_more_prompts(num_rows, count):
    step = PromptOrder(seed=1, num_rows=num_rows, shuffle=True).row_indices(0, count)
    times = Counter(step.tolist()).values()
    assert len(step) == count and len(times) == num_rows and max(times) - min(times) <= 1


def test_epochs_and_seeds_have_different_orders_if_shuffled():
    first, other = (PromptOrder(seed=seed, num_rows=50, shuffle=True) for seed in (1, 2))
    first.row_indices(0, 50)[:] = 0  # Callers cannot change the order.
    steps = [*take_steps(first, 50, 4), other.row_indices(0, 50)]
    assert len({tuple(step.tolist()) for step in steps}) == 5 and sorted(steps[0]) == list(range(50))
    plain = PromptOrder(seed=1, num_rows=10, shuffle=False)
    assert np.concatenate(take_steps(plain, 4, 5)).tolist() == [*range(10), *range(10)]
    # A late step of a large data set is computed at once.
    assert len({*PromptOrder(seed=0, num_rows=100_000, shuffle=True).row_indices(512 * 10**9, 512).tolist()}) == 512


@st.composite
def mixtures(draw):
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    ends = np.cumsum([0, *sizes])
    rows = [np.arange(first, last) for first, last in pairwise(ends)]
    weights = draw(st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes)))
    return MixtureOrder(draw(st.integers(0, 2**31 - 1)), rows, weights, draw(st.booleans()))


def of_source(order: MixtureOrder, stream: np.ndarray, source: int) -> np.ndarray:
    return stream[np.isin(stream, order.rows[source])]


@settings(max_examples=25)
@given(mixtures(), st.integers(1, 500), st.integers(0, 30_000), st.integers(1, 9))
def test_the_order_of_a_mixture_does_not_depend_on_the_step_size(order, num, start, count):
    whole = order.row_indices(start, num * count)
    assert np.concatenate(take_steps(order, count, num, start=start)).tolist() == whole.tolist()


@settings(max_examples=30)
@given(mixtures(), st.integers(1, 25_000))
def test_each_source_of_a_mixture_has_its_share_of_any_number_of_prompts(order, num):
    stream, total = order.row_indices(0, num), sum(order.weights)
    for source, weight in enumerate(order.weights):
        share = num * weight / total
        # A share is a multiple of 1 / 10,000, and at least that.
        assert abs(len(of_source(order, stream, source)) - share) <= 2 + num * len(order.weights) / 10_000


@settings(max_examples=25)
@given(mixtures())
def test_each_epoch_of_a_source_is_a_permutation_without_early_repeats(order):
    stream = order.row_indices(0, 2_000)
    for source, rows in enumerate(order.rows):
        taken, size = of_source(order, stream, source), len(rows)
        for epoch in range(len(taken) // size):
            assert sorted(taken[epoch * size : (epoch + 1) * size]) == rows.tolist()
        for first in range(len(taken) - size // 3):
            assert len(set(taken[first : first + size // 3].tolist())) == size // 3


def test_a_mixture_alternates_sources_evenly_and_the_seed_shuffles_its_rows():
    rows = [np.arange(30), np.arange(30, 40)]
    plain = MixtureOrder(0, rows, [3.0, 1.0], shuffle=False).row_indices(0, 8)
    assert plain.tolist() == [0, 1, 30, 2, 3, 4, 31, 5]
    first, other = (MixtureOrder(seed, rows, [3.0, 1.0], shuffle=True).row_indices(0, 40).tolist() for seed in (1, 2))
    assert first != other and sorted(first[:40]) != first[:40]
    assert Counter(index >= 30 for index in first) == {False: 30, True: 10}


def make(**changes):
    plain = {"difficulty": (1, 2), "operators": ("+",), "num_problems": 300, "split": "train", "seed": 0}
    return make_problems(**(plain | changes))


def parse(row):
    match = re.fullmatch(r"(\d+) ([-+*]) (\d+) = \?", row.prompt)
    assert match, row.prompt
    return int(match[1]), match[2], int(match[3])


def canonical(row):
    left, operator, right = parse(row)
    return (left, operator, right) if operator == "-" else (min(left, right), operator, max(left, right))


LEVELS = st.sets(st.integers(1, 3), min_size=1).map(tuple)
OPERATORS = st.sets(st.sampled_from("+-*"), min_size=1).map(tuple)


@settings(max_examples=5)
@given(LEVELS, OPERATORS, st.integers(1, 500), st.sampled_from(["train", "test"]), st.integers(0, 2**31 - 1))
def test_arithmetic_problems_are_correct_unique_and_of_their_level(difficulty, operators, num_problems, split, seed):
    rows = make(difficulty=difficulty, operators=operators, num_problems=num_problems, split=split, seed=seed).rows
    assert len({row.uid for row in rows}) == len(rows) <= num_problems
    for row in rows:
        left, operator, right = parse(row)
        assert operator in operators and row.extra["operator"] == operator
        assert max(len(str(left)), len(str(right))) == row.extra["difficulty"] in difficulty
        expected = {"+": left + right, "-": left - right, "*": left * right}[operator]
        assert row.answer == str(expected)


@settings(max_examples=4)
@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), LEVELS, OPERATORS)
def test_training_and_test_splits_share_no_problem_for_any_seeds(seed, other_seed, difficulty, operators):
    train = make(split="train", seed=seed, difficulty=difficulty, operators=operators, num_problems=1000)
    test = make(split="test", seed=other_seed, difficulty=difficulty, operators=operators, num_problems=1000)
    assert not {canonical(row) for row in train.rows} & {canonical(row) for row in test.rows}


@pytest.mark.parametrize(("operator", "level", "total"), [("-", 1, 100), ("+", 2, 9_900), ("*", 2, 9_900)])
def test_the_splits_partition_all_problems_of_a_level_with_a_fifth_for_testing(operator, level, total):
    sizes = [
        len(make(split=split, difficulty=(level,), operators=(operator,), num_problems=10**6).rows)
        for split in ("train", "test")
    ]
    assert sum(sizes) == total
    assert sizes[1] == pytest.approx(total / 5, abs=2 * total**0.5)


def test_difficulty_levels_have_equal_shares_and_the_seed_determines_the_problems():
    with pytest.raises(InputError, match=r"data.split: expected train or test .*, got 'validation'"):
        make(split="validation")
    counts = Counter(row.extra["difficulty"] for row in make(difficulty=(2, 3), num_problems=301).rows)
    assert counts == {2: 150, 3: 151}
    counts = Counter(row.extra["difficulty"] for row in make(difficulty=(1, 3), num_problems=1000).rows)
    assert counts[1] + counts[3] == 1000 and 70 <= counts[1] <= 90
    first, same, other = (make(difficulty=(2,), seed=seed) for seed in (7, 7, 8))
    assert first.fingerprint == same.fingerprint != other.fingerprint
