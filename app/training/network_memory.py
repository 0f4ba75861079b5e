"""Computes the bytes per device of the networks and their training state from shapes, without allocating arrays."""

from __future__ import annotations

import jax.numpy as jnp

from app.mesh.devices import device_platform
from app.mesh.placement import abstract_arrays, bytes_per_device
from app.model.decoder import DecoderDefinition
from app.runtime.model_spec import NetworkSpec
from app.runtime.scoring import ScoringSession
from app.training.learner import Learner, LearnerGroup

MemoryBreakdown = dict[str, int]
"""Maps the name of a buffer to its bytes on each device."""


def host_bytes(session: ScoringSession, learning: LearnerGroup) -> int:
    """Returns the host-memory bytes per device of offloaded arrays: moments, and weights of the reference."""
    moments = bytes_per_device(learning.layout, in_host_memory=True)
    return moments + (sum(reference_bytes(session).values()) if _is_reference_away(session) else 0)


def _is_reference_away(session: ScoringSession) -> bool:
    # On a CPU, an offloaded reference stays in the same memory.
    return session.settings.offloads_reference and device_platform(session.mesh.devices.flat[0]) != "cpu"


def network_bytes(
    session: ScoringSession, learning: LearnerGroup, reward_model: NetworkSpec | None = None
) -> MemoryBreakdown:
    """Returns the bytes of each buffer of weights or moments that stays on a device throughout the run."""
    sizes: MemoryBreakdown = {}
    sizes["weights"], sizes["optimizer"] = _learner_bytes(learning.policy)
    if learning.critic:
        sizes["critic"], sizes["critic_optimizer"] = _learner_bytes(learning.critic)
    if reward_model is not None:
        dtype = jnp.dtype(session.settings.model.dtype)
        sizes["reward_model"] = _weight_bytes(session, reward_model.definition.held_in(dtype))
    if not _is_reference_away(session):
        sizes |= reference_bytes(session)
    return sizes


def reference_bytes(session: ScoringSession) -> MemoryBreakdown:
    """Returns the bytes per device of the reference's own weights; empty if it has none."""
    has_weights = "reference" in session.settings.scored_roles and session.has_own_reference
    return {"reference": _weight_bytes(session, session.held_reference)} if has_weights else {}


def _weight_bytes(session: ScoringSession, definition: DecoderDefinition) -> int:
    return bytes_per_device(abstract_arrays(definition.shapes, definition.shardings(session.mesh)))


def _learner_bytes(learner: Learner) -> tuple[int, int]:
    """Returns the bytes per device of a network's weights, including frozen weights, and of its optimizer state."""
    trained = bytes_per_device(learner.layout.params)
    return trained + bytes_per_device(learner.frozen_layout), bytes_per_device(learner.layout) - trained
