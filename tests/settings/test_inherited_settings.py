"""Tests that the settings of a run can be the base of another run, also with another algorithm."""

import pytest

from settings import Resolved, load
from settings.checks.commands import check_for_train
from settings.loading.algorithm_presets import ALGORITHM_PRESETS
from settings.loading.config_file import ConfigFile
from settings.loading.printing import without_derived
from tests.settings.loading import with_sets

HOSTS = ("mesh.coordinator_address=host0:1234", "mesh.num_processes=2", "mesh.process_id=0")


def written(*overrides: str) -> ConfigFile:
    return ConfigFile("settings.yaml", "settings", with_sets(*overrides).to_yaml().encode())


def based_on(file: ConfigFile, *chosen: str) -> Resolved:
    return load(without_derived(file), chosen, {})


@pytest.mark.parametrize(("before", "name"), [("ppo", name) for name in ALGORITHM_PRESETS] + [("grpo", "ppo")])
def test_replay_under_another_algorithm_uses_the_defaults_of_that_algorithm(before: str, name: str) -> None:
    quota, chosen = "algorithm.max_tokens_per_device=512", (f"algorithm.name={name}", "reference.path=teacher")
    again = based_on(written(f"algorithm.name={before}", quota), *chosen)
    check_for_train(again)
    assert again.settings.algorithm == with_sets(*chosen, quota).settings.algorithm


def test_replayed_settings_keep_what_was_set_explicitly() -> None:
    file = written("algorithm.name=dapo", "algorithm.filter=none")
    algorithm = based_on(file, "algorithm.name=grpo", "algorithm.clip_high=0.3").settings.algorithm
    assert (algorithm.filter, algorithm.clip_high) == ("none", 0.3)
    assert algorithm.loss_aggregation == ALGORITHM_PRESETS["grpo"].loss_aggregation


def test_replay_without_overrides_has_the_settings_of_the_run() -> None:
    on_gpu = "model.path=owner/name", "mesh.platform=cuda"
    file = written("algorithm.name=dapo", "score.strategy=off", "algorithm.rows_per_device=2", *on_gpu)
    assert based_on(file).settings == load(file, [], {}).settings
    assert based_on(file, "mesh.platform=cpu").settings.model.dtype == "bfloat16"
    line = file.content.decode().split("\n").index("  name: dapo  # set") + 1
    assert based_on(file).provenance["algorithm.name"] == f"yaml:settings.yaml:{line}"


def test_settings_of_a_multi_host_run_lose_their_hosts_in_a_replay() -> None:
    mesh = based_on(written(*HOSTS)).settings.mesh
    assert (mesh.coordinator_address, mesh.num_processes, mesh.process_id) == (None, None, None)
    # Hosts that are given explicitly are used.
    assert based_on(written(*HOSTS), *HOSTS).settings.mesh.process_id == 0


@pytest.mark.parametrize(
    ("before", "chosen"),
    [
        ([], ["rollout.max_new_tokens=64", "rollout.prompts_per_step=8", "data.source=hf:openai/gsm8k:main"]),
        (["score.max_tokens_per_device=2048"], ["score.max_tokens_per_device=1024"]),
        ([], ["score.rows_per_device=2"]),
        (["score.critic.rows_per_device=2"], ["algorithm.max_tokens_per_device=512"]),
        (["algorithm.rows_per_device=4"], ["algorithm.rows_per_device=2"]),
        (
            ["score.max_tokens_per_device=2048", "score.reference.max_tokens_per_device=64"],
            ["score.max_tokens_per_device=1024"],
        ),
    ],
    ids=["lengths", "quota", "rows", "role", "critic", "quota of a role"],
)
def test_derived_values_of_a_replay_follow_its_new_settings(before: list[str], chosen: list[str]) -> None:
    kept = [one for one in before if one.partition("=")[0] not in [other.partition("=")[0] for other in chosen]]
    assert based_on(written(*before), *chosen).settings == with_sets(*kept, *chosen).settings
