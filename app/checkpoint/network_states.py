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
    """None for algorithms without a critic."""
    kl_coef: float = 0.0
    """Weight of the KL penalty in the reward; it changes if the penalty is adaptive."""

    @property
    def networks(self) -> NetworkStates:
        """The tree stored in a checkpoint."""
        return {"policy": self.policy} if self.critic is None else {"policy": self.policy, "critic": self.critic}

    @classmethod
    def from_networks(cls, networks: NetworkStates, *, kl_coef: float) -> RunState:
        """Returns the state with these `networks`."""
        return cls(networks["policy"], networks.get("critic"), kl_coef)
