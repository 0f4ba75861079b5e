"""Tests of settings of a run as the base of another run, with another algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings import load
from settings.checks.commands import check_for_train
from settings.loading.algorithm_presets import ALGORITHM_PRESETS
from settings.loading.config_file import ConfigFile, find_config_file
from settings.loading.inherited_settings import reset_overrides


def written(folder: Path, *overrides: str) -> ConfigFile:
    path = folder / "settings.yaml"
    path.write_text(load(None, overrides, {}).to_yaml())
    return find_config_file(str(path))


@pytest.mark.parametrize("name", ALGORITHM_PRESETS)
@pytest.mark.parametrize("before", ["grpo", "dapo", "ppo"])
def test_another_algorithm_is_what_it_would_be_without_the_run(tmp_path: Path, before: str, name: str) -> None:
    path = written(tmp_path, f"algorithm.name={before}", "algorithm.max_tokens_per_device=512")
    chosen = [f"algorithm.name={name}"]
    again = load(path, [*chosen, *reset_overrides(path, chosen, {})], {})
    check_for_train(again)
    expected = load(None, [*chosen, "algorithm.max_tokens_per_device=512"], {})
    assert again.settings.algorithm == expected.settings.algorithm


def test_what_somebody_has_set_stays(tmp_path: Path) -> None:
    path = written(tmp_path, "algorithm.name=dapo", "algorithm.filter=none")
    chosen = ["algorithm.name=grpo", "algorithm.clip_high=0.3"]
    algorithm = load(path, [*chosen, *reset_overrides(path, chosen, {})], {}).settings.algorithm
    assert (algorithm.filter, algorithm.clip_high, algorithm.loss_aggregation) == (
        *("none", 0.3),
        ALGORITHM_PRESETS["grpo"].loss_aggregation,
    )


def test_without_another_algorithm_everything_is_what_the_run_had(tmp_path: Path) -> None:
    path = written(tmp_path, "algorithm.name=dapo")
    assert reset_overrides(path, ["run.steps=3"], {}) == []
    assert reset_overrides(path, [], {"GRPO__ALGORITHM__NAME": "grpo"}) != []


def test_a_run_of_several_hosts_is_the_base_of_one_on_a_single_host(tmp_path: Path) -> None:
    hosts = ("mesh.coordinator_address='host0:1234'", "mesh.num_processes=2", "mesh.process_id=0")
    path = written(tmp_path, *hosts)
    mesh = load(path, reset_overrides(path, [], {}), {}).settings.mesh
    assert (mesh.coordinator_address, mesh.num_processes, mesh.process_id) == (None, None, None)
    # Whoever names them now is asked.
    assert reset_overrides(path, hosts, {}) == []


@pytest.mark.parametrize(
    ("before", "chosen"),
    [
        ((), ["rollout.max_new_tokens=64"]),
        ((), ["rollout.prompts_per_step=8", "rollout.pool=local", "data.source=hf:openai/gsm8k:main"]),
        (("score.max_tokens_per_device=2048",), ["score.max_tokens_per_device=1024"]),
        ((), ["score.rows_per_device=2"]),
        (("score.critic.rows_per_device=2",), ["algorithm.max_tokens_per_device=512"]),
        (("algorithm.rows_per_device=4",), ["algorithm.rows_per_device=2"]),
    ],
    ids=["length", "sizes", "quota", "rows", "role", "critic"],
)
def test_what_nobody_has_set_follows_what_somebody_now_sets(
    tmp_path: Path, before: tuple[str, ...], chosen: list[str]
) -> None:
    path = written(tmp_path, *before)
    again = load(path, [*chosen, *reset_overrides(path, chosen, {})], {}).settings
    kept = [one for one in before if one.partition("=")[0] not in "\n".join(chosen)]
    assert again == load(None, [*kept, *chosen], {}).settings


def test_a_role_s_own_quota_stays_where_that_of_scoring_changes(tmp_path: Path) -> None:
    path = written(tmp_path, "score.max_tokens_per_device=2048", "score.reference.max_tokens_per_device=64")
    chosen = ["score.max_tokens_per_device=1024"]
    score = load(path, [*chosen, *reset_overrides(path, chosen, {})], {}).settings.score
    assert (score.policy.max_tokens_per_device, score.reference.max_tokens_per_device) == (1024, 64)
