from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.prompts.prompt_order import MixtureOrder, PromptOrder, host_slice


@st.composite
def orders(draw, max_rows=40):
    """Strategy for an order, and a step size that does not exceed the data set."""
    num_rows = draw(st.integers(1, max_rows))
    order = PromptOrder(seed=draw(st.integers(0, 2**31 - 1)), num_rows=num_rows, shuffle=draw(st.booleans()))
    return order, draw(st.integers(1, num_rows))


def take_steps(order, count, num_steps, start=0):
    return [order.row_indices(start + step * count, count) for step in range(num_steps)]


def ask_in_turn(order, count, num_steps):
    """Computes the order by a queue that defers prompts which the step already has."""
    epoch, queue, steps = 0, [], []
    for _ in range(num_steps):
        step = []
        while len(step) < count:
            if not queue:
                queue = order._permutation(epoch).tolist()
                epoch += 1
            step.append(queue.pop(next(i for i, index in enumerate(queue) if index not in step)))
        steps.append(step)
    return steps


@given(orders())
def test_every_epoch_is_a_permutation(drawn):
    order, count = drawn
    num_steps = -(-3 * order.num_rows // count)
    stream = np.concatenate(take_steps(order, count, num_steps))
    for epoch in range(3):
        part = stream[epoch * order.num_rows : (epoch + 1) * order.num_rows]
        assert sorted(part) == list(range(order.num_rows))


@given(orders(max_rows=200))
def test_no_step_asks_a_prompt_twice(drawn):
    order, count = drawn
    for step in take_steps(order, count, 5 * order.num_rows // count + 2):
        assert len(set(step.tolist())) == count


@given(orders(max_rows=25))
def test_order_equals_walking_the_stream_with_a_queue(drawn):
    order, count = drawn
    num_steps = 6 * order.num_rows // count + 2
    assert [step.tolist() for step in take_steps(order, count, num_steps)] == ask_in_turn(order, count, num_steps)


@given(orders(), st.integers(0, 1000))
def test_a_changed_step_size_still_asks_no_prompt_twice(drawn, position):
    order, count = drawn
    for step in take_steps(order, count, 10, start=position):
        assert len(set(step.tolist())) == count


@given(orders(), st.integers(0, 30))
def test_resuming_from_a_position_equals_continuing(drawn, done):
    order, count = drawn
    resumed = PromptOrder(seed=order.seed, num_rows=order.num_rows, shuffle=order.shuffle)
    for left, right in zip(
        take_steps(order, count, done + 5)[done:],
        take_steps(resumed, count, 5, start=done * count),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


@given(orders(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 20))
def test_hosts_together_take_what_one_host_takes(drawn, num_hosts, step):
    order, _ = drawn
    count = 8
    indices = order.row_indices(step * count, count)
    parts = [host_slice(indices, process_index=i, process_count=num_hosts) for i in range(num_hosts)]
    np.testing.assert_array_equal(np.concatenate(parts), indices)
    assert {len(part) for part in parts} == {count // num_hosts}


@given(st.integers(1, 5), st.integers(6, 30))
def test_fewer_rows_than_a_step_wrap_around_evenly(num_rows, count):
    step = PromptOrder(seed=1, num_rows=num_rows, shuffle=True).row_indices(0, count)
    times = Counter(step.tolist()).values()
    assert len(step) == count and len(times) == num_rows and max(times) - min(times) <= 1


def test_epochs_and_seeds_have_different_orders():
    steps = take_steps(PromptOrder(seed=1, num_rows=50, shuffle=True), 50, 4)
    steps += take_steps(PromptOrder(seed=2, num_rows=50, shuffle=True), 50, 1)
    assert len({tuple(step.tolist()) for step in steps}) == 5


def test_without_shuffle_the_rows_come_in_file_order():
    order = PromptOrder(seed=1, num_rows=10, shuffle=False)
    stream = np.concatenate(take_steps(order, 4, 5))
    assert stream.tolist() == [*range(10), *range(10)]
    assert all((b - a) % 10 == 1 for a, b in pairwise(stream.tolist()))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_caller_cannot_change_the_order(shuffle):
    order = PromptOrder(seed=1, num_rows=10, shuffle=shuffle)
    order.row_indices(0, 10)[:] = 0
    assert sorted(order.row_indices(0, 10)) == list(range(10))


def test_a_late_step_of_a_large_data_set_costs_no_more_than_an_early_one():
    order = PromptOrder(seed=0, num_rows=100_000, shuffle=True)
    assert len(set(order.row_indices(512 * 10**9, 512).tolist())) == 512


@st.composite
def mixtures(draw):
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    ends = np.cumsum([0, *sizes])
    rows = [np.arange(first, last) for first, last in pairwise(ends)]
    weights = draw(st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes)))
    return MixtureOrder(draw(st.integers(0, 2**31 - 1)), rows, weights, draw(st.booleans()))


def of_source(order: MixtureOrder, stream: np.ndarray, source: int) -> np.ndarray:
    return stream[np.isin(stream, order.rows[source])]


@given(mixtures(), st.integers(1, 500), st.integers(0, 30_000), st.integers(1, 9))
def test_a_mixture_does_not_depend_on_the_size_of_steps(order, num, start, count):
    whole = order.row_indices(start, num * count)
    assert np.concatenate(take_steps(order, count, num, start=start)).tolist() == whole.tolist()


@given(mixtures(), st.integers(1, 25_000))
def test_every_source_has_its_share_of_a_mixture_at_any_time(order, num):
    stream, total = order.row_indices(0, num), sum(order.weights)
    for source, weight in enumerate(order.weights):
        share = num * weight / total
        # A share is a multiple of 1 / 10,000, and at least that.
        assert abs(len(of_source(order, stream, source)) - share) <= 2 + num * len(order.weights) / 10_000


@given(mixtures())
def test_every_epoch_of_a_source_is_a_permutation_and_repeats_nothing_soon(order):
    stream = order.row_indices(0, 2_000)
    for source, rows in enumerate(order.rows):
        taken, size = of_source(order, stream, source), len(rows)
        for epoch in range(len(taken) // size):
            assert sorted(taken[epoch * size : (epoch + 1) * size]) == rows.tolist()
        for first in range(len(taken) - size // 3):
            assert len(set(taken[first : first + size // 3].tolist())) == size // 3


def test_a_mixture_alternates_evenly_and_is_shuffled_by_the_seed():
    rows = [np.arange(30), np.arange(30, 40)]
    plain = MixtureOrder(0, rows, [3.0, 1.0], shuffle=False).row_indices(0, 8)
    assert plain.tolist() == [0, 1, 30, 2, 3, 4, 31, 5]
    first, other = (MixtureOrder(seed, rows, [3.0, 1.0], shuffle=True).row_indices(0, 40).tolist() for seed in (1, 2))
    assert first != other and sorted(first[:40]) != first[:40]
    assert Counter(index >= 30 for index in first) == {False: 30, True: 10}
