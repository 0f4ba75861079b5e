"""Rewards, values and masks -> the terms of one linear recurrence.

Masks, ends of sequences, bootstrapped truncation, packed rows and per-step discounts are all data of

    delta_t = reward_t + discount_t * next_value_t - value_t
    A_t     = delta_t + decay_t * A_{t+1}
    G_t     = A_t + value_t

Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", eq. 16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

HostOrDevice = Any
"""numpy or `jax.Array`."""


class Credit(NamedTuple):
    """What a backend makes of the terms; 0 where the mask is False."""

    advantages: Float32[HostOrDevice, "B T"]
    returns: Float32[HostOrDevice, "B T"]
    """advantages + values: what the critic should have said."""


class Terms(NamedTuple):
    """The recurrence above, token by token."""

    rewards: Float32[Array, "B T"]
    values: Float32[Array, "B T"]
    next_values: Float32[Array, "B T"]
    """The value of what follows each step: 0 behind a terminal one."""
    discounts: Float32[Array, ""] | Float32[Array, "B T"]
    decays: Float32[Array, ""] | Float32[Array, "B T"]
    """discount * lambda where the sequence goes on, 0 where it ends, 1 where a token is passed over."""
    mask: Bool[Array, "B T"] | None
    """Whose results count; None = all."""

    @property
    def deltas(self) -> Float32[Array, "B T"]:
        """The one-step temporal differences."""
        return self.rewards + self.discounts * self.next_values - self.values

    def credit(self, advantages: Float32[Array, "B T"]) -> Credit:
        """The solution, with what is masked set to 0."""
        returns = advantages + self.values
        if self.mask is None:
            return Credit(advantages, returns)
        return Credit(jnp.where(self.mask, advantages, 0.0), jnp.where(self.mask, returns, 0.0))


class Rows(NamedTuple):
    """Rows of one sequence or several, one after another; float32."""

    rewards: Float32[Array, "B T"]
    values: Float32[Array, "B T"]
    last_values: Float32[Array, "B"]
    """What follows the row's last step."""
    mask: Bool[Array, "B T"] | None
    ends: Bool[Array, "B T"] | None
    """True on the last token of each sequence but the row's last one, where it makes no difference."""
    bootstrap: Float32[Array, "B T"] | None
    """Read where `ends`: what follows that sequence; None = 0."""

    def behind(self, values: Float32[Array, "B T"]) -> Float32[Array, "B T"]:
        """`values` one step on, and at an end what follows the sequence."""
        behind = jnp.concatenate([values[:, 1:], self.last_values[:, None]], axis=1)
        if self.ends is None:
            return behind
        after = jnp.zeros_like(behind) if self.bootstrap is None else self.bootstrap
        # The last column may be marked as an end or not; its value is that of `last_values`.
        is_last = jnp.arange(behind.shape[1]) == behind.shape[1] - 1
        return jnp.where(self.ends & ~is_last, after, behind)

    def until_ends(self, decays: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
        """0 at every end, where what comes next belongs to another sequence."""
        return decays if self.ends is None else jnp.where(self.ends, 0.0, decays)


Discount = Float32[Array, ""] | Float32[Array, "B T"]
MaskMode = Callable[[Rows, Discount, Discount], Terms]
"""(rows, gamma, lambda) -> what masked tokens mean."""


def through(rows: Rows, gamma: Discount, lam: Discount) -> Terms:
    """Every token is a step; the mask only says whose advantages count."""
    return Terms(rows.rewards, rows.values, rows.behind(rows.values), gamma, rows.until_ends(gamma * lam), rows.mask)


def zero(rows: Rows, gamma: Discount, lam: Discount) -> Terms:
    """A masked token is a step with reward 0 and value 0 that still decays."""
    if rows.mask is not None:
        written = {name: jnp.where(rows.mask, getattr(rows, name), 0.0) for name in ("rewards", "values")}
        rows = rows._replace(**written)
    return through(rows, gamma, lam)


def skip(rows: Rows, gamma: Discount, lam: Discount) -> Terms:
    """A masked token is no step: the recursion passes over it, from the step before to the step after."""
    if rows.mask is None or rows.rewards.shape[1] == 0:
        return through(rows, gamma, lam)
    mask = rows.mask
    ends = jnp.zeros_like(mask) if rows.ends is None else rows.ends
    masked = rows._replace(rewards=jnp.where(mask, rows.rewards, 0.0), values=jnp.where(mask, rows.values, 0.0))
    # What the first step at or behind each token is worth: looked up rather than added up, so that it is exact.
    # An end that is masked is worth what follows its sequence.
    worth = jnp.where(mask, masked.values, masked.behind(masked.values))
    last = mask.shape[1] - 1
    stops = mask | ends | (jnp.arange(mask.shape[1]) == last)
    nearest = jax.lax.cummin(jnp.where(stops, jnp.arange(mask.shape[1]), last), axis=1, reverse=True)
    next_values = jnp.where(mask, masked.behind(jnp.take_along_axis(worth, nearest, axis=1)), 0.0)
    decays = masked.until_ends(jnp.where(mask, gamma * lam, 1.0))
    return Terms(masked.rewards, masked.values, next_values, gamma, decays, mask)


MASK_MODES: Mapping[str, MaskMode] = MappingProxyType({"skip": skip, "through": through, "zero": zero})


def rows_of(
    rewards: HostOrDevice,
    values: HostOrDevice,
    *,
    mask: HostOrDevice | None,
    ends: HostOrDevice | None,
    bootstrap: HostOrDevice | None,
) -> Rows:
    """Everything in float32, the value behind the row apart from those on it."""
    num_tokens = rewards.shape[1]
    return Rows(
        rewards=jnp.asarray(rewards, jnp.float32),
        values=jnp.asarray(values, jnp.float32)[:, :num_tokens],
        last_values=jnp.asarray(last_values_of(values, num_tokens, bootstrap), jnp.float32),
        mask=None if mask is None else jnp.asarray(mask, bool),
        ends=None if ends is None else jnp.asarray(ends, bool),
        bootstrap=None if bootstrap is None else jnp.asarray(bootstrap, jnp.float32),
    )


def last_values_of(values: HostOrDevice, num_tokens: int, bootstrap: HostOrDevice | None) -> HostOrDevice:
    """[B]: what follows each row's last step, by one more value, by the last bootstrap, or 0."""
    if values.shape[1] > num_tokens:
        return values[:, num_tokens]
    return np.zeros(values.shape[0], np.float32) if bootstrap is None or num_tokens == 0 else bootstrap[:, -1]


def as_float32(x: float | np.ndarray | Array) -> Array:
    return jnp.asarray(x, jnp.float32)
