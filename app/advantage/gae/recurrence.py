"""Conversion of rewards, values and masks into the terms of one linear recurrence.

    delta_t = reward_t + gamma V_{t+1} - V_t,      A_t = delta_t + (1 - leak_t) A_{t+1},      G_t = A_t + V_t

These terms express masks, ends of sequences, bootstrapped truncation, packed rows and per-step discounts. Numbers
close to 1 are stored as their distance from 1, since a float32 near 1 lacks the digits that determine how far back a
reward counts. The leak is 1 - gamma lambda, and delta is reward + ((V_{t+1} - V_t) - (1 - gamma) V_{t+1}): the
difference of two close values is exact, and no reward is rounded to the precision of the values.

Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", eq. 16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

HostOrDevice = Any
"""numpy or `jax.Array`."""
Number = float | np.ndarray
PerToken = Float32[Array, ""] | Float32[Array, "B T"]


class TokenAdvantages(NamedTuple):
    """Advantages and returns of every token; 0 where the mask is False."""

    advantages: Float32[HostOrDevice, "B T"]
    returns: Float32[HostOrDevice, "B T"]
    """The critic's targets: advantages + values, or V-trace's targets."""


class Discounts(NamedTuple):
    """Gamma and lambda as the recurrence uses them, with full float32 precision."""

    one_minus_gamma: PerToken
    """1 - gamma: fraction that a value loses per step."""
    one_minus_decay: PerToken
    """1 - gamma lambda: fraction that an advantage loses per step."""

    @classmethod
    def create(cls, gamma: Number, lam: Number) -> Discounts:
        """Returns the discounts of numbers or [B, T] arrays in [0, 1]; differences from 1 are computed in float64."""
        gamma, lam = np.asarray(gamma, np.float64), np.asarray(lam, np.float64)
        parts = 1 - gamma, (1 - gamma) + gamma * (1 - lam)
        return cls(*(jnp.asarray(part, jnp.float32) for part in parts))


class RecurrenceTerms(NamedTuple):
    """Terms of the recurrence in the module docstring, per token."""

    deltas: Float32[Array, "B T"]
    """TD errors, delta_t."""
    values: Float32[Array, "B T"]
    one_minus_decay: PerToken
    """1 - gamma lambda; 1 at the end of a sequence, 0 on a skipped token. After a row, the advantage is 0."""


class GaeRows(NamedTuple):
    """Float32 rows, each with one sequence or several consecutive ones."""

    rewards: Float32[Array, "B T"]
    values: Float32[Array, "B T"]
    last_values: Float32[Array, "B"]
    """Value after the row's last step."""
    mask: Bool[Array, "B T"] | None
    """True on tokens whose results count; None = all."""
    ends: Bool[Array, "B T"] | None
    """True on the last token of each sequence; has no effect on the row's last token."""
    bootstrap: Float32[Array, "B T"] | None
    """Value after a sequence, read where `ends` is True; None = 0."""

    def shift_to_next_step(self, values: Float32[Array, "B T"]) -> Float32[Array, "B T"]:
        """Returns the value after each step; at an end, the value after the sequence."""
        next_values = jnp.concatenate([values[:, 1:], self.last_values[:, None]], axis=1)
        if self.ends is None:
            return next_values
        after = jnp.zeros_like(next_values) if self.bootstrap is None else self.bootstrap
        # Whether or not the last column is marked as an end, the value after it is in `last_values`.
        is_last = jnp.arange(next_values.shape[1]) == next_values.shape[1] - 1
        return jnp.where(self.ends & ~is_last, after, next_values)

    def reset_at_ends(self, one_minus_decay: PerToken) -> PerToken:
        """Returns `one_minus_decay`, set to 1 at every end because the next token belongs to another sequence."""
        return one_minus_decay if self.ends is None else jnp.where(self.ends, 1.0, one_minus_decay)


def step_through_masked(rows: GaeRows, discounts: Discounts) -> RecurrenceTerms:
    """Makes every token a step; the mask only selects the tokens whose advantages count."""
    next_values = rows.shift_to_next_step(rows.values)
    deltas = rows.rewards + ((next_values - rows.values) - discounts.one_minus_gamma * next_values)
    return RecurrenceTerms(deltas, rows.values, rows.reset_at_ends(discounts.one_minus_decay))


def zero_masked(rows: GaeRows, discounts: Discounts) -> RecurrenceTerms:
    """Makes every masked token a step with reward 0 and value 0, which decays advantages like any other step."""
    if rows.mask is not None:
        written = {name: jnp.where(rows.mask, getattr(rows, name), 0.0) for name in ("rewards", "values")}
        rows = rows._replace(**written)
    return step_through_masked(rows, discounts)


def skip_masked(rows: GaeRows, discounts: Discounts) -> RecurrenceTerms:
    """Skips masked tokens: the step before such a token continues with the step after it."""
    if rows.mask is None or rows.rewards.shape[1] == 0:
        return step_through_masked(rows, discounts)
    mask = rows.mask
    values = jnp.where(mask, rows.values, 0.0)
    # The value of the first step at or after each token: looked up rather than summed, so that it is exact.
    # A masked end gets the value after its sequence.
    worth = jnp.where(mask, values, rows.shift_to_next_step(values))
    last = mask.shape[1] - 1
    stops = mask | (jnp.arange(mask.shape[1]) == last)
    stops = stops if rows.ends is None else stops | rows.ends
    nearest = jax.lax.cummin(jnp.where(stops, jnp.arange(mask.shape[1]), last), axis=1, reverse=True)
    next_values = rows.shift_to_next_step(jnp.take_along_axis(worth, nearest, axis=1))
    # A skipped token is a step without loss, reward or difference.
    deltas = rows.rewards + ((next_values - values) - discounts.one_minus_gamma * next_values)
    return RecurrenceTerms(
        deltas=jnp.where(mask, deltas, 0.0),
        values=values,
        one_minus_decay=rows.reset_at_ends(jnp.where(mask, discounts.one_minus_decay, 0.0)),
    )


MASK_MODES = {"skip": skip_masked, "through": step_through_masked, "zero": zero_masked}
"""Maps a mask mode to the function that computes the terms of the recurrence from rows and discounts."""


def make_gae_rows(
    rewards: HostOrDevice,
    values: HostOrDevice,
    *,
    mask: HostOrDevice | None,
    ends: HostOrDevice | None,
    bootstrap: HostOrDevice | None,
) -> GaeRows:
    """Converts the inputs to float32 and bool, and separates the value after each row from the values of its tokens."""
    num_tokens = rewards.shape[1]
    return GaeRows(
        rewards=jnp.asarray(rewards, jnp.float32),
        values=jnp.asarray(values[:, :num_tokens], jnp.float32),
        last_values=jnp.asarray(values_after_rows(values, num_tokens, bootstrap), jnp.float32),
        mask=None if mask is None else jnp.asarray(mask, bool),
        ends=None if ends is None else jnp.asarray(ends, bool),
        bootstrap=None if bootstrap is None else jnp.asarray(bootstrap, jnp.float32),
    )


def values_after_rows(values: HostOrDevice, num_tokens: int, bootstrap: HostOrDevice | None) -> HostOrDevice:
    """Returns the value after each row's last step, [B]: column T of `values`, else the last bootstrap, else 0."""
    if values.shape[1] > num_tokens:
        return values[:, num_tokens]
    return np.zeros(values.shape[0], np.float32) if bootstrap is None or num_tokens == 0 else bootstrap[:, -1]
