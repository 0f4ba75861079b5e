"""The state of a run that changes from step to step, except its position in the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.update.optimizer import TrainState

NetworkStates = Mapping[str, TrainState]
"""States of the trained networks, or their shapes or shardings: `policy`, and `critic` if there is one."""


@dataclass(frozen=True)
class RunState:
    policy: TrainState
    critic: TrainState | None = None
    """None, and no memory, for algorithms without one."""
    kl_coef: float = 0.0
    """Weight of the KL in the reward, which an adapted penalty changes."""

    @property
    def networks(self) -> NetworkStates:
        """The tree that a checkpoint stores."""
        return {"policy": self.policy} if self.critic is None else {"policy": self.policy, "critic": self.critic}

    @classmethod
    def from_networks(cls, networks: NetworkStates, *, kl_coef: float) -> RunState:
        """Returns the state whose `networks` these are."""
        return cls(networks["policy"], networks.get("critic"), kl_coef)
