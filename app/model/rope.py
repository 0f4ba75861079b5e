"""Rotary position embedding: its fields in `config.json`, and its frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32

from app.model.io.config_fields import HfConfig, positive_float, positive_int
from settings.errors import InputError

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding over the whole head ("two halves" pairing)."""

    theta: float
    rope_type: str = "default"
    """`default`, `linear` or `llama3`."""
    factor: float = 1.0
    """The factor by which the context was extended after pre-training; unused by `default`."""
    low_frequency_factor: float = 1.0
    """Used by `llama3` only, like the two fields below."""
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192


def parse_rope(fields: HfConfig, *, max_positions: int, default_theta: float = DEFAULT_THETA) -> RopeConfig:
    """Parses the rope from an object with `rope_theta`, `rope_type` and the fields of that type.

    Args:
        max_positions: the original context length of a `llama3` rope if the object does not contain it.

    Raises:
        InputError: the type is not supported, or fields are missing or contradictory.
    """
    partial = fields.get("partial_rotary_factor")
    if partial not in (None, 1):
        raise InputError(f"config.json: partial_rotary_factor={partial!r} is not supported; it must be 1")
    kind = fields.get("rope_type", fields.get("type", "default"))
    theta = positive_float(fields, "rope_theta", default_theta)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, positive_float(fields, "factor"))
    if kind != "llama3":
        raise _unknown_rope_error(kind)
    rope = RopeConfig(
        theta=theta,
        rope_type=kind,
        factor=positive_float(fields, "factor"),
        low_frequency_factor=positive_float(fields, "low_freq_factor"),
        high_frequency_factor=positive_float(fields, "high_freq_factor"),
        original_max_positions=positive_int(fields, "original_max_position_embeddings", max_positions),
    )
    if rope.high_frequency_factor <= rope.low_frequency_factor:
        raise InputError(
            f"config.json: high_freq_factor={rope.high_frequency_factor} must exceed "
            f"low_freq_factor={rope.low_frequency_factor}"
        )
    return rope


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float32[np.ndarray, " H/2"]:
    """Returns the radians per position of each rotated pair.

        default   f_i = theta^(-2i / H)
        linear    f_i / factor
        llama3    f_i              if the wavelength 2 pi / f_i < original / high
                  f_i / factor     if it is > original / low
                  (1 - s) f_i / factor + s f_i   between, s = (original f_i / (2 pi) - low) / (high - low)

    Raises:
        InputError: the type is not supported.

    Source: Su et al. 2021 (RoFormer) eq. 15; Chen et al. 2023 (position interpolation);
    Llama 3.1 reference code, `apply_scaling`.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # Models were trained with torch's float32 powers. numpy's differ in the last bit; rounded float64 powers do not.
    powers = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / powers
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        turns = rope.original_max_positions * frequencies / (2 * np.pi)
        low, high = rope.low_frequency_factor, rope.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return ((1 - kept) * frequencies / rope.factor + kept * frequencies).astype(np.float32)
    raise _unknown_rope_error(rope.rope_type)


def _unknown_rope_error(kind: Any) -> InputError:
    return InputError(f"config.json: rope type {kind!r} is not supported; supported: default, linear, llama3")
