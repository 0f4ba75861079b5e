"""The dtypes of the arrays in a checkpoint: settings may have changed those of moments since it was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import Array

from app.checkpoint.checksums import array_path


def with_saved_dtypes(folder: Path, target: Any) -> Any:
    """Returns shapes of a state, or of a part of it, with the dtypes that its arrays have in a checkpoint."""
    saved = ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree  # pyright: ignore[reportArgumentType]
    dtypes = {array_path(keys): x.dtype for keys, x in jax.tree.leaves_with_path(saved)}

    def with_saved_dtype(keys: Any, x: Any) -> jax.ShapeDtypeStruct:
        # Orbax reports an array that is absent.
        return jax.ShapeDtypeStruct(x.shape, dtypes.get(array_path(keys), x.dtype), sharding=x.sharding)

    return jax.tree.map_with_path(with_saved_dtype, target)


def convert_dtypes(state: Any, target: Any) -> Any:
    """Returns a state with the dtypes of `target`. All hosts must call it together."""

    def convert(x: Array, like: jax.ShapeDtypeStruct) -> Array:
        if x.dtype == like.dtype:
            return x
        cast = lambda x: jax.device_put(x, jax.memory.Space.Device).astype(like.dtype)  # noqa: E731
        return jax.jit(cast, out_shardings=like.sharding)(x)

    return jax.tree.map(convert, state, target)
