"""Tests that the registry lists exactly the metrics of runs."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from app.evaluation.prompt_metrics import estimate_metrics, prompt_columns
from app.report.metric_registry import METRICS, find_metric, matches
from app.rollout.counters import RolloutCounters
from app.runtime.advantages import make_advantage_estimator
from app.tracking.performance import rollout_performance
from app.tracking.sample_metrics import episode_metrics
from app.update.route_metrics import RouteCounts, route_metrics
from settings import load
from tests.episodes import with_turns
from tests.program import metrics_of, succeeded, train_here
from tests.replays import samples_of
from tests.run_fixtures import NO_REPORT, TINY, write_config
from tests.tiny_directory import write_model, write_reward_model


@pytest.fixture(scope="module")
def judged_by_plug_in(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the run directory of one PPO step with all optional metrics."""
    folder = tmp_path_factory.mktemp("judged")
    config = write_config(folder, TINY + NO_REPORT, tiny_model)
    model = f"reward.model={write_reward_model(folder / 'judge')}"
    teacher = f"reference.path={write_model(folder / 'teacher', seed=3)}"
    (folder / "judge.py").write_text("def judge(completion): return {'score': 1.0, 'length': len(completion)}\n")
    functions = f"reward.functions=['{folder / 'judge.py'}:judge']"
    ppo = ("algorithm.name=ppo", "algorithm.beta=0.1", "algorithm.kl_target=0.1", "algorithm.correction=truncate")
    workers = ("rollout.scheduler=adaptive", "rollout.workers.fast.slots=8", "rollout.workers.heavy.count=0")
    apart = ("rollout.max_staleness=1", "rollout.devices=0.5", "mesh.shape=1,4,1")
    succeeded(
        train_here(
            *(config, functions, model, teacher, *ppo, *workers, *apart),
            *("env.source=calculator", "data.curriculum=pass_rate", "run.steps=1", "eval.every_steps=0"),
        )
    )
    return folder / "runs" / "tiny"


NAMES = [name for entry in METRICS for name in entry.names]


def metrics_of_real_runs(*runs: Path) -> set[str]:
    """Returns the metrics of these runs, of an evaluation with several samples per prompt, of experts and episodes."""
    columns = prompt_columns(samples_of(runs[0], 1), judge="arithmetic", num_samples=4)
    several = estimate_metrics({name: np.array(column, float) for name, column in columns.items()}, num_samples=4)
    experts = route_metrics(RouteCounts(jnp.ones((2, 4)), differing=jnp.zeros(()), recorded=jnp.ones(())))
    metrics = ({"tool_calls": 1.0, "distance": 2.0}, {})
    turns = episode_metrics([with_turns([(1, 1), (1, 0)], scores={"win": 1.0}, metrics=metrics)])
    turns |= rollout_performance(RolloutCounters(resumed_rows=1))
    compared = ("algorithm.mask_truncated=true", "algorithm.reward_normalization=each_first")
    advantages = make_advantage_estimator(load(None, compared, {}).settings)(samples_of(runs[0], 1), 0.0).metrics
    of_runs = {name for run in runs for line in metrics_of(run) for name in line}
    return of_runs | several.keys() | experts.keys() | turns.keys() | advantages.keys()


def test_the_registry_has_exactly_the_metrics_of_runs(finished: Path, judged_by_plug_in: Path) -> None:
    metrics = metrics_of_real_runs(finished, judged_by_plug_in)
    assert len(metrics) > 40 and len(NAMES) == len(set(NAMES))
    assert [name for name in sorted(metrics) if find_metric(name) is None] == []
    assert [entry for entry in NAMES if not any(matches(entry, name) for name in metrics)] == []


def test_every_metric_has_a_meaning_a_healthy_range_and_a_remedy() -> None:
    assert all(map(all, METRICS))
