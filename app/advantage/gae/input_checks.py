"""Checks of GAE inputs, made on the host because a compiled program cannot check numbers."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool


def check_inputs(
    rewards: np.ndarray, values: np.ndarray, *, mask: np.ndarray | None = None, mask_mode: str = "skip"
) -> None:
    """Checks that `generalized_advantages` is defined for these arrays.

    Raises:
        ValueError: shapes do not match, or a number that would be read is not finite in float32; the message gives its
            row and index.
    """
    check_shapes(rewards.shape, values.shape, None if mask is None else mask.shape)
    # Masked tokens may hold any number in the modes that do not read them.
    read = None if mask is None or mask_mode == "through" else mask.astype(bool)
    check_finite("rewards", rewards, read_mask=read)
    check_finite("values", values, read_mask=read)


def check_shapes(rewards: tuple[int, ...], values: tuple[int, ...], mask: tuple[int, ...] | None = None) -> None:
    """Raises ValueError if the shape of values or mask does not match that of the rewards."""
    if len(rewards) != 2:
        raise ValueError(f"rewards: expected [B, T], got the shape {list(rewards)}")
    num_rows, num_tokens = rewards
    for name, shape, allowed in (
        ("values", values, (rewards, (num_rows, num_tokens + 1))),
        ("mask", rewards if mask is None else mask, (rewards,)),
    ):
        if tuple(shape) not in allowed:
            expected = " or ".join(str(list(one)) for one in allowed)
            raise ValueError(
                f"{name}: shape {list(shape)} does not match rewards of shape {list(rewards)}, expected {expected}"
            )


def check_finite(
    name: str,
    x: np.ndarray,
    *,
    read_mask: Bool[np.ndarray, "B T"] | None = None,
    hint: str = "expected a finite float32",
) -> None:
    """Raises ValueError for the first NaN or infinity; columns beyond those of `read_mask` are also checked."""
    with np.errstate(over="ignore", invalid="ignore"):
        as_float32 = x.astype(np.float32, copy=False)
        # A sum takes a quarter of the time; it may overflow although every number is finite.
        if np.isfinite(as_float32.sum()):
            return
    bad = ~np.isfinite(as_float32)
    if read_mask is not None:
        bad[:, : read_mask.shape[1]] &= read_mask
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        raise ValueError(f"{name}: row {row}, index {column} is {x[row, column]}; {hint}")
