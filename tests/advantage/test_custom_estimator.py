"""Tests advantages that a user's function computes: its arguments, its results and failed calls."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import grpo
from app.advantage.custom_estimator import SETTING, CustomEstimator
from app.records.sample import Sample
from app.reward.aggregate import OnError
from app.reward.function_pool import open_pool, register_callables
from app.reward.plugin import PlugIn
from app.runtime.health_checks import RewardError
from settings import load
from settings.errors import InputError
from settings.schema.reward import PluginSettings
from tests import program
from tests.replays import assert_same_steps, looked, replay, replayed, step_file
from tests.reward.samples import columns_of, make_group

SAMPLES = [*make_group("a", "bb", group=7), *make_group("cccc", group=3)]
REWARDS = np.array([1.0, 0.0, 2.0])


@contextmanager
def opened(function: Callable[..., Any] | str, *, on_error: OnError = "zero") -> Iterator[CustomEstimator]:
    name = function if isinstance(function, str) else "callable:f"
    with register_callables({} if isinstance(function, str) else {SETTING: function}), ExitStack() as stack:
        pool = open_pool(name, PluginSettings(timeout_s=1.0), stack, name=SETTING, setting=SETTING)
        plug_in = PlugIn(SETTING, pool, columns_of(SAMPLES), batch_size=1, is_estimator=True)
        yield CustomEstimator(plug_in, on_error=on_error)


def advantages_by(function: Callable[..., Any] | str) -> tuple[list[list[float]], str | None]:
    """Returns the advantages of all tokens, and the error that ends a run."""
    with opened(function, on_error="raise") as estimator:
        samples, fatal_error = estimator(SAMPLES, REWARDS)
    return [advantages_of(sample) for sample in samples], fatal_error


def advantages_of(sample: Sample) -> list[float]:
    assert sample.advantages is not None
    return sample.advantages.tolist()


def test_estimator_is_called_per_prompt_or_once_per_step_if_it_takes_group_ids() -> None:
    calls = []

    def of_prompt(rewards, lengths, policy_versions, completions, answer):
        calls.append((rewards, lengths, policy_versions, completions, answer))
        return [reward - max(rewards) for reward in rewards]

    assert advantages_by(of_prompt) == ([[0], [-1, -1], [0, 0, 0, 0]], None)
    assert calls == [
        ([1, 0], [1, 2], [0, 0], ["a", "bb"], ["18", "18"]),
        ([2], [4], [0], ["cccc"], ["18"]),
    ]
    by_batch = advantages_by(lambda rewards, group_ids: [r * g for r, g in zip(rewards, group_ids, strict=True)])
    assert by_batch == ([[7], [0, 0], [6] * 4], None)
    assert advantages_by(lambda **columns: [len(columns)] * len(columns["rewards"]))[0][0][0] > len(calls[0])


def test_estimator_may_return_one_advantage_per_token() -> None:
    def ramp(rewards, lengths):
        return [np.arange(n) * r if r else list(range(n)) for r, n in zip(rewards, lengths, strict=True)]

    assert advantages_by(ramp)[0] == [[0], [0, 1], [0, 2, 4, 6]]
    masked = [s if s.group_id == 7 else _masked(s, [True, False, True, False]) for s in SAMPLES]
    with opened(ramp) as estimator:
        assert advantages_of(estimator(masked, REWARDS)[0][2]) == [0, 0, 4, 0]


def _masked(sample: Sample, mask: list[bool]) -> Sample:
    return replace(sample, loss_mask=np.asarray(mask))


@pytest.mark.parametrize("on_error", ["raise", "zero", "drop"])
def test_a_failed_estimator_call_zeroes_or_drops_only_the_samples_of_its_prompt(on_error: OnError, caplog) -> None:
    def fails(rewards):
        return [1 / (2 - reward) for reward in rewards]

    with opened(fails, on_error=on_error) as estimator:
        samples, fatal_error = estimator(SAMPLES, REWARDS)
    assert [advantages_of(sample) for sample in samples] == [[1], [0.5, 0.5], [0] * 4]
    assert [sample.mask.any() for sample in samples] == [True, True, on_error != "drop"]
    failure = f"{SAMPLES[2].uid}: raised: ZeroDivisionError"
    assert failure in (fatal_error or caplog.text)
    assert (fatal_error is None) == (on_error != "raise") == ("failed on 1 of 3 samples" in caplog.text)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (1.0, "value: returned float 1.0, expected a list of 2 numbers or lists"),
        ([1.0], "length: returned a list of length 1, expected 2"),
        ([1.0, None], "value: returned None, expected a number"),
        ([1.0, float("nan")], "value: returned nan, expected a finite number"),
        ([1.0, -1e39], "value: returned -1e+39, expected a magnitude of at most 3.40282e+38"),
        ([1.0, [1.0]], "value: returned a list of length 1 for a sample of 2 tokens"),
        ([1.0, ["x", 1]], "value: returned str 'x', expected a number"),
        ([1.0, "12"], "value: returned str '1', expected a number"),
    ],
)
def test_a_trial_call_refuses_an_unusable_estimator_result_before_the_run(result: Any, message: str) -> None:
    with opened(lambda rewards: result) as estimator, pytest.raises(InputError) as error:
        estimator.try_on(SAMPLES[:2])
    assert f"algorithm.estimator: callable:f: the trial call before training failed: {message}" in str(error.value)


def test_unusable_estimator_functions_are_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be filled: `baseline`; .* An estimator takes `rewards`, `lengths`,"):
        advantages_by(lambda rewards, baseline: rewards)
    with pytest.raises(InputError, match=r"^algorithm.estimator: callable:f is a Python function passed to"):
        advantages_by("callable:f")
    (tmp_path / "own.py").write_text("def f(rewards):\n    while rewards[0] == 2: pass\n    return rewards")
    advantages, error = advantages_by(f"{tmp_path}/own.py:f")
    assert advantages == [[1], [0, 0], [0] * 4] and error is not None and ": timeout: " in error
    for value in ("gea", "own.py"):
        with pytest.raises(InputError, match=r"algorithm.estimator: expected one of grpo, .*path/to/file.py:name"):
            load(None, [f"algorithm.estimator={value}"], {})


def test_custom_estimator_trains_like_the_built_in_one_and_replay_does_not_need_it(
    config: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def centered(rewards):\n    mean = sum(rewards) / len(rewards)\n    return [r - mean for r in rewards]\n"
    )
    chosen = ("run.steps=2", *program.UNJUDGED)
    for name, estimator in (("custom", f"{own}:centered"), ("built_in", "dr_grpo")):
        overrides = (*chosen, f"run.name={name}", f"algorithm.estimator={estimator}")
        program.succeeded(program.train_here(config, *overrides))
    runs = config.parent / "runs"
    program.assert_same_run(runs / "custom", runs / "built_in", step=2)
    own.unlink()
    program.succeeded(replay(runs / "custom", tmp_path / "replays", *chosen))
    (again,) = (tmp_path / "replays").iterdir()
    assert_same_steps(again, runs / "custom", steps=(1, 2))
    # Saved advantages are not reused if they would include a penalty or exclude other samples.
    assert looked(runs / "custom").uses_saved_advantages
    for other in (("algorithm.beta=0.1", "algorithm.kl_in=advantage"), ("algorithm.mask_truncated=true",)):
        assert not looked(runs / "custom", *other).uses_saved_advantages


def test_a_failed_estimator_call_ends_a_run_started_from_python(config: Path) -> None:
    calls = []

    def third(rewards):
        calls.append(rewards)
        return [1 / (3 - len(calls))] * len(rewards)

    overrides = {"algorithm.estimator": third, "run.steps": 1, "eval.every_steps": 0, "checkpoint.best_metric": None}
    with pytest.raises(RewardError) as error:
        grpo.train(str(config), overrides)
    assert str(error.value).startswith("algorithm.estimator: callable:third: ")
    assert ": raised: ZeroDivisionError: " in str(error.value) and "or set reward.on_error to zero" in str(error.value)


def test_replay_excludes_the_samples_of_failed_estimator_calls(config: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def spread(rewards):\n    return [r / (max(rewards) - min(rewards)) for r in rewards]\n")
    chosen = (f"algorithm.estimator={own}:spread", "reward.on_error=drop", "run.steps=2", *program.UNJUDGED)
    program.succeeded(program.train_here(config, *chosen))
    run = program.run_of(config)
    left_out = [record for record in program.records_of(step_file(run, 1)) if not any(record.get("loss_mask", [True]))]
    assert left_out and all(record["reward"] is not None for record in left_out)
    own.unlink()
    assert_same_steps(replayed(run, tmp_path / "replays", "run.steps=2", *program.UNJUDGED), run, steps=(1, 2))
