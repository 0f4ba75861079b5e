"""The policy of a model or a checkpoint: what is read before any device is used, and its weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from app.checkpoint.saved_policy import PolicyCheckpoint
from app.model.decode_weights import DecodeWeights
from app.model.decoder import Params
from app.runtime.environments import prepare_turns
from app.runtime.model_spec import ModelSpec, check_context_length, read_model_spec
from app.runtime.pinned_revisions import pin_revisions
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from settings import Settings


class PolicySource(NamedTuple):
    settings: Settings
    """The settings, with hub models at the commits that the checkpoint's run used."""
    model: ModelSpec
    saved_policy: PolicyCheckpoint | None
    """The checkpoint with the weights; None for those of `model.path`."""

    def load_decode_weights(self, session: Session) -> DecodeWeights:
        """Loads the decode weights; nothing else of the model stays on the devices. All hosts must call it together."""
        scoring, saved = session.scoring, self.saved_policy
        weights = session.to_decode_weights(
            scoring.load_params() if saved is None else load_policy_params(saved, scoring)
        )
        scoring.free_frozen_params()
        return weights


def read_policy_source(settings: Settings, checkpoint: Path | None) -> PolicySource:
    """Reads model files, tokenizer and checkpoint. Without a checkpoint, the model has no adapters.

    Raises:
        InputError: one of them cannot be used, they do not fit each other, or the context is too short.
    """
    saved = None if checkpoint is None else PolicyCheckpoint.open(checkpoint)
    settings = settings if saved is None else pin_revisions(settings, saved.run)
    model = read_model_spec(settings)
    if saved is None:
        model = model.without_adapters
    else:
        saved.check_compatible(model)
    check_context_length(model.architecture, settings, path=settings.model.path)
    prepare_turns(settings, model.tokenizer)
    return PolicySource(settings, model, saved)


def load_policy_params(checkpoint: PolicyCheckpoint, session: ScoringSession) -> Params:
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
