"""Tests runs whose prompts a curriculum draws by their pass rates."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from app.prompts.curriculum import FLOOR
from app.prompts.data_sources import load_training_data
from app.training.dynamic_sampling import gather_pass_rates
from settings import load
from settings.errors import InputError
from tests import program
from tests.replays import looked, replayed, samples_of, step_file
from tests.run_fixtures import SCHEDULED, run_once
from tests.tiny import make_sample

JUDGE = """\
def odd_digits(completions, **columns):
    return [sum(letter in "13579" for letter in one) / 2 for one in completions]
"""
"""A reward function whose values differ between completions of the tiny model and may exceed 1."""
FEW = ("data.curriculum=pass_rate", "data.num_problems=12", *program.UNJUDGED)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("judge") / "judge.py"
    path.write_text(JUDGE)
    # Its weight is 0, so the run does not train on it; the other function often gives a whole group the same reward.
    return f"reward.functions=[{{function: '{path}:odd_digits', weight: 0}}, arithmetic_format]"


@pytest.fixture(scope="module")
def drawn(graded: str, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Returns the directory of a run with a curriculum over twelve prompts, four per step; tests must not change it."""
    return run_once(tmp_path_factory, "drawn", tiny_model, *FEW, graded, "run.steps=8")


def uids_of(run: Path, step: int) -> list[str]:
    """Returns the prompts of a step in the order of its groups."""
    return list({sample.prompt.uid: None for sample in samples_of(run, step)})


def test_a_curriculum_draws_prompts_by_the_rewards_of_all_earlier_steps(drawn: Path) -> None:
    settings = load(str(drawn / "settings.yaml"), [], {}).settings
    uids = [row.uid for row in load_training_data(settings.data, seed=0).rows]
    rates: dict[str, float] = {}
    for step, line in enumerate(program.metrics_of(drawn), start=1):
        known = np.array([rates.get(uid, 0.5) for uid in uids])
        times = np.random.default_rng([0, 4 * (step - 1)]).standard_exponential(12) / (known * (1 - known) + FLOOR)
        assert uids_of(drawn, step) == [uids[row] for row in np.argsort(times)[:4]]
        samples = samples_of(drawn, step)
        for uid in uids_of(drawn, step):
            values = [(s.rewards or {})["odd_digits"] for s in samples if s.prompt.uid == uid]
            observed = sum(min(value, 1.0) for value in values) / len(values)
            rates[uid] = rates[uid] + (observed - rates[uid]) / 2 if uid in rates else observed
        assert line["data/seen_fraction"] == len(rates) / 12
        assert line["data/pass_rate_mean"] == pytest.approx(np.mean(list(rates.values())))
    assert program.progress_of(drawn, 8)["pass_rates"] == rates
    assert len({*rates.values()}) > 3, "the rates differ"
    assert len(rates) < 32, "prompts came again"


def test_a_replay_ignores_the_curriculum_of_its_run_and_refuses_a_new_one(
    drawn: Path, finished: Path, tmp_path: Path
) -> None:
    again = replayed(drawn, tmp_path)
    program.assert_same_state(again, drawn, step=8)
    assert not any(name.startswith("data/pass_rate") for name in program.metrics_of(again)[-1])
    for at in (finished, step_file(finished, 1)):
        with pytest.raises(InputError, match=r"a replay uses the prompts of its samples; set data.curriculum to none"):
            looked(finished, "data.curriculum=pass_rate", at=at)


def test_a_resumed_curriculum_draws_the_same_prompts_and_counts_filtered_groups(graded: str, config: Path):
    chosen = ("data.curriculum=pass_rate", graded, "algorithm.filter=zero_variance", "algorithm.max_rounds=3")
    straight = program.run_of(config)
    program.succeeded(program.train_here(config, *chosen))
    stopped = program.copy_until(straight, straight.with_name("stopped"), step=2)
    program.succeeded(program.train_here(config, *chosen, "run.name=stopped", resume="must"))
    program.assert_same_run(stopped, straight, step=4)
    learned = {uid for step in (1, 2, 3, 4) for uid in uids_of(straight, step)}
    progress = program.progress_of(straight, 4)
    assert max(line["rollout/num_rounds"] for line in program.metrics_of(straight)[1:] if line["step"]) > 1
    assert learned < progress["pass_rates"].keys() and len(progress["pass_rates"]) <= progress["position"]
    result = program.train_here(config, *chosen, "data.curriculum=none", "run.steps=5", resume="must")
    assert result.exit_code == 2 and "data.curriculum was 'pass_rate' and is now 'none'" in result.stderr


def test_rounds_that_are_pending_at_the_same_time_have_different_prompts(graded: str, config: Path) -> None:
    ahead = (*SCHEDULED, "rollout.max_staleness=1", "run.steps=6")
    program.succeeded(program.train_here(config, *FEW, graded, *ahead))
    steps = [uids_of(program.run_of(config), step) for step in range(1, 7)]
    for before, after in itertools.pairwise(steps):
        assert len({*before, *after}) == 8
    assert len({uid for step in steps for uid in step}) <= 12


def test_the_pass_rate_of_a_group_is_the_mean_over_its_graded_samples() -> None:
    grades = [[{"judge": 1.0}, {"judge": -3.0, "other": 9.0}], [{"judge": 0.5}, None, {"other": 1.0}], [None, {}]]
    samples = [make_sample([1], group_id=i, rewards=one) for i, group in enumerate(grades) for one in group]
    assert gather_pass_rates(samples, judge="judge") == [("row-0", 0.5), ("row-1", 0.5), ("row-2", None)]
