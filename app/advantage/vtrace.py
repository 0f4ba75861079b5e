"""V-trace: value targets and advantages for off-policy samples, computed with the GAE recurrence."""

from __future__ import annotations

import numpy as np

from app.advantage.gae.numpy_scan import Sequences, Steps, flatten, solve_variable_decay
from app.advantage.gae.recurrence import Number, TokenAdvantages

MAX_RATIO = 1.0
"""The clip bounds rho_bar and c_bar of ratios. With rho_bar = 1, the targets estimate the current policy's values."""


@np.errstate(over="ignore", invalid="ignore")  # The caller checks the results.
def vtrace(
    rewards: np.ndarray,
    values: np.ndarray,
    log_ratios: np.ndarray,
    *,
    gamma: Number,
    lam: Number,
    mask: np.ndarray | None = None,
    ends: np.ndarray | None = None,
    bootstrap: np.ndarray | None = None,
) -> TokenAdvantages:
    """Solves v_t - V_t = rho_t * delta_t + gamma * c_t * (v_{t+1} - V_{t+1}), delta_t = r_t + gamma V_{t+1} - V_t.

    The returns are v_t. The advantages are r_t + gamma * (lam * v_{t+1} + (1 - lam) * V_{t+1}) - V_t. The loss applies
    the factor rho_t of the policy gradient: if it were part of the advantage, whitening would give a token with rho 0
    the advantage -mean / std at full weight.

    Here rho_t = min(1, ratio_t) and c_t = lam * rho_t. If all ratios are 1, targets and advantages equal those of GAE.
    Tokens that the policy did not write are skipped.

    Args:
        log_ratios: [B, T], log(pi / mu), where pi is the target policy and mu the policy that sampled the token.

    For the other arguments see `app.advantage.gae.estimate.generalized_advantages`.

    Source: Espeholt et al. 2018 (IMPALA), eq. 1 and section 4.2; lambda: remark 2 for the targets, rlax for the
    advantages. Both multiply the advantages by rho_t.
    """
    tokens = Sequences.from_rows(rewards, values, ends=ends, bootstrap=bootstrap)
    written = np.ones(rewards.size, bool) if mask is None else flatten(mask, bool)
    gammas, lams = (np.broadcast_to(x, rewards.shape).reshape(-1).astype(np.float64) for x in (gamma, lam))
    steps = Steps.from_tokens(tokens, written, gammas, lams)
    # Clip before exp, which could overflow.
    ratios = np.exp(np.minimum(flatten(log_ratios, np.float64)[written], np.log(MAX_RATIO)))
    corrections = solve_variable_decay(ratios * steps.deltas, steps.decays * ratios)
    next_corrections = np.append(corrections[1:], 0.0)[: len(corrections)]
    tokens.output.advantages[written] = steps.deltas + steps.decays * next_corrections
    tokens.output.returns[written] = steps.values + corrections
    return TokenAdvantages(*(x.reshape(rewards.shape) for x in tokens.output))
