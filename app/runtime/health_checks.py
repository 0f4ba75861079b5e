"""Stops a run if rewards fail or training diverges."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from app.distributed.collectives import any_host, max_over_hosts, sum_over_hosts
from app.reward.aggregate import RewardedSamples
from app.rollout.sampling.token_sampling import FINISH_NON_FINITE

MAX_NONFINITE_STEPS = 3
"""Consecutive optimizer steps with a NaN or infinite gradient after which a run ends; one or two may be outliers."""


class RewardError(RuntimeError):
    """Training cannot continue with the rewards or advantages; raised on every host."""


def stop_if_failed(fatal_error: str | None, *, source: str) -> None:
    """Raises RewardError on all hosts, which must call it together, if `source` has a fatal error on any of them."""
    if any_host(fatal_error is not None):
        raise RewardError(fatal_error or f"{source} failed on another host; see its log")


def check_rewards(scored: RewardedSamples) -> None:
    """Checks that training can continue with the rewards of all hosts.

    Raises:
        RewardError: a reward function has a fatal error, or no sample has a reward.
        RuntimeError: no sample could be generated, because the logits are not finite; raised on every host.
    """
    stop_if_failed(scored.fatal_error, source="a reward function")
    num_kept = sum_over_hosts(sum(s.reward is not None for s in scored.samples))
    if num_kept == 0 and scored.samples and all(s.finish_reason == FINISH_NON_FINITE for s in scored.samples):
        raise RuntimeError(
            f"no sample of this step could be generated: {scored.notices[-1]}. The policy's weights contain NaN or "
            "infinity, or overflow: lower optimizer.learning_rate, set model.dtype=float32, or choose another "
            "model.path"
        )
    if num_kept == 0:
        raise RewardError(
            "no sample of this step has a reward, because all were dropped (reward.on_error, or a failed environment); "
            f"first: {next(iter(scored.notices), 'on another host')}. Fix the reward functions or the environment"
        )


def check_rewards_for_maxrl(scored: RewardedSamples, *, parts: Collection[str]) -> None:
    """Calls `check_rewards`, and raises RewardError for a negative reward or, with `parts`, a negative part."""
    check_rewards(scored)
    smallest = min((s.reward for s in scored.samples if s.reward is not None), default=0.0)
    if parts:
        values = (s.rewards or {} for s in scored.samples)
        smallest = min((one[name] for one in values for name in parts if name in one), default=0.0)
    if (below := max_over_hosts(-smallest)) > 0:
        raise RewardError(
            f"a sample has reward {-below:g}, but algorithm.estimator: maxrl divides by the mean reward of a group "
            "and needs rewards of at least 0; change the reward functions, or choose another estimator, such as grpo"
        )


def stop_if_diverged(metrics: Mapping[str, float | None]) -> None:
    """Raises RuntimeError after `MAX_NONFINITE_STEPS` updates in a row with a NaN or infinite loss or gradient."""
    for network, section in (("policy", "optimizer"), ("value", "critic")):
        in_a_row = metrics.get(f"{network}/nonfinite_in_a_row") or 0
        if in_a_row >= MAX_NONFINITE_STEPS:
            raise RuntimeError(
                f"{int(in_a_row)} optimizer steps in a row had a NaN or infinite loss or gradient; they did not "
                f"change the weights. Lower {section}.learning_rate, or set model.dtype=float32"
            )
