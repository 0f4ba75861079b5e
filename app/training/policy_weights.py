"""The weights of a policy that a run has saved, whole: what is evaluated, exported and replayed."""

from __future__ import annotations

from app.policy.decoder import Params
from app.training.saved_policy import SavedPolicy
from app.training.session import Session


def load_policy(saved: SavedPolicy, session: Session) -> Params:
    """All of them, float32, on the mesh of the session; with adapters these beside the weights of `model.path`.

    `session.scorer` and `session.engine.weights` take them as they are. `saved.check` must have passed. All hosts call
    it together.

    Raises:
        InputError: they are damaged.
    """
    definition = session.input.adapted
    shapes, shardings = map(definition.trained, (definition.shapes, definition.shardings(session.mesh)))
    return session.whole(saved.read(shapes, shardings))
