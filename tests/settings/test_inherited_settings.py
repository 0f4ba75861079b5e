"""Tests of settings of a run as the base of another run, with another algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings import Resolved, load
from settings.checks.commands import check_for_train
from settings.loading.algorithm_presets import ALGORITHM_PRESETS
from settings.loading.config_file import ConfigFile, find_config_file
from settings.loading.printing import without_derived


def written(folder: Path, *overrides: str) -> ConfigFile:
    path = folder / "settings.yaml"
    path.write_text(load(None, overrides, {}).to_yaml())
    return find_config_file(str(path))


def based_on(file: ConfigFile, *chosen: str) -> Resolved:
    return load(without_derived(file), chosen, {})


@pytest.mark.parametrize("name", ALGORITHM_PRESETS)
@pytest.mark.parametrize("before", ["grpo", "ppo"])
def test_another_algorithm_is_what_it_would_be_without_the_run(tmp_path: Path, before: str, name: str) -> None:
    file = written(tmp_path, f"algorithm.name={before}", "algorithm.max_tokens_per_device=512")
    again = based_on(file, f"algorithm.name={name}")
    check_for_train(again)
    expected = load(None, [f"algorithm.name={name}", "algorithm.max_tokens_per_device=512"], {})
    assert again.settings.algorithm == expected.settings.algorithm


def test_what_somebody_has_set_stays(tmp_path: Path) -> None:
    file = written(tmp_path, "algorithm.name=dapo", "algorithm.filter=none")
    algorithm = based_on(file, "algorithm.name=grpo", "algorithm.clip_high=0.3").settings.algorithm
    assert (algorithm.filter, algorithm.clip_high, algorithm.loss_aggregation) == (
        *("none", 0.3),
        ALGORITHM_PRESETS["grpo"].loss_aggregation,
    )


def test_without_another_choice_everything_is_what_the_run_had(tmp_path: Path) -> None:
    file = written(tmp_path, "algorithm.name=dapo", "score.strategy=off", "algorithm.rows_per_device=2")
    assert based_on(file).settings == load(file, [], {}).settings
    line = file.content.decode().split("\n").index("  name: dapo  # set") + 1
    assert based_on(file).provenance["algorithm.name"] == f"yaml:{file.name}:{line}"


def test_a_run_of_several_hosts_is_the_base_of_one_on_a_single_host(tmp_path: Path) -> None:
    hosts = ("mesh.coordinator_address='host0:1234'", "mesh.num_processes=2", "mesh.process_id=0")
    file = written(tmp_path, *hosts)
    mesh = based_on(file).settings.mesh
    assert (mesh.coordinator_address, mesh.num_processes, mesh.process_id) == (None, None, None)
    # Whoever names them now is asked.
    assert based_on(file, *hosts).settings.mesh.process_id == 0


@pytest.mark.parametrize(
    ("before", "chosen"),
    [
        ((), ["rollout.max_new_tokens=64"]),
        ((), ["rollout.prompts_per_step=8", "data.source=hf:openai/gsm8k:main"]),
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
    again = based_on(written(tmp_path, *before), *chosen).settings
    kept = [one for one in before if one.partition("=")[0] not in "\n".join(chosen)]
    assert again == load(None, [*kept, *chosen], {}).settings


def test_a_role_s_own_quota_stays_where_that_of_scoring_changes(tmp_path: Path) -> None:
    file = written(tmp_path, "score.max_tokens_per_device=2048", "score.reference.max_tokens_per_device=64")
    score = based_on(file, "score.max_tokens_per_device=1024").settings.score
    assert (score.policy.max_tokens_per_device, score.reference.max_tokens_per_device) == (1024, 64)
