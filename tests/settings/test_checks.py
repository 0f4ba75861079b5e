from __future__ import annotations

from pathlib import Path

import pytest

from settings import InputError, Resolved, load
from settings.checks.commands import (
    check_for_evaluation,
    check_for_mesh,
    check_for_rollout,
    check_for_score,
    check_for_train,
)
from settings.loading.config_file import preset_names
from tests.settings.loading import load_text


@pytest.fixture
def resolve(tmp_path: Path):
    """Loads `--set` overrides over the defaults of the schema."""
    path = tmp_path / "c.yaml"
    path.write_text("run: {seed: 0}")

    def resolve(*overrides: str) -> Resolved:
        return load(str(path), overrides, {})

    return resolve


def refusal(check, resolved: Resolved) -> str:
    with pytest.raises(InputError) as caught:
        check(resolved)
    return str(caught.value)


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_can_be_trained_with(preset: str) -> None:
    check_for_train(load(preset, [], {}))


@pytest.mark.parametrize("preset", [name for name in preset_names() if "gsm8k" in name])
def test_a_gsm8k_preset_asks_for_the_answer_where_it_is_looked_for(preset: str) -> None:
    """YAML reads an unquoted text up to ` #`, which starts a comment."""
    assert "####" in (load(preset, [], {}).settings.data.system_prompt or "")


def test_greedy_sampling_is_refused_by_train_alone(resolve) -> None:
    resolved = resolve("rollout.temperature=0", "rollout.group_size=1")
    message = refusal(check_for_train, resolved)
    assert "rollout.temperature = 0.0 (from --set): greedy samples of a prompt are identical" in message
    assert "rollout.group_size = 1 (from --set)" in message and "at least 2" in message
    assert len(message.splitlines()) == 2
    message = refusal(check_for_train, resolve("rollout.temperature=0", "algorithm.name=ppo"))
    assert "rollout.temperature = 0.0 (from --set): greedy sampling does not explore" in message
    check_for_rollout(resolved)
    check_for_score(resolved)


def test_a_penalty_of_weight_zero_has_no_place_in_the_reward(resolve) -> None:
    message = refusal(check_for_train, resolve("algorithm.kl_in=reward"))
    assert message.startswith("algorithm.kl_in = 'reward' (from --set): with algorithm.beta = 0.0 (from the default) ")
    assert "set algorithm.beta above 0" in message
    refusal(check_for_train, resolve("algorithm.kl_in=reward", "algorithm.beta=0"))
    check_for_train(resolve("algorithm.kl_in=reward", "algorithm.beta=0.05"))
    check_for_train(resolve("algorithm.name=rloo"))


def test_a_penalty_may_be_turned_off_by_a_later_layer_than_the_one_that_placed_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for target in ("null", "0.1"):
        path.write_text(f"algorithm: {{kl_in: reward, beta: 0.05, kl_target: {target}}}")
        check_for_train(load(str(path), ["algorithm.beta=0"], {}))
    path.write_text("algorithm: {beta: 0}")
    refusal(check_for_train, load(str(path), ["algorithm.kl_in=reward"], {}))


def test_a_penalty_is_adapted_only_where_there_is_one_in_the_reward(resolve) -> None:
    penalty = ("algorithm.beta=0.05", "algorithm.kl_target=0.1")
    check_for_train(resolve(*penalty, "algorithm.kl_in=reward"))
    message = refusal(check_for_train, resolve(*penalty))
    assert message.startswith("algorithm.kl_target = 0.1 (from --set): only a penalty in the reward can be adapted")
    assert "algorithm.kl_in = 'loss'" in message and "set algorithm.kl_in: reward" in message
    message = refusal(check_for_train, resolve("algorithm.kl_target=0.1"))
    assert "algorithm.beta = 0.0 (from the default) would stay 0" in message


def test_a_second_moment_of_8_bits_needs_a_fast_decay(resolve) -> None:
    rounded = "optimizer.second_moment=bfloat16"
    message = refusal(check_for_train, resolve(rounded))
    assert "the change of one update would be lost with optimizer.beta2 = 0.999" in message
    check_for_train(resolve(rounded, "optimizer.beta2=0.95"))
    check_for_train(resolve("optimizer.first_moment=bfloat16"))


def test_a_clip_that_cuts_nothing_below_belongs_to_cispo(resolve) -> None:
    message = refusal(check_for_train, resolve("algorithm.clip_low=1.5"))
    assert message.startswith("algorithm.clip_low = 1.5 (from --set): algorithm.clip = 'ppo' (from other settings)")
    assert "set it below 1" in message
    check_for_train(resolve("algorithm.clip_low=1.5", "algorithm.clip=cispo"))


def test_the_second_clip_has_nothing_to_do_beside_cispo(resolve) -> None:
    message = refusal(check_for_train, resolve("algorithm.name=cispo", "algorithm.dual_clip=3.0"))
    assert "set algorithm.dual_clip to null" in message


def test_an_estimator_that_compares_no_siblings_takes_groups_of_one_unless_they_are_filtered(resolve) -> None:
    alone = ("algorithm.name=reinforce_plus_plus", "rollout.group_size=1")
    check_for_train(resolve(*alone))
    message = refusal(check_for_train, resolve(*alone, "algorithm.filter=zero_variance"))
    assert "no group would be kept" in message
    refusal(check_for_train, resolve(*alone, "algorithm.estimator=rloo"))


@pytest.mark.parametrize("buffer", [8, 9])
def test_a_buffer_as_long_as_the_longest_completion_is_refused(resolve, buffer: int) -> None:
    message = refusal(check_for_train, resolve(f"reward.overlong_buffer={buffer}", "rollout.max_new_tokens=8"))
    assert message.startswith(
        f"reward.overlong_buffer = {buffer} (from --set) is not below rollout.max_new_tokens = 8 (from --set)"
    )
    check_for_train(resolve("reward.overlong_buffer=7", "rollout.max_new_tokens=8"))


def test_the_name_of_the_penalty_for_length_is_taken_while_there_is_one(resolve) -> None:
    function = "reward.functions=['judges:overlong']"
    check_for_train(resolve(function))
    assert "another `name:`" in refusal(check_for_train, resolve(function, "reward.overlong_buffer=2"))


def test_an_environment_needs_no_functions_and_has_none_unless_they_are_set(resolve) -> None:
    alone = resolve("env.source=guess_number")
    assert alone.settings.reward.functions == () and alone.provenance["reward.functions"] == "derived"
    check_for_train(alone)
    assert [f.name for f in resolve("env.tools=calculator").settings.reward.functions] == ["arithmetic"]
    both = resolve("env.source=guess_number", "reward.functions=gsm8k")
    assert [f.name for f in both.settings.reward.functions] == ["gsm8k"]
    with pytest.raises(InputError, match=r"reward.functions: expected at least one function, got \[\] \(from --set\)"):
        resolve("reward.functions=[]")
    assert "all weights are 0" in refusal(check_for_train, resolve("env.source=guess_number", "env.weight=0"))


@pytest.mark.parametrize(("mini_batch", "nearest"), [(5, "4 or 6"), (7, "6 or 12"), (13, "12"), (500, "12")])
def test_a_mini_batch_that_does_not_divide_the_step_is_told_its_neighbours(
    resolve, mini_batch: int, nearest: str
) -> None:
    message = refusal(check_for_train, resolve("batch_size=12", f"ppo_mini_batch_size={mini_batch}"))
    assert message.endswith(
        f"does not divide rollout.prompts_per_step = 12 (from --set); the nearest divisors: {nearest}"
    )
    check_for_train(resolve("batch_size=12", "ppo_mini_batch_size=4"))


def test_a_total_length_without_room_says_what_fits(resolve) -> None:
    resolved = resolve("data.max_prompt_length=100", "max_length_sample=50", "max_length_total=120")
    for check in (check_for_train, check_for_rollout):
        assert refusal(check, resolved).endswith(
            "more than rollout.max_length_total = 120 (from --set); "
            "set the latter to 150 or null, or lower rollout.max_new_tokens to 20"
        )
    check_for_score(resolved)


LONGEST = ("data.max_prompt_length=512", "max_length_sample=1024")
WAY_OUT = (
    "is less than the longest possible sample: data.max_prompt_length = 512 (from --set) + "
    "rollout.max_new_tokens = 1024 (from --set) = 1536 tokens, and samples are not split; "
    "raise the quota to 1536 or more, lower one of these lengths, or set"
)


def test_a_quota_must_hold_the_longest_sample_that_may_come(resolve) -> None:
    check_for_train(resolve(*LONGEST, "ppo_max_token_len_per_gpu=1536"))
    resolved = resolve(*LONGEST, "ppo_max_token_len_per_gpu=1535")
    assert refusal(check_for_train, resolved) == (
        f"algorithm.max_tokens_per_device = 1535 (from --set) {WAY_OUT} algorithm.rows_per_device instead"
    )
    check_for_rollout(resolved)
    check_for_score(resolved)
    check_for_train(resolve(*LONGEST, "algorithm.rows_per_device=2"))


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ((), []),
        (["algorithm.beta=0.1"], ["reference"]),
        (["algorithm.epochs=2"], ["policy"]),
        (["algorithm.beta=0.1", "algorithm.epochs=2"], ["policy", "reference"]),
        (["algorithm.beta=0.1", "algorithm.epochs=2", "ref_logprob_mbs_per_gpu=2"], ["policy"]),
        (["algorithm.beta=0.1", "algorithm.epochs=2", "score.policy.max_tokens_per_device=4096"], ["reference"]),
    ],
)
def test_only_the_quotas_of_roles_that_a_step_scores_are_checked(resolve, overrides, roles) -> None:
    resolved = resolve(*LONGEST, "score.max_tokens_per_device=1535", *overrides)
    if roles:
        assert refusal(check_for_train, resolved).splitlines() == [
            f"score.{role}.max_tokens_per_device = 1535 (from --set) {WAY_OUT} score.{role}.rows_per_device instead"
            for role in roles
        ]
    else:
        check_for_train(resolved)


def test_a_warmup_must_end_within_the_run(resolve) -> None:
    steps = ("run.steps=3", "algorithm.epochs=2", "batch_size=8", "ppo_mini_batch_size=4")
    check_for_train(resolve(*steps, "optimizer.warmup_steps=11"))
    message = refusal(check_for_train, resolve(*steps, "optimizer.warmup_steps=12"))
    assert message.endswith("gives 12 optimizer steps, so the warm-up would not end; lower it to at most 11")


def test_a_step_beyond_the_run_cannot_be_profiled(resolve) -> None:
    check_for_train(resolve("run.steps=5", "logging.profile_steps=[1, 5]"))
    message = refusal(check_for_train, resolve("run.steps=5", "logging.profile_steps=[5, 6, 7]"))
    assert message == (
        "logging.profile_steps = (5, 6, 7) (from --set): step 6 is not part of the run, because "
        "run.steps = 5 (from --set); choose steps from 1 to 5"
    )


def test_without_evaluation_there_is_no_best_checkpoint(resolve, folder) -> None:
    assert resolve().settings.checkpoint.best_metric == "eval/accuracy"
    resolved = resolve("eval.every_steps=0")
    check_for_train(resolved)
    assert resolved.settings.checkpoint.best_metric is None
    assert resolved.origin("checkpoint.best_metric") == "other settings"
    # As in every settings.yaml of a run, where the metric is written out.
    resolved = load_text(folder, "checkpoint: {best_metric: eval/accuracy}", "eval.every_steps=0")
    check_for_train(resolved)
    assert resolved.settings.checkpoint.best_metric is None
    message = refusal(check_for_train, resolve("eval.every_steps=0", "checkpoint.best_metric=eval/accuracy"))
    assert "(from --set) is never measured, because eval.every_steps = 0 (from --set) disables evaluation" in message


@pytest.mark.parametrize("check", [check_for_train, check_for_rollout, check_for_score, check_for_mesh])
def test_processes_are_described_whole_or_not_at_all(resolve, check) -> None:
    check(resolve("mesh.coordinator_address=h:1", "mesh.num_processes=2", "mesh.process_id=1"))
    check(resolve("mesh.coordinator_address=auto"))
    assert "must be null" in refusal(check, resolve("mesh.coordinator_address=auto", "mesh.num_processes=2"))
    message = refusal(check, resolve("mesh.num_processes=2"))
    assert "also set mesh.coordinator_address and mesh.process_id" in message
    message = refusal(check, resolve("mesh.coordinator_address=h:1", "mesh.num_processes=2", "mesh.process_id=2"))
    assert message.endswith("ids range from 0 to 1")


def test_as_many_hosts_as_expected_are_given(resolve) -> None:
    trio = ("mesh.coordinator_address=h:1", "mesh.num_processes=2", "mesh.process_id=1")
    check_for_mesh(resolve(*trio, "mesh.expect_processes=2"))
    check_for_mesh(resolve("mesh.expect_processes=4"))
    message = refusal(check_for_mesh, resolve(*trio, "mesh.expect_processes=4"))
    assert "mesh.expect_processes = 4 (from --set) differs from mesh.num_processes = 2 (from --set)" in message


def test_virtual_devices_are_of_a_cpu(resolve) -> None:
    check_for_mesh(resolve("mesh.cpu_devices=8", "mesh.platform=cpu"))
    message = refusal(check_for_mesh, resolve("mesh.cpu_devices=8", "mesh.platform=tpu"))
    assert "mesh.cpu_devices = 8 (from --set) is for CPU hosts, but mesh.platform = 'tpu' (from --set)" in message


def test_greedy_samples_are_drawn_once_where_anything_is_evaluated() -> None:
    several = ["eval.num_samples=4"]
    for check in (check_for_train, check_for_evaluation):
        message = refusal(check, load(None, several, {}))
        assert message.startswith(
            "eval.num_samples = 4 (from --set): with eval.temperature = 0.0 (from the default) all samples"
        )
        check(load(None, [*several, "eval.temperature=1"], {}))
    check_for_train(load(None, [*several, "eval.every_steps=0"], {}))


def test_a_model_is_evaluated_also_where_training_is_not() -> None:
    check_for_evaluation(load(None, ["eval.every_steps=0", "rollout.group_size=1", "rollout.temperature=0"], {}))


def test_early_stopping_needs_evaluations_and_a_metric(resolve) -> None:
    patience = "run.early_stopping.patience=2"
    check_for_train(resolve(patience))
    message = refusal(check_for_train, resolve(patience, "eval.every_steps=0"))
    assert "compares evaluations, but eval.every_steps = 0 (from --set)" in message
    message = refusal(check_for_train, resolve(patience, "checkpoint.best_metric=null"))
    assert "checkpoint.best_metric = None (from --set) leave nothing to compare" in message


def test_turns_are_rewarded_only_where_returns_are_per_token(resolve) -> None:
    played = ("env.source=guess_number", "env.credit=turn", "env.turn_discount=0.5")
    assert "env.credit = 'turn' (from --set): algorithm.estimator = 'grpo'" in refusal(
        check_for_train, resolve(*played)
    )
    for algorithm in ("algorithm.name=ppo", "algorithm.estimator=vtrace", "algorithm.name=reinforce_plus_plus"):
        check_for_train(resolve(*played, algorithm))
