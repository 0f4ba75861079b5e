"""Builds the advantage estimator and the update rule of the KL coefficient from the settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from app.advantage.advantage_metrics import AdvantageMoments, advantage_metrics, moments_over_hosts
from app.advantage.custom_estimator import CustomEstimator
from app.advantage.gae.estimate import generalized_advantages
from app.advantage.group import (
    GROUP_ADVANTAGES,
    assign_group_advantages,
    kl_penalized_rewards,
    task_rewards,
)
from app.advantage.reward_parts import RewardParts
from app.advantage.token_advantages import (
    BootstrapFn,
    DiscountFn,
    TokenAdvantages,
    TokenRows,
    assign_gae_advantages,
    assign_return_advantages,
    assign_vtrace_advantages,
    compute_gae,
    fixed_discount,
    length_adaptive_lambda,
    truncation_bootstrap,
    turn_gamma,
    whiten_advantages,
    zero_bootstrap,
)
from app.advantage.token_rewards import (
    kl_moments,
    kl_penalized_advantages,
    kl_penalized_token_rewards,
    task_token_rewards,
    update_kl_coef,
)
from app.distributed.collectives import sum_over_hosts
from app.records.sample import Sample
from app.runtime.health_checks import stop_if_failed
from app.update.kl import KL_ESTIMATORS, KLEstimator
from settings import Settings
from settings.schema.algorithm import AlgorithmSettings

EstimateAdvantages = Callable[[Sequence[Sample], float], list[Sample]]
"""(samples with rewards, coefficient of the KL penalty) -> the samples with advantages."""
NextKLCoef = Callable[[Sequence[Sample], float], float]
"""(samples of a step, its KL coefficient) -> the coefficient of the next step."""

KL_HORIZON = 10_000
"""Number of samples during which an adaptive KL coefficient changes by at most about 20 % (Ziegler et al. 2019)."""


class AdvantageResult(NamedTuple):
    samples: list[Sample]
    metrics: dict[str, float]
    kl_coef: float
    """Coefficient of the KL penalty in the next step."""


@dataclass(frozen=True)
class AdvantageEstimator:
    """The advantage estimator of a run. Every host must call it, even if all its samples were dropped.

    Samples that are not used for training stay in the step, masked out of the loss, so that their number does not
    change shapes, mini-batches or the number of samples on each host.
    """

    estimate: EstimateAdvantages
    whiten_advantages: bool
    """Whether advantages are whitened over all hosts, after their metrics are computed."""
    has_kl_penalty: bool
    next_kl_coef: NextKLCoef
    masks_truncated: bool = False
    """Whether truncated samples are masked out of the loss."""
    parts: RewardParts | None = None
    """The parts of the reward that `estimate` compares separately; None if it compares their sum."""
    penalize: Callable[..., Sample] | None = None
    """Subtracts the KL penalty from a sample's final advantages; None unless `algorithm.kl_in` is `advantage`."""

    def learns_from(self, sample: Sample) -> bool:
        """Returns whether a sample takes part in the statistics of its group and in the loss."""
        return sample.reward is not None and not (self.masks_truncated and sample.finish_reason == "length")

    def __call__(self, samples: Sequence[Sample], kl_coef: float) -> AdvantageResult:
        estimated = self.estimate([s for s in samples if self.learns_from(s)], kl_coef)
        moments = AdvantageMoments.from_samples(estimated)
        metrics = advantage_metrics(moments) | ({"policy/kl_coef": float(kl_coef)} if self.has_kl_penalty else {})
        if self.parts is not None:
            metrics |= self.parts.metrics(estimated)
        if self.masks_truncated:
            num_tokens = sum_over_hosts(sum(int(s.mask.sum()) for s in samples if s.reward is not None))
            kept = moments.advantages.count / num_tokens if num_tokens else math.nan
            metrics["completions/masked_token_fraction"] = float(1 - kept)
        next_kl_coef = self.next_kl_coef(estimated, kl_coef)
        finished = whiten_advantages(estimated, moments.advantages) if self.whiten_advantages else estimated
        learned = iter([self.penalize(s, kl_coef=kl_coef) for s in finished] if self.penalize else finished)

        def masked(sample: Sample) -> Sample:
            zeros = np.zeros(len(sample.completion_ids), np.float32)
            return replace(sample, advantages=zeros, returns=zeros, loss_mask=zeros.astype(bool))

        samples = [next(learned) if self.learns_from(s) else masked(s) for s in samples]
        return AdvantageResult(samples, metrics, next_kl_coef)


def make_advantage_estimator(settings: Settings, custom: CustomEstimator | None = None) -> AdvantageEstimator:
    """Builds the advantage estimator from `algorithm.*`.

    Args:
        custom: the plug-in of `algorithm.estimator`; None if there is none, or if nothing is trained.
    """
    algorithm = settings.algorithm
    assert algorithm.estimator is not None and algorithm.whiten_advantages is not None
    parts = penalize = None
    if algorithm.kl_in_advantage:
        penalize = partial(kl_penalized_advantages, kl_estimator=make_kl_estimator(algorithm))
    if algorithm.has_custom_estimator:
        estimate = make_custom_advantages(settings, custom)
    elif settings.compared_parts:
        parts = RewardParts(settings.compared_parts, GROUP_ADVANTAGES[algorithm.estimator])
        estimate = _from_parts(parts)
    else:
        estimate = TOKEN_ADVANTAGES.get(algorithm.estimator, make_group_advantages)(settings)
    return AdvantageEstimator(
        estimate=estimate,
        whiten_advantages=algorithm.whiten_advantages,
        penalize=penalize,
        has_kl_penalty=algorithm.penalizes_samples,
        next_kl_coef=make_next_kl_coef(algorithm),
        masks_truncated=algorithm.mask_truncated,
        parts=parts,
    )


def with_saved_advantages(estimator: AdvantageEstimator) -> AdvantageEstimator:
    """Returns an estimator that uses the advantages and returns saved in samples; its KL coefficient still adapts."""
    return replace(
        estimator, estimate=lambda samples, kl_coef: list(samples), whiten_advantages=False, parts=None, penalize=None
    )


def make_group_advantages(settings: Settings) -> EstimateAdvantages:
    """Returns the function that compares the rewards of each group, minus the KL penalty if it is in the reward."""
    algorithm = settings.algorithm
    assert algorithm.estimator is not None
    assign = partial(assign_group_advantages, advantages=GROUP_ADVANTAGES[algorithm.estimator])
    rewards = _make_sample_rewards(algorithm)
    return lambda samples, kl_coef: assign(samples, rewards=partial(rewards, kl_coef=kl_coef))


def _from_parts(parts: RewardParts) -> EstimateAdvantages:
    return lambda samples, kl_coef: parts.assign(samples)


def make_custom_advantages(settings: Settings, custom: CustomEstimator | None) -> EstimateAdvantages:
    """Returns the function that computes advantages with the plug-in `custom`. All hosts must call it together."""
    rewards = _make_sample_rewards(settings.algorithm)

    def estimate(samples: Sequence[Sample], kl_coef: float) -> list[Sample]:
        assert custom is not None, "opened without the plug-in"
        estimated, fatal_error = custom(samples, rewards(samples, kl_coef=kl_coef))
        stop_if_failed(fatal_error, source="the advantage estimator")
        return estimated

    return estimate


def _make_sample_rewards(algorithm: AlgorithmSettings) -> Callable[..., np.ndarray]:
    """Returns the function (samples, kl_coef) -> rewards, minus the KL penalty if `algorithm.kl_in` is `reward`."""
    if not algorithm.kl_in_reward:
        return lambda samples, kl_coef: task_rewards(samples)
    penalized = partial(kl_penalized_rewards, kl_estimator=make_kl_estimator(algorithm))
    return lambda samples, kl_coef: penalized(samples, beta=kl_coef)


def make_gae(
    settings: Settings, *, backend: str = "numpy", mask_mode: str = "skip"
) -> Callable[[TokenRows], TokenAdvantages]:
    """Returns the function that computes GAE over rows of tokens; `backend` and `mask_mode` are as in `grpo gae`."""
    algorithm, alpha = settings.algorithm, settings.algorithm.length_adaptive_lam
    usual = partial(fixed_discount, discount=algorithm.lam)
    critic_lam = usual if settings.critic.lam is None else partial(fixed_discount, discount=settings.critic.lam)
    same = alpha is None and settings.critic.lam in (None, algorithm.lam)
    return partial(
        compute_gae,
        estimate=partial(
            generalized_advantages, backend=backend, mask_mode=mask_mode, chunk_size=algorithm.gae_chunk_size
        ),
        gamma=_make_gamma(settings),
        lam=_make_lam(algorithm),
        critic_lam=None if same else critic_lam,
    )


def make_gae_advantages(
    settings: Settings, *, bootstrap: BootstrapFn | None = None, backend: str = "numpy", mask_mode: str = "skip"
) -> EstimateAdvantages:
    """Returns the function that computes GAE from the critic's values.

    Args:
        bootstrap: gives the value after a sample's last token; None = the function that the settings choose.
        backend, mask_mode: see the options of `grpo gae`.
    """
    gae = make_gae(settings, backend=backend, mask_mode=mask_mode)
    bootstrap = bootstrap or _choose_bootstrap(settings)
    return _from_token_rewards(settings, partial(assign_gae_advantages, gae=gae, bootstrap=bootstrap))


def make_vtrace_advantages(settings: Settings) -> EstimateAdvantages:
    """Returns the function that computes V-trace from the critic's values and the policy-to-sampler ratios."""
    discounts = {"gamma": _make_gamma(settings), "lam": _make_lam(settings.algorithm)}
    estimate = partial(assign_vtrace_advantages, **discounts, bootstrap=_choose_bootstrap(settings))
    return _from_token_rewards(settings, estimate)


def make_return_advantages(settings: Settings) -> EstimateAdvantages:
    """Returns the function that computes the discounted returns of REINFORCE++."""
    return _from_token_rewards(settings, partial(assign_return_advantages, gamma=_make_gamma(settings)))


TOKEN_ADVANTAGES: Mapping[str, Callable[[Settings], EstimateAdvantages]] = MappingProxyType(
    {"gae": make_gae_advantages, "vtrace": make_vtrace_advantages, "reinforce_plus_plus": make_return_advantages}
)
"""Maps estimators with per-token advantages to their builders; all others compare the samples of a group."""


def _make_gamma(settings: Settings) -> DiscountFn:
    gamma, turn_discount = settings.algorithm.gamma, settings.env.turn_discount
    if turn_discount == 1:
        return partial(fixed_discount, discount=gamma)
    return partial(turn_gamma, gamma=gamma, turn_discount=turn_discount)


def _make_lam(algorithm: AlgorithmSettings) -> DiscountFn:
    alpha = algorithm.length_adaptive_lam
    if alpha is None:
        return partial(fixed_discount, discount=algorithm.lam)
    return partial(length_adaptive_lambda, alpha=alpha)


def _choose_bootstrap(settings: Settings) -> BootstrapFn:
    return truncation_bootstrap if settings.algorithm.bootstrap_truncated else zero_bootstrap


def _from_token_rewards(settings: Settings, assign: Callable[..., list[Sample]]) -> EstimateAdvantages:
    """Returns an estimator: `assign` with token rewards, minus the KL penalty if `algorithm.kl_in` is `reward`."""
    if not settings.algorithm.kl_in_reward:
        return lambda samples, kl_coef: assign(samples, token_rewards=task_token_rewards)
    penalized = partial(kl_penalized_token_rewards, kl_estimator=make_kl_estimator(settings.algorithm))
    return lambda samples, kl_coef: assign(samples, token_rewards=partial(penalized, kl_coef=kl_coef))


def make_kl_estimator(algorithm: AlgorithmSettings) -> KLEstimator:
    """Returns the KL estimator of the penalty, `algorithm.kl_estimator`."""
    assert algorithm.kl_estimator is not None
    return KL_ESTIMATORS[algorithm.kl_estimator]


def make_next_kl_coef(algorithm: AlgorithmSettings) -> NextKLCoef:
    """Returns the rule for the KL coefficient: constant, or adapted towards the per-token KL `algorithm.kl_target`."""
    target = algorithm.kl_target
    if target is None or not algorithm.penalizes_samples:
        return lambda samples, kl_coef: kl_coef
    kl_estimator = make_kl_estimator(algorithm)

    def next_kl_coef(samples: Sequence[Sample], kl_coef: float) -> float:
        (kl,) = moments_over_hosts([kl_moments(samples, kl_estimator)])
        num_samples = int(sum_over_hosts(sum(s.mask.any() for s in samples)))
        # With NaN logprobs the coefficient would become NaN and stay NaN.
        if not kl.count or not math.isfinite(kl.mean):
            return kl_coef
        return update_kl_coef(kl_coef, kl.mean, target=target, num_samples=num_samples, horizon=KL_HORIZON)

    return next_kl_coef
