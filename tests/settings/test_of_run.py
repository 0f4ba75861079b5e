"""A run's own settings are the base of another run, and another algorithm takes its consequences along."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings import load
from settings.checks import check_for_train
from settings.of_run import freed
from settings.papers import PAPERS


def written(folder: Path, *overrides: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(load(None, overrides, {}).to_yaml())
    return str(path)


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("before", ["grpo", "dapo", "ppo"])
def test_another_algorithm_is_what_it_would_be_without_the_run(tmp_path: Path, before: str, name: str) -> None:
    path = written(tmp_path, f"algorithm.name={before}", "algorithm.max_tokens_per_device=512")
    chosen = [f"algorithm.name={name}"]
    again = load(path, [*chosen, *freed(path, chosen, {})], {})
    check_for_train(again)
    expected = load(None, [*chosen, "algorithm.max_tokens_per_device=512"], {})
    assert again.settings.algorithm == expected.settings.algorithm


def test_what_somebody_has_set_stays(tmp_path: Path) -> None:
    path = written(tmp_path, "algorithm.name=dapo", "algorithm.filter=none")
    chosen = ["algorithm.name=grpo", "algorithm.clip_high=0.3"]
    algorithm = load(path, [*chosen, *freed(path, chosen, {})], {}).settings.algorithm
    assert (algorithm.filter, algorithm.clip_high, algorithm.loss_aggregation) == (
        *("none", 0.3),
        PAPERS["grpo"].loss_aggregation,
    )


def test_without_another_algorithm_everything_is_what_the_run_had(tmp_path: Path) -> None:
    path = written(tmp_path, "algorithm.name=dapo")
    assert freed(path, ["run.steps=3"], {}) == []
    assert freed(path, [], {"GRPO__ALGORITHM__NAME": "grpo"}) != []
