"""The weights of a policy that a run has saved: what is evaluated, exported and replayed."""

from __future__ import annotations

from jax.sharding import Mesh

from app.checkpoint.policy_checkpoint import PolicyCheckpoint
from app.model.decoder import Params
from app.runtime.model_spec import ModelSpec
from app.runtime.session import Session


def load_policy_params(checkpoint: PolicyCheckpoint, session: Session) -> Params:
    """All of them, on the mesh of the session.

    With adapters these beside the weights of `model.path`, in codes where these are quantized; all else in float32.

    `session.scorer` and `session.engine.weights` take them as they are. `saved.check` must have passed. All hosts call
    it together.

    Raises:
        InputError: they are damaged.
    """
    return session.full_params(load_trained_params(checkpoint, session.model_spec, session.mesh))


def load_trained_params(checkpoint: PolicyCheckpoint, model: ModelSpec, mesh: Mesh) -> Params:
    """Those that learned: adapters where there are any, else all. As `load_policy`."""
    definition = model.policy_definition
    shapes, shardings = map(definition.trainable, (definition.shapes, definition.shardings(mesh)))
    return checkpoint.restore_params(shapes, shardings)
