"""Loading of saved policy weights, for evaluation and export."""

from __future__ import annotations

from jax.sharding import Mesh

from app.checkpoint.saved_policy import PolicyCheckpoint
from app.model.decoder import Params
from app.runtime.model_spec import ModelSpec
from app.runtime.session import Session


def load_policy_params(checkpoint: PolicyCheckpoint, session: Session) -> Params:
    """Loads all weights of a saved policy onto the mesh of the session.

    With adapters, the result also contains the weights of `model.path`, which may be quantized; the rest is float32.
    `checkpoint.check_compatible` must have passed. All hosts must call it together.

    Raises:
        InputError: the saved weights are damaged.
    """
    return session.full_params(load_trained_params(checkpoint, session.model_spec, session.mesh))


def load_trained_params(checkpoint: PolicyCheckpoint, model: ModelSpec, mesh: Mesh) -> Params:
    """Loads the trained weights: the adapters if there are any, else all. See `load_policy_params`."""
    definition = model.policy_definition
    shapes, shardings = map(definition.trainable, (definition.shapes, definition.shardings(mesh)))
    return checkpoint.restore_params(shapes, shardings)
