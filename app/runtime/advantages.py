"""Settings -> how a step's samples get their credit, and the penalty in their rewards its coefficient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from app.advantage.adaptive_kl import adapted_kl_coef
from app.advantage.gae.estimate import generalized_advantages
from app.advantage.group import ADVANTAGES, Rewards, credit_by_group, penalised_rewards, task_rewards
from app.advantage.metrics import CreditMoments, credit_metrics
from app.advantage.token_advantages import (
    Bootstrap,
    Estimate,
    Lambda,
    TokenCredit,
    TokenRows,
    bootstrapped_if_truncated,
    credit_by_gae,
    credit_by_return,
    credit_by_vtrace,
    fixed_lam,
    gae_of_rows,
    length_adaptive_lam,
    terminal,
    whitened,
)
from app.advantage.token_rewards import TokenRewards, kl_moments, penalised_token_rewards, task_token_rewards
from app.advantage.vtrace import vtrace
from app.distributed.collectives import moments_over_hosts, sum_over_hosts
from app.records.sample import Sample
from app.update.kl import ESTIMATORS, Estimator
from settings import Settings
from settings.schema.settings import Algorithm

Credit = Callable[[Sequence[Sample], float], list[Sample]]
"""Samples with a reward, and the coefficient of the penalty in it -> the same with their advantages."""
NextKLCoef = Callable[[Sequence[Sample], float], float]
"""A step's samples and its coefficient -> the next step's."""


class Credited(NamedTuple):
    samples: list[Sample]
    metrics: dict[str, float]
    kl_coef: float
    """Of the penalty in the next step's rewards."""


@dataclass(frozen=True)
class Crediting:
    """The advantage room, wired for one run. Every host calls it, also one whose samples were all dropped."""

    credit: Credit
    whitens: bool
    """Advantages are whitened over all hosts, after they have been measured."""
    penalises: bool
    """There is a KL penalty in the reward."""
    next_kl_coef: NextKLCoef

    def __call__(self, samples: Sequence[Sample], kl_coef: float) -> Credited:
        credited = self.credit(samples, kl_coef)
        moments = CreditMoments.of(credited)
        metrics = credit_metrics(moments) | ({"policy/kl_coef": float(kl_coef)} if self.penalises else {})
        next_kl_coef = self.next_kl_coef(credited, kl_coef)
        samples = whitened(credited, moments.advantages) if self.whitens else credited
        return Credited(samples, metrics, next_kl_coef)


def wire_crediting(settings: Settings) -> Crediting:
    """What `algorithm.*` says of advantages."""
    algorithm = settings.algorithm
    assert algorithm.estimator is not None and algorithm.whiten_advantages is not None
    return Crediting(
        credit=CREDITS.get(algorithm.estimator, wire_group_credit)(settings),
        whitens=algorithm.whiten_advantages,
        penalises=algorithm.kl_in_reward,
        next_kl_coef=wire_next_kl_coef(algorithm),
    )


def saved_crediting(crediting: Crediting) -> Crediting:
    """For samples that bring their advantages and returns: they are final. A penalty is adapted all the same."""
    return replace(crediting, credit=lambda samples, kl_coef: list(samples), whitens=False)


def wire_group_credit(settings: Settings) -> Credit:
    """Siblings are compared, by their rewards or by what a penalty leaves of them."""
    algorithm = settings.algorithm
    assert algorithm.estimator is not None
    advantages = ADVANTAGES[algorithm.estimator]

    def rewards(kl_coef: float) -> Rewards:
        if not algorithm.kl_in_reward:
            return task_rewards
        return partial(penalised_rewards, kl_estimator=wire_kl(algorithm), beta=kl_coef)

    return lambda samples, kl_coef: credit_by_group(samples, advantages=advantages, rewards=rewards(kl_coef))


def wire_gae(settings: Settings) -> Callable[[TokenRows], TokenCredit]:
    """GAE of rows of tokens, whoever made them."""
    algorithm, alpha = settings.algorithm, settings.algorithm.length_adaptive_lam
    usual = partial(fixed_lam, lam=algorithm.lam)
    of_targets = usual if settings.critic.lam is None else partial(fixed_lam, lam=settings.critic.lam)
    same = alpha is None and settings.critic.lam in (None, algorithm.lam)
    return partial(
        gae_of_rows,
        estimate=_estimate(algorithm),
        lam=_lam(algorithm),
        critic_lam=None if same else of_targets,
    )


def wire_gae_credit(settings: Settings, *, bootstrap: Bootstrap | None = None) -> Credit:
    """GAE from the critic's values. `bootstrap`: other than `algorithm.bootstrap_truncated` says."""
    algorithm = settings.algorithm
    credit = partial(credit_by_gae, gae=wire_gae(settings), bootstrap=bootstrap or _bootstrap(algorithm))
    return lambda samples, kl_coef: credit(samples, token_rewards=_token_rewards(algorithm, kl_coef))


def wire_vtrace_credit(settings: Settings) -> Credit:
    """V-trace from the critic's values and from how far the policy is from the one that drew the samples."""
    algorithm = settings.algorithm
    correct = partial(
        vtrace,
        max_ratio=algorithm.vtrace_max_ratio,
        max_trace=algorithm.vtrace_max_trace,
        **_recurrence(algorithm),
    )
    credit = partial(credit_by_vtrace, correct=correct, lam=_lam(algorithm), bootstrap=_bootstrap(algorithm))
    return lambda samples, kl_coef: credit(samples, token_rewards=_token_rewards(algorithm, kl_coef))


def wire_return_credit(settings: Settings) -> Credit:
    """Discounted returns of REINFORCE++."""
    credit = partial(credit_by_return, estimate=_estimate(settings.algorithm))
    return lambda samples, kl_coef: credit(samples, token_rewards=_token_rewards(settings.algorithm, kl_coef))


CREDITS: Mapping[str, Callable[[Settings], Credit]] = MappingProxyType(
    {"gae": wire_gae_credit, "vtrace": wire_vtrace_credit, "reinforce_plus_plus": wire_return_credit}
)
"""Estimators that credit each token; all others compare siblings."""


def _lam(algorithm: Algorithm) -> Lambda:
    """Of the advantages."""
    alpha = algorithm.length_adaptive_lam
    return partial(fixed_lam, lam=algorithm.lam) if alpha is None else partial(length_adaptive_lam, alpha=alpha)


def _bootstrap(algorithm: Algorithm) -> Bootstrap:
    return bootstrapped_if_truncated if algorithm.bootstrap_truncated else terminal


def _estimate(algorithm: Algorithm) -> Estimate:
    return partial(generalized_advantages, **_recurrence(algorithm))


def _recurrence(algorithm: Algorithm) -> dict[str, Any]:
    """What GAE and V-trace are told alike."""
    return {
        "gamma": algorithm.gamma,
        "mask_mode": algorithm.mask_mode,
        "backend": algorithm.gae_backend,
        "chunk_size": algorithm.gae_chunk_size,
    }


def _token_rewards(algorithm: Algorithm, kl_coef: float) -> TokenRewards:
    if not algorithm.kl_in_reward:
        return task_token_rewards
    return partial(penalised_token_rewards, kl_estimator=wire_kl(algorithm), kl_coef=kl_coef)


def wire_kl(algorithm: Algorithm) -> Estimator:
    """The estimator of the penalty, wherever it goes."""
    assert algorithm.kl_estimator is not None
    return ESTIMATORS[algorithm.kl_estimator]


def wire_next_kl_coef(algorithm: Algorithm) -> NextKLCoef:
    """A coefficient that stays, or one that is held where the KL of a token is `algorithm.kl_target`."""
    target = algorithm.kl_target
    if target is None or not algorithm.kl_in_reward:
        return lambda samples, kl_coef: kl_coef
    kl_estimator = wire_kl(algorithm)

    def next_kl_coef(samples: Sequence[Sample], kl_coef: float) -> float:
        (kl,) = moments_over_hosts([kl_moments(samples, kl_estimator)])
        num_samples = int(sum_over_hosts(np.asarray(sum(s.mask.any() for s in samples))))
        # Of logprobs that are NaN nothing can be learned, and the coefficient would stay NaN.
        if not kl.count or not math.isfinite(kl.mean):
            return kl_coef
        return adapted_kl_coef(kl_coef, kl.mean, target=target, num_samples=num_samples, horizon=algorithm.kl_horizon)

    return next_kl_coef
