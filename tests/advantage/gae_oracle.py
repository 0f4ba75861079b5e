"""Computes generalized advantage estimation in float64, one token after another."""

from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    rewards: np.ndarray
    values: np.ndarray
    mask: np.ndarray | None = None
    ends: np.ndarray | None = None
    bootstrap: np.ndarray | None = None


def oracle(case: Case, *, gamma, lam, mask_mode: str = "skip") -> tuple[np.ndarray, np.ndarray]:
    """Returns advantages and returns, [B, T] float64. `gamma` and `lam` are numbers or [B, T]."""
    rewards, values = case.rewards.astype(np.float64), case.values.astype(np.float64)
    shape = rewards.shape
    mask = np.ones(shape, bool) if case.mask is None else case.mask
    ends = np.zeros(shape, bool) if case.ends is None else case.ends
    after = np.zeros(shape) if case.bootstrap is None else case.bootstrap.astype(np.float64)
    last = values[:, shape[1]] if values.shape[1] > shape[1] else after[:, -1]
    values = values[:, : shape[1]]
    if mask_mode != "through":
        rewards, values = np.where(mask, rewards, 0), np.where(mask, values, 0)
    gamma, lam = np.broadcast_to(gamma, shape), np.broadcast_to(lam, shape)
    advantages = np.zeros(shape)
    for row in range(shape[0]):
        # Python floats are float64 as well, and ten times as fast as numpy scalars.
        columns = (x[row].tolist() for x in (rewards, values, mask, ends, after, gamma, lam))
        steps, found = list(zip(*columns, strict=True)), [0.0] * shape[1]
        advantage, next_value = 0.0, float(last[row])
        for t in reversed(range(shape[1])):
            reward, value, is_written, is_end, value_after, gamma_t, lam_t = steps[t]
            if is_end and t < shape[1] - 1:
                advantage, next_value = 0.0, value_after
            if mask_mode == "skip" and not is_written:
                continue
            delta = reward + gamma_t * next_value - value
            found[t] = advantage = delta + gamma_t * lam_t * advantage
            next_value = value
        advantages[row] = found
    return np.where(mask, advantages, 0), np.where(mask, advantages + values, 0)


def random_case(rng: np.random.Generator, shape: tuple[int, int], *, masked: bool, packed: bool) -> Case:
    """Returns normal rewards and values; 60 % of tokens are unmasked, and every tenth ends a bootstrapped sequence."""

    def normal(*size: int) -> np.ndarray:
        return rng.standard_normal(size, np.float32)

    rows, num_tokens = shape
    return Case(
        normal(*shape),
        normal(rows, num_tokens) if packed else normal(rows, num_tokens + 1),
        rng.random(shape) < 0.6 if masked else None,
        rng.random(shape) < 0.1 if packed else None,
        normal(*shape) if packed else None,
    )
