"""Tests the choice of checkpoints to keep."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint.checkpoint_managers import PreservationContext

from app.checkpoint.retention import BestCheckpoint, LatestAndBestPolicy


@dataclass
class Info:
    step: int
    metrics: None = None
    time: None = None


def kept(policy: LatestAndBestPolicy, steps: list[int]) -> list[int]:
    infos = [Info(step) for step in steps]
    flags = policy.should_preserve(infos, context=PreservationContext())  # pyright: ignore[reportArgumentType]
    return [step for step, stays in zip(steps, flags, strict=True) if stays]


def scored(scores: dict[int, float], **options) -> LatestAndBestPolicy:
    policy = LatestAndBestPolicy(**({"keep": 2, "metric": "eval/accuracy"} | options))
    for step, score in scores.items():
        policy.record_evaluation(step, {policy.metric or "eval/accuracy": score})
    return policy


def test_best_checkpoint_has_the_highest_or_lowest_value_depending_on_the_metric() -> None:
    for metric, best in (("eval/accuracy", 1), ("eval/mean_length", 2)):
        assert scored({1: 3.0, 2: 1.0, 3: 2.0}, metric=metric).best_step([1, 2, 3]) == best
        assert scored({1: 0.5, 2: 0.5}, metric=metric).best_step([2, 1]) == 1


def test_checkpoints_with_missing_or_infinite_values_are_never_the_best() -> None:
    policy = scored({1: float("nan"), 2: float("inf"), 3: 0.0})
    policy.record_evaluation(4, None)
    assert policy.best_step([1, 2, 3, 4]) == 3
    policy.record_evaluation(3, None)  # saved again, without an evaluation
    assert policy.best_step([3]) is None


def test_previous_best_checkpoint_is_kept_until_the_new_one_is_on_disk() -> None:
    policy = scored({1: 0.5, 5: 0.6}, keep=1)
    assert kept(policy, [1, 4, 5]) == [1, 5]
    assert policy.superseded([1, 5]) == 1
    assert kept(policy, [1, 5, 6]) == [5, 6]
    assert policy.superseded([5, 6]) is None
    assert scored({1: 0.5, 5: 0.6}, keep=2).superseded([1, 5]) is None


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=1, max_size=20), st.integers(1, 3))
def test_the_best_checkpoint_is_never_deleted(scores: list[int | None], keep: int) -> None:
    policy, steps, best = LatestAndBestPolicy(keep, "eval/accuracy"), [], None
    for step, score in enumerate(scores, start=1):
        policy.record_evaluation(step, None if score is None else {"eval/accuracy": float(score)})
        if policy.best_step([*steps, step]) == step:
            best = step
        steps = kept(policy, [*steps, step])
        assert policy.best_step(steps) == best
        assert steps[-keep:] == list(range(1, step + 1))[-keep:]
        assert len(steps) <= keep + 1


def test_a_checkpoint_worse_than_the_starting_policy_is_never_the_best() -> None:
    policy = scored({0: 0.5, 2: 0.1, 4: 0.4})
    assert policy.best_step([2, 4]) is None and kept(policy, [2, 4, 6, 8]) == [6, 8]
    assert policy.best_checkpoint([2, 4]) == BestCheckpoint(0, "eval/accuracy", 0.5)
    for step in (6, 8):
        policy.record_evaluation(step, {"eval/accuracy": 0.5})
    assert policy.best_checkpoint([2, 4, 6, 8]) == BestCheckpoint(6, "eval/accuracy", 0.5)
    assert policy.superseded([2, 4, 6]) is None
