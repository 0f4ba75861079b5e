"""Tests that settings select an algorithm's functions, that every algorithm trains, and dynamic sampling."""

import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from app.records.sample import Sample
from app.reward.reward_functions import OverlongPenalty
from app.runtime.advantages import make_advantage_estimator
from app.training.dynamic_sampling import StepGroups, keeps_all, rewards_differ
from app.training.learner import make_correction, make_group_filter, make_policy_loss
from app.update import ratios
from app.update.kl import k1, k2, k3
from app.update.policy_loss import cispo_surrogate, clipped_surrogate, dual_clipped_surrogate
from settings import load
from settings.loading.algorithm_presets import ALGORITHM_PRESETS
from settings.loading.config_file import preset_names
from settings.schema.algorithm import AlgorithmSettings
from tests import program
from tests.replays import replay, replayed, rewrite, samples_of, step_file, steps_of
from tests.tiny import make_sample


def algorithm(*overrides: str) -> AlgorithmSettings:
    return load(None, [f"algorithm.{override}" for override in overrides], {}).settings.algorithm


def partial_of(function: Any) -> tuple[Any, dict[str, float]]:
    assert isinstance(function, functools.partial)
    return function.func, function.keywords


def test_kl_penalty_is_part_of_the_loss_only_if_kl_in_is_loss() -> None:
    loss = make_policy_loss(algorithm("beta=0.1"))
    assert (loss.beta, loss.kl_estimator) == (0.1, k3)
    loss = make_policy_loss(algorithm("beta=0.1", "kl_in=reward"))
    assert (loss.beta, loss.kl_estimator) == (0.0, k1)
    loss = make_policy_loss(algorithm("beta=0.1", "kl_in=advantage"))
    assert (loss.beta, loss.kl_estimator) == (0.0, k1)
    assert make_policy_loss(algorithm("beta=1", "kl_estimator=k2")).kl_estimator is k2
    for place in ("loss", "reward", "advantage"):
        assert make_policy_loss(algorithm(f"kl_in={place}", "kl_estimator=k2")).kl_estimator is None


def test_clip_and_level_of_the_ratio_are_chosen_independently() -> None:
    loss = make_policy_loss(algorithm("clip_high=0.28"))
    assert partial_of(loss.surrogate) == (clipped_surrogate, {"clip_low": 0.2, "clip_high": 0.28})
    assert loss.log_ratio is ratios.token_log_ratio
    twice = make_policy_loss(algorithm("dual_clip=3.0")).surrogate
    assert partial_of(twice) == (dual_clipped_surrogate, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0})
    mixed = make_policy_loss(algorithm("name=cispo", "ratio_level=sequence"))
    assert mixed.log_ratio is ratios.sequence_log_ratio
    assert partial_of(mixed.surrogate) == (cispo_surrogate, {"clip_low": 10.0, "clip_high": 0.2})
    assert make_policy_loss(algorithm("name=gspo")).log_ratio is ratios.sequence_log_ratio


def test_off_policy_correction_follows_the_settings() -> None:
    assert make_policy_loss(algorithm()).correction is None
    truncating = make_correction(algorithm("correction=truncate", "name=gspo", "correction_max=3.0"))
    assert truncating is not None
    assert (truncating.log_weight, truncating.veto) == (ratios.geometric_log_weight, 1e-4)
    assert partial_of(truncating.bound) == (ratios.truncate_weights, {"max_weight": 3.0})
    masking = make_correction(algorithm("correction=mask", "correction_level=sequence", "correction_veto=0"))
    assert masking is not None
    assert (masking.log_weight, masking.veto) == (ratios.sequence_log_weight, 0.0)
    assert partial_of(masking.bound) == (ratios.mask_weights, {"min_weight": 0.5, "max_weight": 2.0})


def test_every_algorithm_has_a_preset() -> None:
    assert {load(preset, [], {}).settings.algorithm.name for preset in preset_names()} == set(ALGORITHM_PRESETS)


def mean_over_samples(losses: Sequence[np.ndarray]) -> float:
    return float(np.mean([loss.mean() for loss in losses]))


def mean_over_tokens(losses: Sequence[np.ndarray]) -> float:
    return float(np.concatenate(losses).mean())


@pytest.mark.parametrize(
    ("name", "aggregate"),
    [
        ("cispo", mean_over_tokens),
        ("gspo", mean_over_samples),
        ("dr_grpo", lambda losses: sum(loss.sum() for loss in losses) / len(losses) / 4),
        ("maxrl", mean_over_tokens),
        ("rloo", lambda losses: sum(loss.sum() for loss in losses) / len(losses)),
        ("reinforce_plus_plus", mean_over_tokens),
    ],
)
def test_loss_of_a_step_equals_the_formula_of_its_algorithm_in_float64(name, aggregate, uninterrupted, tmp_path):
    """test_rewards.py covers grpo and dapo, and test_ppo.py covers ppo."""
    chosen = f"algorithm.name={name}"
    # The metric is the mean over all tokens, and so is the bonus where losses are.
    coefficient = 0.5 if aggregate is mean_over_tokens else 0.0
    once = ("algorithm.epochs=1", "algorithm.mini_batch_prompts=4", f"algorithm.entropy_coef={coefficient}")
    result = program.succeeded(replay(uninterrupted, tmp_path, chosen, *once, "run.steps=1", *program.UNJUDGED))
    resolved = load(str(uninterrupted.parents[1] / "config.yaml"), [chosen], {})
    assert resolved.algorithm_changes and resolved.algorithm_changes in result.stderr
    (line,) = program.metrics_of(tmp_path / "full-replay")
    assert line["policy/grad_norm"] > 0 and line["policy/nonfinite_updates"] == 0
    # Policy and reference are the same weights; a single update has its ratio to itself.
    assert abs(line["policy/kl"]) < 1e-6 and line["policy/ratio_max"] == 1.0
    assert "value/loss" not in line
    # A filter masks the groups that it drops.
    records = [
        one for one in program.records_of(step_file(tmp_path / "full-replay", 1)) if any(one.get("loss_mask", [True]))
    ]
    losses = [-np.array(record["advantages"], float) for record in records]
    if name == "cispo":
        losses = [loss * record["behavior_logprobs"] for loss, record in zip(losses, records, strict=True)]
    assert line["loss"] == pytest.approx(aggregate(losses) - coefficient * line["policy/entropy"], abs=1e-4)


def changed_copy(run: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Returns a copy of the samples and settings of a run, with another first step."""
    shutil.copytree(run / "rollouts", folder / "rollouts")
    shutil.copy(run / "settings.yaml", folder)
    rewrite(step_file(folder, 1), change)
    return folder


def test_a_step_that_masks_truncated_samples_equals_a_step_without_them(uninterrupted: Path, tmp_path: Path) -> None:
    """The two steps are equal bit for bit, with several epochs and mini-batches and a KL penalty."""

    def truncate_last(record: dict[str, Any]) -> None:
        record["finish_reason"] = "length" if record["sample_index"] == 3 else "stop"

    def drop_last(record: dict[str, Any]) -> None:
        record["finish_reason"] = "stop"
        if record["sample_index"] == 3:
            record |= {"reward": None, "rewards": {}, "finish_reason": "dropped:reward"}

    once = ("run.steps=1", *program.UNJUDGED)
    sources = [changed_copy(uninterrupted, tmp_path / change.__name__, change) for change in (truncate_last, drop_last)]
    masked = replayed(sources[0], tmp_path / "masked", "algorithm.mask_truncated=true", *once)
    dropped = replayed(sources[1], tmp_path / "dropped", *once)
    program.assert_same_state(masked, dropped, step=1)
    line, expected = steps_of(masked)[1], steps_of(dropped)[1]
    assert 0 < line["completions/masked_token_fraction"] < 1 and line["policy/grad_norm"] > 0
    compared = [name for name in line if name.startswith(("loss", "policy/", "advantage/", "rollout/sampler"))]
    assert len(compared) > 10
    for name in (*compared, "reward/zero_variance_fraction"):
        assert line[name] == expected[name], name
    # Samples that are masked out of training are still reported.
    assert line["reward/mean"] == steps_of(uninterrupted)[1]["reward/mean"] != expected["reward/mean"]
    assert any(sample.reward is not None and not sample.mask.any() for sample in samples_of(masked, 1))


def test_a_step_with_only_truncated_samples_does_not_train(uninterrupted: Path, tmp_path: Path) -> None:
    source = changed_copy(uninterrupted, tmp_path / "source", lambda record: record.update(finish_reason="length"))
    filtered = ("algorithm.filter=zero_variance", "algorithm.max_rounds=1")
    chosen = ("algorithm.mask_truncated=true", "run.steps=1", *program.UNJUDGED)
    run = replayed(source, tmp_path / "runs", *filtered, *chosen)
    (line,) = program.metrics_of(run)
    assert (line["loss"], line["policy/grad_norm"], line["policy/nonfinite_updates"]) == (0, 0, 0)
    assert (line["completions/masked_token_fraction"], line["reward/filtered_group_fraction"]) == (None, 1)
    state = program.saved_state(run, 1)
    moments = [leaf for name, leaf in state.items() if ("mu" in name or "nu" in name) and np.ndim(leaf)]
    assert len(moments) > 10 and not any(np.any(leaf) for leaf in moments)


def test_advantages_are_the_sum_of_separately_normalized_rewards(uninterrupted: Path, tmp_path: Path) -> None:
    chosen = ("algorithm.reward_normalization=each_first", "algorithm.epochs=1", "algorithm.mini_batch_prompts=4")
    run = replayed(uninterrupted, tmp_path, *chosen, "algorithm.beta=0", "run.steps=1", *program.UNJUDGED)
    (line,), samples = program.metrics_of(run), samples_of(run, 1)
    groups = np.array([s.group_id for s in samples])
    parts = {}
    for name, weight in (("arithmetic", 1.0), ("arithmetic_format", 0.5)):
        values = np.array([(s.rewards or {})[name] for s in samples])
        rows = [values[groups == group] for group in range(4)]
        parts[name] = weight * np.concatenate([(row - row.mean()) / (row.std(ddof=1) + 1e-6) for row in rows])
        assert line[f"reward/{name}/zero_variance_fraction"] == np.mean([np.ptp(row) == 0 for row in rows])
    summed = np.sum([*parts.values()], axis=0)
    expected = summed / (summed.std(ddof=1) + 1e-6)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose([np.asarray(s.advantages)[0] for s in samples], expected, rtol=1e-5, atol=1e-6)
    for name, part in parts.items():
        size = sum(np.abs(one).sum() for one in parts.values())
        assert line[f"advantage/{name}/share"] == pytest.approx(np.abs(part).sum() / size)
    assert line["loss"] == pytest.approx(-line["advantage/mean"], abs=1e-5) and line["policy/grad_norm"] > 0


def test_a_stopped_run_with_a_filter_uses_the_same_prompts_after_resume(config: Path) -> None:
    filtered = (
        *("algorithm.name=dapo", "algorithm.max_rounds=3", "reward.overlong_buffer=2", "eval.every_steps=0"),
        *("algorithm.mini_batch_prompts=2", "algorithm.rows_per_device=1", "score.rows_per_device=1"),
    )
    straight = program.run_of(config)
    program.succeeded(program.train_here(config, *filtered))
    stopped = program.copy_until(straight, straight.with_name("stopped"), step=2)
    program.succeeded(program.train_here(config, *filtered, "run.name=stopped", resume="must"))
    program.assert_same_run(stopped, straight, step=4)
    lines = program.metrics_of(straight)
    rounds = [line["rollout/num_rounds"] for line in lines]
    assert max(rounds) > 1
    assert program.progress_of(straight, 4)["position"] == 4 * sum(rounds)
    for step, line in enumerate(lines, start=1):
        samples = samples_of(straight, step)
        by_group = {s.group_id: [t for t in samples if t.group_id == s.group_id] for s in samples}
        assert len(by_group) == 4
        fillers = [group for group in by_group.values() if not any(s.mask.any() for s in group)]
        assert len(fillers) == line["rollout/filler_group_count"]
        for group in by_group.values():
            for sample in group:
                beyond = max(len(sample.completion_ids) - 2, 0)
                assert sample.rewards is not None and sample.rewards["overlong"] == -beyond / 2
            # The rewards of the group are equal except for the length penalty.
            reward_parts = [s.rewards or {} for s in group]
            right = {rewards["arithmetic"] + 0.5 * rewards["arithmetic_format"] for rewards in reward_parts}
            assert (len(right) == 1) == (group in fillers)


Group = Sequence[float | None]
"""The rewards of the samples of one group."""
SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


def sampled_groups(*groups: Group, first: int = 0) -> list[Sample]:
    return [
        make_sample([3, 4], group_id=first + i, sample_index=j, reward=reward)
        for i, group in enumerate(groups)
        for j, reward in enumerate(group)
    ]


class Filled(NamedTuple):
    """The samples of a step and the metrics of its groups."""

    samples: list[Sample]
    metrics: dict[str, float]

    @property
    def counts(self) -> list[float]:
        """Returns the numbers of rounds, surplus groups and filler groups, and the share of dropped groups."""
        names = ("rollout/num_rounds", "rollout/surplus_group_count", "rollout/filler_group_count")
        return [self.metrics[name] for name in (*names, "reward/filtered_group_fraction")]

    @property
    def groups(self) -> list[int]:
        return list(dict.fromkeys(s.group_id for s in self.samples))

    @property
    def in_loss(self) -> list[int]:
        return list(dict.fromkeys(s.group_id for s in self.samples if s.mask.any()))


def fill(rounds: Sequence[Sequence[Sample]], *, num_groups: int, max_rounds: int = 10, keep=rewards_differ) -> Filled:
    groups, remaining = StepGroups(group_filter=keep, num_groups=num_groups, max_rounds=max_rounds), iter(rounds)
    while not groups.are_complete:
        groups.add_round(next(remaining))
    return Filled(*groups.fill())


def run(rounds: Sequence[Sequence[Group]], *, max_rounds: int = 10, keep=rewards_differ) -> Filled:
    """Samples rounds with as many groups as a step has, numbered consecutively."""
    size = len(rounds[0])
    sampled = [sampled_groups(*groups, first=number * size) for number, groups in enumerate(rounds)]
    return fill(sampled, num_groups=size, max_rounds=max_rounds, keep=keep)


def test_a_step_without_a_filter_is_one_round_of_prompts():
    filled = run([(SAME, MIXED, SAME)], keep=keeps_all)
    assert filled.groups == filled.in_loss == [0, 1, 2]
    assert filled.counts == [1, 0, 0, 0]
    unrewarded = run([((None, None),)], keep=keeps_all, max_rounds=1)
    assert np.isnan(unrewarded.metrics["reward/sampled_mean"])


def test_rounds_are_sampled_until_enough_groups_have_different_rewards():
    filled = run([(MIXED, SAME, SAME), (SAME, MIXED, SAME), (MIXED, MIXED, MIXED)])
    assert filled.groups == filled.in_loss == [0, 4, 6]
    assert filled.counts == [3, 2, 0, 4 / 9]
    # The mean is taken over all sampled groups.
    assert filled.metrics["reward/sampled_mean"] == pytest.approx((5 * 0.5 + 4) / 9)


def test_dropped_groups_fill_the_step_as_masked_samples_when_rounds_run_out():
    filled = run([(SAME, MIXED, SAME), (SAME, SAME, MIXED)], max_rounds=2)
    assert (filled.groups, filled.in_loss) == ([0, 1, 5], [1, 5])
    assert filled.counts == [2, 0, 1, 4 / 6]
    assert run([(SAME, MIXED, SAME, MIXED), (MIXED, SAME, SAME, SAME)], max_rounds=2).groups == [0, 1, 3, 4]
    # Without any difference, the step keeps its shape.
    filled = run([(SAME, SAME)] * 3, max_rounds=3)
    assert (filled.groups, filled.in_loss, len(filled.samples)) == ([0, 1], [], 4)


@pytest.mark.parametrize(
    ("rewards", "differ"),
    [((0.0, 1.0), True), ((1.0, 1.0), False), ((1.0, None), False), ((None, None), False), ((0.5, None, 1.0), True)],
)
def test_missing_rewards_do_not_count_as_different_rewards(rewards, differ):
    assert rewards_differ(sampled_groups(rewards)) == differ


@pytest.mark.parametrize(
    ("rewards", "finishes", "of_sums", "of_each"),
    [
        ([{"a": 1, "b": 0}, {"a": 0, "b": 1}], "stop stop", False, True),
        ([{"a": 1, "b": 0}, {"a": 0, "b": 0}], "stop stop", True, True),
        ([{"a": 1, "b": 0}, {"a": 0, "b": 0}], "stop length", False, False),  # masked samples make no difference
        ([{"a": 1, "b": 1}, {"a": 2}], "stop stop", False, True),
        ([{"b": 1}, {"a": 1}], "stop stop", False, False),  # each function has only one sample
    ],
)
def test_groups_are_kept_if_compared_rewards_differ(rewards, finishes, of_sums, of_each) -> None:
    group = [
        replace(make_sample([3], sample_index=i, reward=float(sum(row.values())), rewards=row), finish_reason=finish)
        for i, (row, finish) in enumerate(zip(rewards, finishes.split(), strict=True))
    ]
    functions = "reward.functions=[{name: a, function: m:f}, {name: b, function: m:f}]"
    for normalization, is_kept in (("sum_first", of_sums), ("each_first", of_each)):
        chosen = ("algorithm.name=dapo", "algorithm.mask_truncated=true", functions)
        settings = load(None, [*chosen, f"algorithm.reward_normalization={normalization}"], {}).settings
        assert make_group_filter(settings, make_advantage_estimator(settings))(group) == is_kept


def test_a_group_that_differs_only_in_the_length_penalty_is_dropped():
    penalty = OverlongPenalty(max_length=4, buffer=3, max_penalty=0.1)

    def penalised(*rewards: float) -> list[Sample]:
        lengths = [replace(s, completion_ids=np.zeros(i + 2, np.int32)) for i, s in enumerate(sampled_groups(rewards))]
        return [penalty.apply(sample) for sample in lengths]

    assert len({s.reward for s in penalised(0.3, 0.3, 0.3)}) == 3
    assert not rewards_differ(penalised(0.3, 0.3, 0.3))
    # Here the penalty makes the sums equal although only one answer is correct.
    right = penalised(0.3, 0.3 + 0.1 / 3, 0.3)
    assert right[0].reward == pytest.approx(right[1].reward)
    assert rewards_differ(right)


def test_a_repeated_prompt_does_not_add_another_group_to_a_step():
    # The uid of a prompt is the number of its group, so the second round repeats the prompts of the first one.
    again, new = [sampled_groups(MIXED, SAME)] * 2, sampled_groups(MIXED, MIXED, first=10)
    filled = fill([*again, new], num_groups=2)
    assert filled.groups == [0, 10] and filled.counts[:3] == [3, 1, 0]
    # A prompt that is repeated within a round does not add a group either.
    once = sampled_groups(MIXED)
    assert fill([[*once, *(replace(s, group_id=1) for s in once)], new], num_groups=2).groups == [0, 10]
